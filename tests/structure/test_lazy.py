"""What `import jaxkv` loads."""

import subprocess
import sys

import pytest

import jaxkv

MODULES = """
import sys

import jaxkv

names = {"blocks", "formats", "masks", "models", "offload", "parallel", "serving", "testing"}
print({name for name in names if f"jaxkv.{name}" in sys.modules}, names - {*dir(jaxkv)})
print([name for name in names if getattr(jaxkv, name).__name__ != f"jaxkv.{name}"])
"""


def run(code: str) -> list[str]:
    """The lines that a new process prints which runs `code`."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_modules_are_attributes_that_are_loaded_on_first_use():
    assert run(MODULES) == ["set() set()", "[]"]


def test_an_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="module 'jaxkv' has no attribute 'decode_mha'"):
        _ = jaxkv.decode_mha  # type: ignore[attr-defined]
