"""Choosing who computes a call: implementations, best first, each asked whether it would run, and why not."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jaxkv_kernels import mosaic_gpu, triton, xla

_log = logging.getLogger("jaxkv")


@dataclass(frozen=True)
class Call:
    """A checked call: the arrays that the kernels get by name, and what is static."""

    operation: str
    arrays: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Implementation:
    """A package of kernels, and its word on which calls it takes."""

    name: str
    devices: str
    """What it runs on, in words."""
    package: Any
    """A module of kernels by operation (`OPERATIONS`), with `unavailable` and `refuses`."""

    def refuses(self, call: Call) -> list[str]:
        """Reasons against `call` on any machine."""
        if call.operation not in self.package.OPERATIONS:
            return [f"has no kernel for {call.operation}"]
        return self.package.refuses(call.operation, call.arrays, call.options)

    def why_not(self, call: Call) -> list[str]:
        """Reasons against running `call` here; none means that it runs."""
        return [*self.package.unavailable(), *self.refuses(call)]

    def run(self, call: Call):
        """The kernel's result."""
        # Kernels are written for JAX's defaults, whatever strictness a program asks for its own arrays.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return self.package.OPERATIONS[call.operation](**call.arrays, **call.options)


LADDER = (
    Implementation("mosaic_gpu", "NVIDIA Hopper", mosaic_gpu),
    Implementation("triton", "NVIDIA GPUs, Ampere and later", triton),
    Implementation("xla", "any device", xla),
)


def implementations() -> dict[str, str]:
    """Names for `implementation=`, best first, and what each runs on.

    The last supports every call, on every layout, that needs no batch-invariant plan.
    """
    return {candidate.name: candidate.devices for candidate in LADDER}


@dataclass(frozen=True)
class Explanation:
    """For one call: every implementation, best first, with its reasons against (none: it would run)."""

    operation: str
    reasons: Mapping[str, tuple[str, ...]]

    @property
    def chosen(self) -> str | None:
        """The implementation that would run."""
        return next((name for name, reasons in self.reasons.items() if not reasons), None)

    def __str__(self):
        lines = [f"{self.operation}: {self.chosen or 'nothing'} would run"]
        for name, reasons in self.reasons.items():
            lines += [f"  {name}: {reason}" for reason in reasons or ("yes",)]
        return "\n".join(lines)


class _Bound(Exception):
    """Carries the checked call out of an operation that is asked, not run."""


_BIND: Any = object()  # no name that a caller could give


def explain(operation: Callable[..., Any], *args, **kwargs) -> Explanation:
    """Which implementation `operation(*args, **kwargs)` would use, and why not the others; nothing is computed.

    Arrays may be `jax.ShapeDtypeStruct`s.  Arguments are checked as in a real call: ValueError for misuse.
    `implementation=` is ignored: every one is asked.
    """
    call = call_of(operation, *args, **kwargs)
    return Explanation(call.operation, {candidate.name: tuple(candidate.why_not(call)) for candidate in LADDER})


def call_of(operation: Callable[..., Any], *args, **kwargs) -> Call:
    """The checked call that `operation(*args, **kwargs)` would make."""
    if "implementation" not in inspect.signature(operation).parameters:
        raise TypeError(f"{operation!r} is not an operation of jaxkv that chooses an implementation")
    try:
        operation(*args, **{**kwargs, "implementation": _BIND})
    except _Bound as bound:
        return bound.args[0]
    raise TypeError(f"{operation!r} is not an operation of jaxkv that chooses an implementation")


def chosen(call: Call, implementation: str | Sequence[str] | None) -> str:
    """The name of the first implementation asked for that takes the call; NotImplementedError if none does."""
    if implementation is _BIND:
        raise _Bound(call)
    names = tuple(implementations()) if implementation is None else implementation
    names = (names,) if isinstance(names, str) else names
    known = {candidate.name: candidate for candidate in LADDER}
    expected = f"expected None, a name or a sequence of names among {', '.join(known)}"
    if not isinstance(names, Sequence) or not names:
        raise ValueError(f"`implementation` is {implementation!r}: {expected}")
    if unknown := [name for name in names if not isinstance(name, str) or name not in known]:
        raise ValueError(f"`implementation` {unknown[0]!r} is unknown: {expected}")
    reasons = {}
    for name in names:
        reasons[name] = known[name].why_not(call)
        if not reasons[name]:
            return name
    told = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
    raise NotImplementedError(f"{call.operation}: no implementation asked for takes this call ({told})")


def run(call: Call, implementation: str | Sequence[str] | None):
    """The call's result from the first implementation asked for that takes it; NotImplementedError if none does."""
    name = chosen(call, implementation)
    _report(call.operation, name)
    return next(candidate for candidate in LADDER if candidate.name == name).run(call)


@cache
def _report(operation, name):
    _log.info("%s runs on %s", operation, name)
