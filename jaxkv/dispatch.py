"""The choice of the implementation that runs a call: one loop over `BACKENDS`, in `choose`."""

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
from jax.custom_batching import sequential_vmap

from jaxkv_kernels.alignment import aligned
from jaxkv_kernels.calls import Call, ExpandedHeads, Kernels
from jaxkv_kernels.generations import untried_reason
from jaxkv_kernels.gradients import without_gradients
from jaxkv_kernels.mosaic_gpu.runtime import device as hopper
from jaxkv_kernels.names import expected_one_of
from jaxkv_kernels.triton import available as ampere
from jaxkv_kernels.xla.attention_gradients import has_tangents, with_tangents
from jaxkv_kernels.xla.kernels import XLA

_log = logging.getLogger("jaxkv")

Implementation = Literal["mosaic_gpu", "triton", "xla"]
"""The name of an implementation."""
Implementations = Implementation | Sequence[Implementation]
"""A name, or names in order of preference."""


@dataclass(frozen=True)
class Backend:
    """An implementation, imported when it is first needed: Pallas and Triton are slow to import, or not installed."""

    name: str
    devices: str
    """A description of the devices that it runs on."""
    kernels: Callable[[], Kernels]
    """Imports its kernels."""
    unavailable_reasons: Callable[[], list[str]]
    """The reasons why none of its kernels runs on this machine; empty if some do.  It does not import the kernels."""

    def runs(self, call: Call[Any]) -> bool:
        """Whether it would run `call` on this machine, if it is named."""
        return not self.unavailable_reasons() and not self.kernels().reasons(call)

    def untried_reason(self, operation: str) -> str | None:
        """Why a call of an operation that it runs should not choose it on this machine without naming it."""
        support = self.kernels().support(operation)
        if support is None or support.machines.generations is None:
            return None
        return untried_reason(self.name, operation)


@cache
def _mosaic_gpu() -> Kernels:
    from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU

    return MosaicGPU()


@cache
def _triton() -> Kernels:
    from jaxkv_kernels.triton.kernels import Triton

    return Triton()


@cache
def _xla() -> Kernels:
    return XLA()


BACKENDS = (
    Backend("mosaic_gpu", "NVIDIA Hopper", _mosaic_gpu, lambda: hopper.unavailable_reasons(hopper.ANY)),
    Backend(
        "triton",
        "NVIDIA GPUs, Ampere and later; some operations on AMD MI300 and MI350",
        _triton,
        lambda: ampere.unavailable_reasons(ampere.ANY),
    ),
    Backend("xla", "any device", _xla, lambda: []),
)
"""In order of priority.  The last one has a kernel for every operation."""


def implementations() -> dict[str, str]:
    """The names that `implementation=` accepts, in order of priority, each with the devices that it runs on.

    The last one supports every call on every layout, except batch-invariant ones.
    """
    return {backend.name: backend.devices for backend in BACKENDS}


def run[Result](call: Call[Result], implementation: str | Sequence[str] | None) -> Result:
    """The result of `call` from the backend that `choose` returns."""
    return run_kernel(choose(call, implementation), call)


def choose(call: Call[Any], implementation: str | Sequence[str] | None) -> Backend:
    """The first of the requested backends that supports `call` on this machine.

    Args:
      call: a call with checked arguments.
      implementation: None for all of `BACKENDS`, a name, or a sequence of names in order of preference.  A kernel that
        has not been run on GPUs of this machine's generation is chosen only by its name.

    Raises:
      ValueError: `implementation` is none of these, or has an unknown name; or an array is divided over explicit axes.
      NotImplementedError: none of them supports the call; the message has the reasons of each.
    """
    if _captures.get():
        raise Captured(call)
    _check_undivided(call)
    requested = _requested(implementation)
    for backend in requested:
        if not backend.runs(call):
            continue
        untried = backend.untried_reason(call.operation)
        if untried:
            _warn_of_untried(call.operation, backend.name, untried, named=implementation is not None)
        if implementation is None:
            if untried:
                continue
            _warn_of_slower(call, backend)
        return backend
    found = "; ".join(f"{each.name}: {', '.join(each.kernels().reasons(call))}" for each in requested)
    raise NotImplementedError(f"{call.operation}: none of the requested implementations supports this call ({found})")


def has_kernel(call: Call[Any]) -> bool:
    """Whether `choose` would return an implementation other than the last one, which is plain JAX."""
    return any(backend.runs(call) and not backend.untried_reason(call.operation) for backend in BACKENDS[:-1])


def least_prefill(heads: ExpandedHeads, implementation: str | Sequence[str] | None) -> int | None:
    """New tokens per request from which on `prefill_mla` is faster than `decode_mla` on this machine; None if never.

    The answer is that of the first requested implementation that has kernels for this machine.
    """
    for backend in _requested(implementation):
        if backend.unavailable_reasons() or (implementation is None and backend.untried_reason("prefill_mla")):
            continue
        return backend.kernels().least_prefill(heads)
    return None


