"""What an implementation registers for an operation: the kernel, and the reasons against running it."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """One operation in one implementation."""

    run: Callable[..., Any]
    """Takes the arrays and the options of a checked call by name."""
    unsupported_reasons: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[str]]
    """Reasons against a call with these arrays and options, the same on every machine; none if it is supported."""
    unavailable_reasons: Callable[[], Iterable[str]]
    """Reasons against every call on this machine; none if the kernel can run here."""


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `module`, which is imported by the first call: Pallas and Triton are slow to import."""

    def run(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return run
