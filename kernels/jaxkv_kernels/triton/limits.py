"""Which calls the kernels do not take, and why: a function an operation that has such calls."""

from collections.abc import Iterator, Mapping
from typing import Any


def nothing(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """No reasons: every call is taken."""
    del arrays, options
    yield from ()


def write_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `write_mla` call."""
    del arrays
    if options["entry"].format not in ("bf16", "f16", "f32"):
        yield f"entries of format {options['entry'].format!r}: takes bf16, f16 and f32"