def clock() -> Kernels | None:
    """The implementation whose `stamp` reads this device's clock; None if there is none."""
    for backend in BACKENDS:
        if not backend.unavailable_reasons():
            support = backend.kernels().support("stamp")
            if support is not None and not support.unavailable_reasons():
                return backend.kernels()
    return None


def run_kernel[Result](backend: Backend, call: Call[Result]) -> Result:
    """The result of the backend's kernel for a call that it supports.  The first run of each operation is logged.

    Attention has gradients on every backend.  Differentiating other kernels raises NotImplementedError, unless they are
    `transformable`.  For those that are not, `jax.vmap` runs the kernel for one element of the batch after the other.
    """
    _log_once(call.operation, backend.name)
    kernels = backend.kernels()

    def kernel(call: Call[Any]) -> Any:
        return call.run_on(kernels)

    if not kernels.transformable:
        # Pallas batches kernels by a longer grid, in which some that load by TMA returned wrong results (an H200 with
        # jax 0.11.2).
        kernel = sequential_vmap(lambda call: aligned(call).run_on(kernels))
    # Kernels are written for JAX's default promotion rules, but the user's program may have stricter ones.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        if has_tangents(call):
            return with_tangents(call, kernel(jax.lax.stop_gradient(call)))
        if not kernels.transformable:
            reason = f"{call.operation} has no gradients on {backend.name}: use `implementation='xla'`"
            call = without_gradients(call, reason)
        return kernel(call)


def _check_undivided(call: Call[Any]) -> None:
    """ValueError if the type of an array has a sharding, as under meshes with explicit axes."""
    for path, array in jax.tree_util.tree_leaves_with_path(call):
        if any(axes := jax.typeof(array).sharding.spec):
            raise ValueError(
                f"{call.operation}: {jax.tree_util.keystr(path, simple=True)} is divided over explicit axes of a mesh, "
                f"{axes}: operations do not divide their work themselves; call them inside `jax.shard_map`"
            )


def _requested(implementation: str | Sequence[str] | None) -> list[Backend]:
    """The backends that an argument `implementation` names, in its order."""
    known = {backend.name: backend for backend in BACKENDS}
    names = tuple(known) if implementation is None else implementation
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not names:
        expected = f"expected None, a name or a sequence of names among {', '.join(known)}"
        raise ValueError(f"`implementation` is {implementation!r}: {expected}")
    if unknown := [name for name in names if not isinstance(name, str) or name not in known]:
        raise ValueError(f"`implementation` {unknown[0]!r} is unknown: {expected_one_of(unknown[0], known)}")
    return [known[name] for name in names]


def _warn_of_slower(call: Call[Any], chosen: Backend) -> None:
    """Logs why the fastest implementation does not run the call, if it has a kernel that runs on this machine."""
    fastest = BACKENDS[0]
    if chosen is fastest or jax.default_backend() != "gpu" or fastest.unavailable_reasons():
        return
    support = fastest.kernels().support(call.operation)
    if support is None or support.unavailable_reasons():
        return
    for reason in fastest.kernels().unsupported_reasons(call):
        _warn_once(call.operation, chosen.name, fastest.name, reason)


@cache
def _warn_of_untried(operation: str, name: str, reason: str, *, named: bool) -> None:
    if named:
        _log.warning("%s runs on %s, although %s", operation, name, reason)
    else:
        _log.warning("%s does not run on %s: %s; use `implementation=%r` to run it", operation, name, reason, name)


@cache
def _warn_once(operation: str, chosen: str, fastest: str, reason: str) -> None:
    _log.warning("%s runs on %s; %s does not support %s", operation, chosen, fastest, reason)


@cache
def _log_once(operation: str, name: str) -> None:
    _log.info("%s runs on %s", operation, name)


class Captured(BaseException):
    """Raised by `choose` under `captured`, instead of choosing: it carries the call out of the operation."""

    def __init__(self, call: Call[Any]):
        super().__init__(call)
        self.call = call


_captures: ContextVar[bool] = ContextVar("captures", default=False)


def captured(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Call[Any]:
    """The call that `operation(*args, **kwargs)` would run, for `explain` and other descriptions of calls.

    Nothing runs, and arrays may be `jax.ShapeDtypeStruct`s.  TypeError if `operation` chooses no implementation.
    """
    token = _captures.set(True)
    try:
        operation(*args, **kwargs)
    except Captured as stopped:
        return stopped.call
    finally:
        _captures.reset(token)
    raise TypeError(f"{operation!r} chooses no implementation")
