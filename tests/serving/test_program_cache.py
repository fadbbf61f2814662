"""Executables that are kept on disk, and what they are found by."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxkv.serving import program_cache
from jaxkv.serving.program_cache import FOLDER, Program
from serving.toy_engines import LOWERED, engine, names_of, serve
from support.jobs import environment
from support.toy_model import prompt

X, Y = jnp.arange(4.0), jnp.ones(4)


def added(x, y):
    return x + y, x @ y


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / FOLDER
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def lowered():
    """Names of the functions that are lowered."""
    with names_of(LOWERED) as names:
        yield names


def run(function=added, *, donate=("x",), size=4, options=None):
    """The results of a program of its own, found or compiled."""
    program = Program(function, donate=donate, compiler_options=options)
    x, y = X[:size].copy(), Y[:size]
    program.prepare("size", x, y).compile()
    total, product = program("size", x, y)
    assert x.is_deleted() == ("x" in donate)
    assert (total.tolist(), product) == ((X[:size] + 1).tolist(), X[:size].sum())


def test_an_executable_is_found_by_a_later_program(folder, lowered):
    run()
    assert lowered.count("jit(added)") == 1
    (file,) = folder.iterdir()
    run()
    assert lowered.count("jit(added)") == 1
    assert [*folder.iterdir()] == [file]


def test_it_is_found_by_all_that_it_depends_on(folder, monkeypatch):
    def same(x, y):
        return added(x, y)

    def files():
        return len([*folder.iterdir()])

    run()
    run(size=3)
    run(same)
    assert files() == 3
    with jax.default_matmul_precision("float32"):
        run()
    assert files() == 4
    run(options=lambda size: {"xla_cpu_enable_fast_math": False})
    assert files() == 5
    monkeypatch.setattr(program_cache, "_sources", lambda: "of another version")
    run()
    assert files() == 6
    monkeypatch.setattr(program_cache, "_versions", lambda: ("jax 0.1",))
    run()
    assert files() == 7
    run()
    assert files() == 7


PROCESS = """
import jax.numpy as jnp
from jaxkv.serving.program_cache import Program

def cosines(x):
    return jnp.cos(x), jnp.sort(x)

program = Program(cosines, donate=("x",))
program.prepare("size", jnp.arange(4.0)).compile()
print(*program("size", jnp.arange(4.0)))
"""


def test_executables_of_jaxs_own_cache_are_not_kept(tmp_path):
    """On CPUs, XLA serialises them without their functions, so that they would not run in the next process."""
    settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def printed():
        process = [sys.executable, "-c", PROCESS]
        return subprocess.run(process, env=environment(**settings), capture_output=True, text=True, check=True).stdout

    right = printed()
    (file,) = (tmp_path / FOLDER).iterdir()
    file.unlink()
    assert [printed(), printed()] == [right, right]
    assert [*(tmp_path / FOLDER).iterdir()] == []


def scaled(model, x):
    return model["factor"] * x


def test_another_model_is_noticed():
    program = Program(scaled, donate=(), keeps_first=True)
    model = {"factor": jnp.float32(2)}
    program.prepare("size", model, X).compile()
    for factor in (2, 2, 3):
        model = model if factor == 2 else {"factor": jnp.float32(factor)}
        assert program("size", model, X).tolist() == (factor * X).tolist()
    assert program("size", {"factor": jnp.float32(5), "more": X}, X).tolist() == (5 * X).tolist()


def test_without_a_folder_nothing_is_kept(folder, lowered):
    jax.config.update("jax_compilation_cache_dir", None)
    run()
    run()
    assert not folder.exists()


@pytest.mark.parametrize("content", [b"", b"\x80", pickle.dumps((b"executable", None)), pickle.dumps(3)])
def test_a_file_that_cannot_be_loaded_is_written_anew(folder, content, caplog):
    run()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    run()
    assert f"{file} was not loaded, so that its program is compiled again" in caplog.text
    assert len(file.read_bytes()) == len(whole)
    assert [*folder.iterdir()] == [file]


def test_a_program_runs_if_it_cannot_be_stored(folder, caplog):
    folder.write_text("a file in place of the folder")
    run()
    assert "a program was not stored" in caplog.text


@pytest.mark.usefixtures("toy")
def test_an_engine_that_starts_again_lowers_none_of_its_programs(folder, lowered):
    for lowers in (True, False):
        jax.clear_caches()  # earlier tests may have lowered the same programs in this process
        served = engine(num_blocks=15, max_requests=2, max_num_batched_tokens=16)
        served.warm_up()
        assert ("jit(run_layers)" in lowered) is lowers
        assert ("jit(draw)" in lowered) is lowers
        serve(served, prompt(9))
        lowered.clear()
