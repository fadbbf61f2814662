"""The definition of an integer for all static arguments: sizes, layers, seeds and so on."""

import operator
from typing import Any


def as_int(value: Any) -> int | None:
    """`value` as a Python int, whose arithmetic does not overflow; None for anything else (a bool, a float)."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
