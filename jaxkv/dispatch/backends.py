"""The implementations in order of priority, and the choice of the one that runs a call."""

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
from jax.custom_batching import sequential_vmap

from jaxkv_kernels import mosaic_gpu, triton, xla
from jaxkv_kernels.gradients import without_gradients
from jaxkv_kernels.kernel import Kernel

_log = logging.getLogger("jaxkv")


@dataclass(frozen=True)
class Call:
    """A call with checked arguments, as kernels receive it."""

    operation: str
    arrays: Mapping[str, Any]
    """Arrays by name; None for optional ones that are not passed."""
    options: Mapping[str, Any]
    """Static arguments by name."""


@dataclass(frozen=True)
class Backend:
    """An implementation: its kernels by operation."""

    name: str
    devices: str
    """A description of the devices that it runs on."""
    kernels: Mapping[str, Kernel]
    transformable: bool = False
    """Whether the kernels are plain JAX, which `jax.grad` and `jax.vmap` transform."""

    def unsupported_reasons(self, call: Call) -> list[str]:
        """Reasons against `call` on every machine; none if it is supported."""
        if call.operation not in self.kernels:
            return [f"has no kernel for {call.operation}"]
        return self.kernels[call.operation].reasons_against(call.arrays, call.options)

    def reasons_against(self, call: Call) -> list[str]:
        """Reasons against `call` on this machine; none if it would run."""
        kernel = self.kernels.get(call.operation)
        unavailable = kernel.unavailable_reasons() if kernel else ()
        return [*unavailable, *self.unsupported_reasons(call)]

    def run(self, call: Call):
        """Runs the kernel and returns its result.  The first run of each operation is logged.

        Unless the implementation is `transformable`, differentiating it raises NotImplementedError, and `jax.vmap` runs
        the kernel for one element of the batch after the other.
        """
        _log_once(call.operation, self.name)
        kernel = partial(_with_arrays, self.kernels[call.operation].run, call.options)
        arrays = dict(call.arrays)
        if not self.transformable:
            reason = f"{call.operation} has no gradients on {self.name}: use `implementation='xla'`"
            # Pallas batches kernels by a longer grid, in which some that load by TMA returned wrong results (an H200
            # with jax 0.11.2).
            kernel, arrays = sequential_vmap(kernel), without_gradients(arrays, reason)
        # Kernels are written for JAX's default promotion rules, but the user's program may have stricter ones.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return kernel(arrays)


def _with_arrays(run: Callable[..., Any], options: Mapping[str, Any], arrays: Mapping[str, Any]):
    return run(**arrays, **options)


BACKENDS = (
    Backend("mosaic_gpu", "NVIDIA Hopper", mosaic_gpu.KERNELS),
    Backend("triton", "NVIDIA GPUs, Ampere and later", ChainMap(triton.KERNELS, triton.HOT_ROWS)),
    Backend("xla", "any device", ChainMap(xla.KERNELS, xla.HOT_ROWS), transformable=True),
)
"""In order of priority.  The last one has a kernel for every operation."""


_COSTS = dict.fromkeys(
    [("decode_mla", "triton"), ("decode_mla_sparse", "triton"), ("decode_kv", "triton")],
    ", which takes up to 2.3 times as long as mosaic_gpu",
)
"""What a fallback costs, by operation and implementation, where it was measured (H200)."""


def implementations() -> dict[str, str]:
    """The names that `implementation=` accepts, in order of priority, each with the devices that it runs on.

    The last one supports every call on every layout, except batch-invariant ones.
    """
    return {backend.name: backend.devices for backend in BACKENDS}


def choose(call: Call, implementation: str | Sequence[str] | None) -> Backend:
    """The first of the requested backends that would run `call`.

    Args:
      call: a checked call.
      implementation: None for all of `BACKENDS`, a name, or a sequence of names in order of preference.

    Raises:
      ValueError: `implementation` is none of these, or has an unknown name.
      NotImplementedError: none of them would run the call; the message has the reasons of each.
    """
    known = {backend.name: backend for backend in BACKENDS}
    names = tuple(known) if implementation is None else implementation
    names = (names,) if isinstance(names, str) else names
    expected = f"expected None, a name or a sequence of names among {', '.join(known)}"
    if not isinstance(names, Sequence) or not names:
        raise ValueError(f"`implementation` is {implementation!r}: {expected}")
    if unknown := [name for name in names if not isinstance(name, str) or name not in known]:
        raise ValueError(f"`implementation` {unknown[0]!r} is unknown: {expected}")
    reasons = {}
    for name in names:
        reasons[name] = known[name].reasons_against(call)
        if not reasons[name]:
            if implementation is None:
                _warn_of_slower(call, name, reasons[BACKENDS[0].name])
            return known[name]
    found = "; ".join(f"{name}: {', '.join(against)}" for name, against in reasons.items())
    raise NotImplementedError(f"{call.operation}: none of the requested implementations supports this call ({found})")


def run(call: Call, implementation: str | Sequence[str] | None):
    """The result of `call` from the backend that `choose` returns."""
    return choose(call, implementation).run(call)


def _warn_of_slower(call: Call, chosen: str, reasons: list[str]) -> None:
    """Logs the reasons against the fastest implementation, on devices that have its kernel."""
    fastest = BACKENDS[0]
    kernel = fastest.kernels.get(call.operation)
    if chosen == fastest.name or kernel is None or jax.default_backend() != "gpu" or kernel.unavailable_reasons():
        return
    for reason in reasons:
        _warn_once(call.operation, chosen, fastest.name, reason)


@cache
def _warn_once(operation, chosen, fastest, reason):
    cost = _COSTS.get((operation, chosen), "")
    _log.warning("%s runs on %s%s; %s does not support %s", operation, chosen, cost, fastest, reason)


@cache
def _log_once(operation, name):
    _log.info("%s runs on %s", operation, name)
