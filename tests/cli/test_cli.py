"""What all commands share: options, mistakes, and how they end if a stream fails or on Ctrl-C."""

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest

import jaxkv
from jaxkv.bench import ops, timing
from jaxkv.cli import BENCHMARKS, COMMANDS, demo, layout, main
from jaxkv.terminal import files, memory, progress, streams
from jaxkv.terminal.options import output_file
from jaxkv.terminal.parser import Parser
from jaxkv.testing import equivalence
from jaxkv.testing.equivalence import Outcome
from support.cases import further, slow

FOLDER = Path(__file__).parents[1] / "data" / "models"
HOSTILE = [
    *("-1", "0", "-0", "2147483648", "99999999999", "9" * 5000, "1.5", "1e400", "nan", "inf", "many", "", "\udcff"),
    *("/", "/dev/full", "/no/such", "/" + "x" * 300, "/etc/passwd/x", "../"),
]
MODULES = {
    name: import_module(module)
    for name, module in (COMMANDS | {f"bench {name}": module for name, module in BENCHMARKS.items()}).items()
}
REQUIRED = {
    "generate": ["--model", "/no/such"],
    "serve": ["/no/such"],
    "bench parallel": ["context"],
    **{f"bench {name}": ["/no/such"] for name in ("step", "ttft", "serve", "transfer", "disaggregated")},
}


def options(command):
    """The options of a command that take a value."""
    parser = argparse.ArgumentParser()
    MODULES[command].add_arguments(parser)
    return [action for action in parser._actions if action.option_strings and action.nargs != 0]


@pytest.mark.parametrize("command", MODULES)
def test_hostile_values_end_in_a_line(command, monkeypatch, capsys):
    monkeypatch.setattr(MODULES[command], "run", lambda args: 0)
    for option in options(command):
        for value in HOSTILE:
            with pytest.raises(SystemExit) as ended:
                sys.exit(main([*command.split(), *REQUIRED.get(command, []), f"{option.option_strings[0]}={value}"]))
            *_, last = ["", *capsys.readouterr().err.splitlines()]
            rejected = last.startswith(f"jaxkv {command}: error: argument ")
            assert ended.value.code == (2 if rejected else 0), (option.option_strings, value)


@pytest.mark.parametrize(
    "arguments",
    [
        *("demo --prompts 0", "demo --prompts 3 -1", "demo --tokens -1", "demo --blocks 0", "verify --seed -1"),
        *("verify --calls -1", "verify --calls 0", "bench step x.json --tokens 99999999999"),
        *("bench step x.json --requests 0", "bench offload --heads 0", "bench ops --repeats -1"),
        *("generate --model x --max-tokens 0", "generate --model x --seed 4294967296", "layout --layers 0"),
        *("bench parallel context --repeats 0", "bench parallel tensor --devices 0", "bench ttft x --rounds 0"),
        *("bench ttft x --prefix many", "layout --block-size 1.5"),
    ],
)
def test_numbers_have_bounds(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert " is not an integer from " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "jaxkv: error: the following arguments are required: COMMAND"),
        (["serve-bench"], "jaxkv: error: argument COMMAND: invalid choice: 'serve-bench' "),
        (["bench"], "jaxkv bench: error: the following arguments are required: SUBCOMMAND"),
        (["bench", "--json"], "jaxkv bench: error: the following arguments are required: SUBCOMMAND"),
        (["bench", "decode_mla"], "jaxkv bench: error: argument SUBCOMMAND: invalid choice: 'decode_mla' "),
        (["layot"], "jaxkv: error: argument COMMAND: invalid choice: 'layot' (expected one of demo, generate, "),
        (["bench", "step"], "jaxkv bench step: error: the following arguments are required: config"),
    ],
)
def test_a_command_that_is_missing_or_unknown_is_reported(arguments, line, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    usage, *_, last = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: jaxkv ")
    assert last.startswith(line)


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [("layot", "layout"), ("bench tfft", "ttft"), ("layout --order BLNCH", "BLNHC"), ("layout --format BF16", "bf16")],
)
def test_the_nearest_choice_is_suggested(arguments, nearest, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert capsys.readouterr().err.endswith(f"; did you mean {nearest!r}?)\n")


def test_the_layout_of_keys_and_values(capsys):
    options = "--kv --format int8 --heads 4 --head-dim 64 --layers 2 --blocks 3 --block-size 16 --order BHLNC"
    assert main(["layout", *options.split()]) == 0
    entry = jaxkv.KVEntry("int8", head_dim=64)
    right = jaxkv.CacheLayout(num_layers=2, num_blocks=3, block_size=16, num_heads=4, entry=entry, order="BHLNC")
    assert capsys.readouterr().out == f"{right}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heads 4", "--heads and --head-dim are sizes of keys and values: expected --kv with them"),
        ("--head-dim 4", "--heads and --head-dim are sizes of keys and values: expected --kv with them"),
        ("--format int8", "MLAEntry format 'int8': expected one of bf16, f16, f32, fp8, "),
        ("--kv --format fp8_v4", "KVEntry format 'fp8_v4': expected one of bf16, f16, f32, fp8, "),
    ],
)
def test_options_of_another_kind_of_entry_are_reported(options, message):
    with pytest.raises(SystemExit) as stopped:
        main(["layout", *options.split()])
    assert stopped.value.code.startswith(f"jaxkv layout: {message}")


