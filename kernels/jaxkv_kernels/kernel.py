"""What an implementation registers for an operation: the kernel, and the reasons against running it."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv_kernels.formats.entries import Listed, unlisted


@dataclass(frozen=True)
class Kernel:
    """One operation in one implementation."""

    run: Callable[..., Any]
    """Takes the arrays and the options of a checked call by name."""
    entries: Listed
    """The kinds of entries and their formats that the kernel supports; empty if it reads and writes none, or any bytes.

    A kernel knows the bytes of the entries that are listed, and must not guess those of others.
    """
    unsupported_reasons: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[str]]
    """Reasons against a call with these arrays and options, whose entries are listed; none if it is supported."""
    unavailable_reasons: Callable[[], Iterable[str]]
    """Reasons against every call on this machine; none if the kernel can run here."""

    def reasons_against(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        """Reasons against a call on every machine; none if it is supported."""
        return unlisted(self.entries, options) or list(self.unsupported_reasons(arrays, options))


def nothing(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterable[str]:
    """The reasons of a kernel that supports every call with listed entries."""
    del arrays, options
    return ()


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `module`, which is imported by the first call: Pallas and Triton are slow to import."""

    def run(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return run
