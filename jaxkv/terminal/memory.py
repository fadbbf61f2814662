"""Checks whether arrays fit in the memory of a device."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxkv.terminal.formatting import size

CONTAINER_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux states how much memory a container may use, in versions 2 and 1 of its control groups."""


def device_memory(device: jax.Device) -> int:
    """Bytes that arrays may occupy on the device: the limit of JAX's allocator, or the host's memory on CPUs."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or host_memory()


def host_memory() -> int:
    """Bytes of the host's memory, or of the part that its container may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


def nbytes(arrays: Any) -> int:
    """Bytes of all arrays of a pytree, which may be `jax.ShapeDtypeStruct`s."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def require_memory(what: str, needed: int, *, on_host: int = 0) -> None:
    """ValueError if `what` does not fit: `needed` bytes on the first device, and `on_host` bytes on its host.

    CPUs have the memory of their host.  Call it before allocating: there, the operating system would kill the process
    instead, and XLA divides by zero if an array has more bytes than an int64 can count.
    """
    device = jax.local_devices()[0]
    places = [(device.device_kind, needed, device_memory(device)), ("the host", on_host, host_memory())]
    if device.platform == "cpu":
        places = [(device.device_kind, needed + on_host, device_memory(device))]
    for place, total, limit in places:
        if total > limit:
            raise ValueError(
                f"{what}: {size(total)} do not fit in memory, {place} has {size(limit)}; take smaller sizes"
            )