@pytest.mark.parametrize("command", MODULES)
def test_every_command_explains_its_options(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxkv {command} ")


@pytest.mark.parametrize("command", MODULES)
def test_a_command_is_summarised_by_the_first_line_of_its_docstring(command):
    *bench, name = command.split()
    commands = Parser().add_commands("COMMAND", BENCHMARKS if bench else COMMANDS)
    assert commands.choices[name].description == MODULES[command].__doc__.splitlines()[0]


@pytest.mark.parametrize("load", ["0", "-1", "1e-300", "1e308", "5e-324", "nan", "inf", "much"])
def test_loads_have_bounds(load, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", "x", f"--loads={load}"])
    assert stopped.value.code == 2
    assert f"'{load}' is not a number from 0.001 to 1000" in capsys.readouterr().err


@pytest.mark.parametrize("command", MODULES)
def test_numbers_are_bounded_by_the_shared_types(command):
    assert not [option.option_strings for option in options(command) if option.type is int]


@pytest.mark.parametrize("command", MODULES)
def test_defaults_are_among_the_choices(command):
    parser = argparse.ArgumentParser()
    MODULES[command].add_arguments(parser)
    for action in parser._actions:
        default = parser.get_default(action.dest)
        if action.choices is not None and default is not None:
            given = default if isinstance(default, list | tuple) else [default]
            assert {*given} <= {*action.choices}, action.option_strings


@pytest.mark.parametrize(("terminal", "installed"), [(True, True), (True, False), (False, True)])
def test_progress_is_shown_on_a_terminal_if_tqdm_is_installed(terminal, installed, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if not installed:
        monkeypatch.setattr(progress, "tqdm", None)
    assert [*progress.progress(range(3), "counting")] == [0, 1, 2]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("counting:" in printed.err and "0/3" in printed.err) == (terminal and installed)
    assert (terminal and installed) or printed.err == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("`order` is 'X':\n  expected Y"), "`order` is 'X': expected Y"),
        (MemoryError(), "MemoryError"),
        (OSError(28, "No space left on device", "x.json"), "[Errno 28] No space left on device: 'x.json'"),
        (NotImplementedError("mosaic_gpu: needs a GPU"), "mosaic_gpu: needs a GPU"),
        (
            jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 9 bytes."),
            "does not fit in memory: choose smaller sizes (INTERNAL: Out of memory allocating 9 bytes.)",
        ),
    ],
)
def test_mistakes_end_in_a_line(error, message, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setattr(layout, "run", fail)
    with pytest.raises(SystemExit) as stopped:
        main(["layout"])
    assert stopped.value.code == f"jaxkv layout: {message}"
    assert stopped.value.__suppress_context__ or stopped.value.__context__ is None


def test_faults_of_jaxkv_keep_their_traceback(monkeypatch):
    for error in (KeyError("layer"), jax.errors.JaxRuntimeError("INTERNAL: illegal address")):

        def fail(args, error=error):
            raise error

        monkeypatch.setattr(layout, "run", fail)
        with pytest.raises(type(error)):
            main(["layout"])


def test_a_machine_without_a_device_is_reported(monkeypatch):
    def devices():
        raise AssertionError  # as jax.devices() does for some values of JAX_PLATFORMS

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(SystemExit, match=r"^jaxkv bench ops: JAX has no device with JAX_PLATFORMS=.*`jaxkv doctor`"):
        main(["bench", "ops"])


def test_sizes_beyond_the_memory_are_rejected_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(demo, "_serve", None)
    with pytest.raises(SystemExit, match=r"^jaxkv demo: two caches of 9000000 blocks: .* GB do not fit in memory"):
        main(["demo", "--blocks", "9000000"])
    model = str(FOLDER / "deepseek_v3")
    with pytest.raises(SystemExit, match=r"^jaxkv bench step: .*/deepseek_v3, with a cache of 30000000 blocks of 64 "):
        main(["bench", "step", model, "--requests", "30000000", "--tokens", "1"])
    with pytest.raises(SystemExit, match=r"^jaxkv generate: --blocks 30000000, beside the weights: "):
        main(["generate", "--model", model, "--ids", "1", "--blocks", "30000000"])


LIMIT = 10**10
"""Bytes of memory in the following tests."""
TOO_LARGE = [
    *("parallel context --requests 30000000 --tokens 1", "parallel context --heads 2147483647"),
    *("parallel tensor --heads 30000000", "offload --blocks 30000000", "offload --heads 2147483647"),
    *("offload --heads 5000000", "offload --requests 50000 --tokens 1 --heads 128", "offload --blocks 20000"),
    *("hot-rows --heads 2147483647", "hot-rows --requests 1000 --tokens 5000", "hot-rows --rows 10000000 --layers 1"),
    *("step MODEL --requests 1 --tokens 20000000 --new-tokens 20000000", "step MODEL --requests 100000 --tokens 1"),
    *("ttft MODEL --prefix 1000000 --chunk 1000000", "serve MODEL --chunk 2147483647"),
    *("serve MODEL --max-num-batched-tokens 2000000000", "serve MODEL --max-requests 100000 --prompt 1 --output 1"),
    "serve MODEL --prompt 100000 --output 1",
]


@pytest.mark.parametrize("arguments", TOO_LARGE)
def test_all_arrays_of_a_command_count(arguments, monkeypatch):
    monkeypatch.setattr("jaxkv.terminal.memory.device_memory", lambda device: LIMIT)
    with pytest.raises(SystemExit, match=r" GB do not fit in memory, cpu has 10.00 GB; take smaller sizes"):
        main(["bench", *arguments.replace("MODEL", str(FOLDER / "llama")).split()])


def test_a_container_limits_the_memory(monkeypatch, tmp_path):
    limits = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", limits)
    whole = memory.host_memory()
    for file in limits:
        for text, expected in (("max\n", whole), (f"{2**63 - 4096}\n", whole), ("12345\n", 12345)):
            file.write_text(text)
            assert memory.host_memory() == expected
        file.unlink()


def test_what_is_on_the_host_counts(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: 1000)
    memory.require_memory("a cache", 600, on_host=400)
    with pytest.raises(ValueError, match=r"a cache: 0.0 MB do not fit in memory, cpu has 0.0 MB"):
        memory.require_memory("a cache", 600, on_host=401)


class TestNothing:
    """A command that checked or timed nothing exits with an error."""

    def test_no_operation_was_checked(self, monkeypatch, capsys):
        monkeypatch.setattr(equivalence, "ENTRIES", equivalence.ENTRIES[:1])
        with pytest.raises(SystemExit, match=r"^jaxkv verify: nothing was checked: triton supports no call on this"):
            main(["verify", "--implementation", "triton"])
        assert "decode_mla         bf16          rejected on 6 orders: decode_mla: " in capsys.readouterr().out

    def test_no_random_call_was_made(self, monkeypatch):
        monkeypatch.setattr("jaxkv.testing.families.TRIES", 3)
        with pytest.raises(SystemExit, match=r"^jaxkv verify: nothing was checked: triton supports no call"):
            main(["verify", "--implementation", "triton", "--calls", "3"])

    def test_no_shape_was_timed(self, monkeypatch, tmp_path):
        ceilings = timing.Ceilings(1e9, 1e9, 1e12)
        monkeypatch.setattr(ops, "measure_ceilings", lambda device, *, repeats: ceilings)
        file = tmp_path / "bench.json"
        with pytest.raises(SystemExit, match=r"^jaxkv bench ops: nothing was timed: write_kv: "):
            main(["bench", "ops", "write_kv", "--implementation", "triton", "--json", str(file)])
        assert "reason" in json.loads(file.read_text())["rows"][0]


def test_verify_distinguishes_rejected_calls_from_faults(monkeypatch, capsys):
    orders = ("LBNHC", "BLNHC")
    cases = [Outcome("write_mla", order) for order in orders]
    cases += [
        Outcome("decode_mla", orders[0]),
        Outcome("decode_mla", orders[1], rejected="needs more"),
    ]
    monkeypatch.setattr(equivalence, "ENTRIES", equivalence.ENTRIES[:1])
    monkeypatch.setattr(equivalence, "verify", lambda entry, implementation: iter(cases))
    assert main(["verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" ok on 2 orders")
    assert lines[1].endswith(" ok on 1 order; rejected on 1 order: needs more")
    assert lines[2].startswith("all of 3 cases on cpu in ")
    cases.append(Outcome("gather_mla", orders[0], wrong="differs from the twin"))
    assert main(["verify"]) == 1
    assert "1 of 4 cases on cpu in " in capsys.readouterr().out


def program(*arguments):
    return [sys.executable, "-c", "from jaxkv.cli import main; raise SystemExit(main())", *arguments]


@pytest.mark.parametrize(
    ("redirected", "status", "output", "errors"),
    [
        (" | true", 141, "", ""),
        further(" > /dev/full", 1, "", "jaxkv: standard output: No space left on device\n"),
        further(" 2>&-", 0, "fingerprint", ""),
        *(
            slow(*case)
            for case in (
                (" >&-", 1, "", "jaxkv: standard output: Bad file descriptor\n"),
                (" --blocks 0 2>&-", 2, "", ""),
                (" 2> /dev/full", 0, "fingerprint", ""),
            )
        ),
    ],
)
def test_streams_end_as_those_of_unix_tools(redirected, status, output, errors):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    script = '"$@" layout' + redirected + "; exit ${PIPESTATUS[0]}"
    ended = subprocess.run(
        ["bash", "-c", script, "bash", *program()], capture_output=True, text=True, env=environment, timeout=120
    )
    assert ended.returncode == status
    assert output in ended.stdout
    assert ended.stderr == errors


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jaxkv {jaxkv.__version__}\n"


def test_ctrl_c_prints_a_line(monkeypatch, capsys):
    def interrupted(args):
        print("half of ")
        raise KeyboardInterrupt

    monkeypatch.setattr(layout, "run", interrupted)
    assert main(["layout"]) == 130
    assert capsys.readouterr() == ("half of \n", "jaxkv: interrupted\n")


def test_notices_that_cannot_be_written_are_dropped(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        streams.notice("compiling")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_result_that_cannot_be_written_names_its_file():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        files.write_json(output_file("/dev/full"), {"ms": 1.0})
