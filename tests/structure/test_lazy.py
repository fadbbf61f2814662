"""What `import jaxkv` and the command line load, in new processes."""

import subprocess
import sys

import pytest

import jaxkv

MODULES = """
names = {"blocks", "formats", "masks", "models", "offload", "parallel", "serving", "testing"}
print({name for name in names if f"jaxkv.{name}" in sys.modules}, names - {*dir(jaxkv)})
print([name for name in names if getattr(jaxkv, name).__name__ != f"jaxkv.{name}"])
"""
NAMES = """
print("jax" in sys.modules, jaxkv.__version__ != "")
from jaxkv import *
print(KVCache is jaxkv.KVCache, {*jaxkv.__all__} <= {*globals()} & {*dir(jaxkv)}, "jaxkv.serving" in sys.modules)
"""


def run(code: str) -> list[str]:
    """The lines that a new process prints which runs `code`."""
    command = [sys.executable, "-c", f"import sys\n\nimport jaxkv\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_modules_are_attributes_that_are_loaded_on_first_use():
    assert run(MODULES) == ["set() set()", "[]"]


def test_names_are_loaded_on_first_use():
    assert run(NAMES) == ["False True", "True True False"]


@pytest.mark.parametrize("module", ["ops.attention", "cache", "support", "serving", "testing.fuzz"])
def test_modules_can_be_imported_first(module):
    assert run(f"import jaxkv.{module}\nprint(jaxkv.decode_mla.__name__)") == ["decode_mla"]


def test_an_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="module 'jaxkv' has no attribute 'decode_mha'"):
        _ = jaxkv.decode_mha  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [("--help", False), ("--version", False), ("layot", False), ("bench --help", False), ("layout --help", True)],
)
def test_the_command_line_imports_jax_for_the_options_of_a_command_at_the_earliest(arguments, imported):
    code = f"""
from contextlib import suppress

from jaxkv.cli import main

with suppress(SystemExit):
    main({arguments.split()})
print("jax" in sys.modules)
"""
    assert run(code)[-1] == str(imported)
