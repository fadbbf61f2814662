"""Checks whether arrays fit in the memory of a device."""

import os
from typing import Any

import jax

from jaxkv.terminal.formatting import size


def device_memory(device: jax.Device) -> int:
    """Bytes that arrays may occupy on the device: the limit of JAX's allocator, or the host's memory on CPUs."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def nbytes(arrays: Any) -> int:
    """Bytes of all arrays of a pytree, which may be `jax.ShapeDtypeStruct`s."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def require_memory(what: str, needed: int) -> None:
    """ValueError if `what`, of `needed` bytes, exceeds the memory of the first device.

    Call it before allocating: on CPUs, the operating system would kill the process instead.
    """
    device = jax.devices()[0]
    limit = device_memory(device)
    if needed > limit:
        raise ValueError(
            f"{what}: {size(needed)} do not fit in memory, {device.device_kind} has {size(limit)}; take smaller sizes"
        )
