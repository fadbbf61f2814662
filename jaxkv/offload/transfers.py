"""Transfers of blocks between a cache and the memory of its host: exported as rows, asynchronous, on the device's copy
engines.
"""

import jax
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.checks import check_cache, check_one_buffer
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.ops.blocks import Conversion, read_blocks, write_blocks
from jaxkv_kernels.formats.entries import Entry

Layout = CacheLayout | PackedLayout

read_rows = jax.jit(read_blocks, static_argnames="implementation")
"""`read_blocks`, compiled."""
write_rows = jax.jit(write_blocks, static_argnames="implementation", donate_argnames="cache")
"""`write_blocks`, compiled; the cache is donated."""
read_converted = jax.jit(Conversion.read, static_argnames="self")
"""`Conversion.read`, compiled: blocks of another size, order or dtype than those of the cache."""
write_converted = jax.jit(Conversion.write, static_argnames="self", donate_argnames="cache")
"""`Conversion.write`, compiled; the cache is donated."""

HostArray = jax.Array | np.ndarray
"""An array in pinned memory, which devices access directly; a NumPy array if a device has no pinned memory."""

PINNED = "pinned_host"
PINNING_PLATFORMS = ("gpu",)
"""Platforms on which pinning takes time, so that memory is reserved.  On CPUs, pinned memory is ordinary memory."""


def row_of(layout: Layout) -> jax.ShapeDtypeStruct:
    """Shape [E] and dtype of an exported block, including all groups.

    ValueError if `layout` is not a layout, or divides the tokens of requests over devices.
    """
    if not isinstance(layout, CacheLayout | PackedLayout):
        raise ValueError(f"`layout` is {layout!r}: expected a CacheLayout or a PackedLayout")
    group = next(iter(layout.values())) if isinstance(layout, PackedLayout) else layout
    if group.shards.num_shards > 1:
        raise ValueError(
            f"`layout` is that of a share of the tokens, {group.shards}: expected one of all tokens, because the key "
            "of a block does not say which share it has"
        )
    return jax.ShapeDtypeStruct((group.pages.block_elements,), group.dtype)


def conversion_between(cache_layout: Layout, layout: Layout) -> Conversion | None:
    """How blocks of caches of `cache_layout` become those of a pool of `layout`; None if they are the same.

    ValueError if they cannot, or have several tables: the key of a block does not say to which table it belongs.
    """
    if not isinstance(cache_layout, CacheLayout | PackedLayout):
        raise ValueError(f"`cache_layout` is {cache_layout!r}: expected a CacheLayout or a PackedLayout")
    if cache_layout.fingerprint == layout.fingerprint:
        return None
    tables = [*cache_layout.tables] if isinstance(cache_layout, PackedLayout) else [""]
    if len(tables) > 1:
        raise ValueError(
            f"`cache_layout` has the tables {', '.join(map(repr, tables))} and other blocks than `layout`: expected "
            "the same blocks in both, because the key of a block does not say to which table it belongs"
        )
    for name, groups in (("cache_layout", cache_layout), ("layout", layout)):
        check_one_buffer(name, next(iter(groups.values())) if isinstance(groups, PackedLayout) else groups)
        if isinstance(groups, CacheLayout) and groups.packed is not None:
            raise ValueError(
                f"`{name}` is one of several groups of a PackedLayout: expected the PackedLayout, because blocks are "
                "stored with all groups"
            )
    return Conversion.of(cache_layout, layout, None, names=("cache_layout", "layout"))


def check_exchange(cache: KVCache, layout: Layout) -> None:
    """ValueError unless `cache` has blocks of `layout`, that of the caches of a pool.

    If `layout` is packed, `cache` may be a view of any group.
    """
    check_cache(cache, Entry)
    check_one_buffer("cache", cache.layout)
    if cache.layout.fingerprint != layout.fingerprint:
        raise ValueError(
            "`cache` has other blocks than the pool is for: make another pool, or one that converts them "
            f"(`cache_layout`)\nthe cache has\n{cache.layout}\nthe pool is for caches of\n{layout}"
        )


def to_host(rows: jax.Array) -> HostArray:
    """Starts the copy of an array on a device to host memory; reading the result waits for it."""
    if not has_pinned_memory(rows.sharding):
        return np.asarray(rows)
    return jax.device_put(rows, rows.sharding.with_memory_kind(PINNED))


def to_device(rows: HostArray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Starts the copy of an array in host memory to a device."""
    return jax.device_put(rows, sharding)


def to_pinned(rows: np.ndarray, sharding: jax.sharding.Sharding) -> HostArray:
    """Copies a NumPy array to the kind of memory in which `to_host` puts arrays of that sharding."""
    return jax.device_put(rows, sharding.with_memory_kind(PINNED)) if has_pinned_memory(sharding) else rows


def to_numpy(rows: HostArray) -> np.ndarray:
    """Waits for an array in host memory and returns it as a NumPy array."""
    if isinstance(rows, np.ndarray):
        return rows
    # JAX keeps the NumPy copy alive with the array.  A temporary second array of the same memory avoids that.
    return np.asarray(jax.make_array_from_single_device_arrays(rows.shape, rows.sharding, [rows]))


def reserve(nbytes: int, device: jax.Device) -> None:
    """Pins `nbytes` of host memory in advance.

    Pinning takes half a second per GB on an H200's host.  JAX keeps the pinned memory and reuses it for later arrays.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    if device.platform in PINNING_PLATFORMS and has_pinned_memory(sharding):
        try:
            jax.block_until_ready(to_pinned(np.zeros(nbytes, np.uint8), sharding))
        except jax.errors.JaxRuntimeError as error:
            raise MemoryError(
                f"{nbytes / 1e9:.1f} GB of host memory cannot be pinned: make the pool smaller, or on GPUs raise "
                f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, 64 unless it is set ({error})"
            ) from error


def has_pinned_memory(sharding: jax.sharding.Sharding) -> bool:
    """Whether all devices of the sharding have pinned host memory."""
    return all(
        PINNED in (memory.kind for memory in device.addressable_memories()) for device in sharding.addressable_devices
    )
