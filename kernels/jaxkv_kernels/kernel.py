"""`Kernel`, what an implementation registers for an operation: the function, and the reasons against running it."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv_kernels.formats.entries import Listed, unlisted


@dataclass(frozen=True)
class Kernel:
    """One operation in one implementation."""

    run: Callable[..., Any]
    """The function.  It is called with the arrays and options of a checked call as keyword arguments."""
    entries: Listed
    """The supported formats by kind of entry; empty if the kernel does not interpret entries.

    Entries that are not listed are unsupported, because a kernel must not guess their byte maps.
    """
    unsupported_reasons: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[str]]
    """The reasons against a call with these arrays and options, whose entry is listed; empty if it is supported."""
    unavailable_reasons: Callable[[], Iterable[str]]
    """The reasons against every call on this machine; empty if the kernel can run here."""

    def reasons_against(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        """The reasons against a call, apart from those that depend on the machine; empty if the call is supported."""
        return unlisted(self.entries, options) or list(self.unsupported_reasons(arrays, options))


def apart(options: Mapping[str, Any]) -> Iterator[str]:
    """A reason against a call on a cache whose keys and values lie apart."""
    if options["pages"].num_parts > 1:
        entry = options["entry"]
        yield f"keys and values of format {entry.format!r} that lie apart: supports values that follow their keys"


def nothing(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterable[str]:
    """No reasons: for a kernel that supports every call with listed entries."""
    del arrays, options
    return ()


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `module`, imported when it is first called: Pallas and Triton are slow to import."""

    def run(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return run
