"""Rows between a device and the memory of its host: asynchronous, on the device's own copy engines."""

from collections.abc import Sequence

import jax
import numpy as np

Row = jax.Array | np.ndarray
"""A block on the host: an array in pinned memory, or NumPy's where the device has none."""

PINNED = "pinned_host"


def to_host(rows: Sequence[jax.Array]) -> list[Row]:
    """Starts copies of arrays on a device into host memory; whoever reads one waits for it."""
    sharding = rows[0].sharding
    if has_pinned_memory(rows[0]):
        return jax.device_put(list(rows), sharding.with_memory_kind(PINNED))
    return jax.device_get(list(rows))


def to_device(rows: Sequence[Row], like: jax.Array) -> list[jax.Array]:
    """Starts copies of rows on the host to where `like` is."""
    return jax.device_put(list(rows), like.sharding)


def to_pinned(row: np.ndarray, like: jax.Array) -> Row:
    """A row of anywhere on the host where `to_host` would have put it; a copy."""
    if has_pinned_memory(like):
        return jax.device_put(row, like.sharding.with_memory_kind(PINNED), may_alias=False)
    return np.array(row)


def has_pinned_memory(array: jax.Array) -> bool:
    """Whether the array's devices read and write pinned memory of their host."""
    return all(PINNED in (memory.kind for memory in device.addressable_memories()) for device in array.devices())
