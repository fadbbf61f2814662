"""Transfers of blocks between a cache and the memory of its host: exported as rows, asynchronous, on the device's copy
engines.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxkv.cache import KVCache
from jaxkv.checks import check_cache, check_one_buffer, describe, positive_int
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.ops.blocks import Conversion
from jaxkv.ops.rows import devices_of, parts_of, rows_sharding
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.integers import as_int

Layout = CacheLayout | PackedLayout

SKIPPED = -1
"""A block id outside every cache."""

read_converted = jax.jit(Conversion.read, static_argnames="self")
"""`Conversion.read`, compiled: blocks of another size, order or dtype than those of the cache."""
write_converted = jax.jit(Conversion.write, static_argnames="self", donate_argnames="cache")
"""`Conversion.write`, compiled; the cache is donated."""

HostArray = jax.Array | np.ndarray
"""An array in pinned memory, which devices access directly; a NumPy array if a device has no pinned memory."""

PINNED = "pinned_host"
PINNING_PLATFORMS = ("gpu",)
"""Platforms on which pinning takes time, so that memory is reserved.  On CPUs, pinned memory is ordinary memory."""


def checked_parts(parts: Sequence[int] | None, devices: int) -> tuple[int, ...]:
    """`parts` as ints, all of the parts of `devices` devices if it is None; ValueError if these are not parts."""
    every = range(positive_int("devices", devices))
    if parts is None:
        return tuple(every)
    found = tuple(part for part in map(as_int, parts) if part is not None and part in every)
    if not found or len(found) < len(parts) or list(found) != sorted(set(found)):
        raise ValueError(
            f"`parts` is {parts!r} and `devices` {devices}: expected one or more of the parts 0 to {devices - 1}, in "
            "increasing order, as in `model.cache_parts`"
        )
    return found


def blocks_fingerprint(layout: Layout, devices: int, parts: Sequence[int]) -> str:
    """The fingerprint of blocks of which only these parts are stored: that of the layout, if these are all of them."""
    if len(parts) == devices:
        return layout.fingerprint
    return hashlib.sha256(json.dumps([layout.fingerprint, devices, *parts]).encode()).hexdigest()[:32]


def row_of(layout: Layout, devices: int = 1, parts: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Shape [D * E] and dtype of an exported block, including all groups and the parts of all D devices.

    Or only those `parts` of `devices` which are given.  ValueError if `layout` is not a layout, or divides the tokens
    of requests over another number of devices.
    """
    if not isinstance(layout, CacheLayout | PackedLayout):
        raise ValueError(f"`layout` is {layout!r}: expected a CacheLayout or a PackedLayout")
    group = next(iter(layout.values())) if isinstance(layout, PackedLayout) else layout
    if group.shards.num_shards not in (1, positive_int("devices", devices)):
        raise ValueError(
            f"`layout` is that of a share of the tokens, {group.shards}, and `devices` is {devices}: expected "
            f"{group.shards.num_shards}, because a block has the shares of all devices"
        )
    count = devices if parts is None else len(parts)
    return jax.ShapeDtypeStruct((count * group.pages.block_elements,), group.dtype)


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


def check_rows(name: str, rows: object, count: int, row: jax.ShapeDtypeStruct) -> None:
    """ValueError unless `rows` are `count` blocks, each like `row`."""
    if (getattr(rows, "shape", None), getattr(rows, "dtype", None)) != ((count, *row.shape), row.dtype):
        raise ValueError(f"{name} is {describe(rows)}: expected {row.dtype}[{count}, {row.shape[0]}], a row per key")


def check_exchange(cache: KVCache, layout: Layout, devices: int, parts: Sequence[int]) -> None:
    """ValueError unless `cache` has blocks of `layout`, divided over so many devices, with `parts` in this process.

    If `layout` is packed, `cache` may be a view of any group.
    """
    if isinstance(cache, KVCache):
        check_one_buffer("cache", cache.layout)
    if not isinstance(cache, KVCache) or devices_of(cache) < 2:
        check_cache(cache, Entry)  # which does not know caches on several devices
    if cache.layout.fingerprint != layout.fingerprint:
        raise ValueError(
            "`cache` has other blocks than the pool is for: make another pool, or one that converts them "
            f"(`cache_layout`)\nthe cache has\n{cache.layout}\nthe pool is for caches of\n{layout}"
        )
    if (divided := devices_of(cache)) != devices:
        raise ValueError(
            f"the blocks of `cache` are divided over {divided} devices, and those of the pool over {devices}: expected "
            f"a pool with `devices={divided}`"
        )
    check_parts("the pool", parts, cache)


def check_parts(name: str, parts: Sequence[int], cache: KVCache) -> None:
    """ValueError unless these are the parts of a cache which devices of this process have."""
    if (own := parts_of(cache)) != tuple(parts):
        raise ValueError(
            f"{name} has the parts {tuple(parts)} of {devices_of(cache)}, and the devices of this process have {own}: "
            f"expected `parts={own}` (the model's `cache_parts`)"
        )


def in_powers_of_two(count: int, most: int) -> Iterator[slice]:
    """Splits `count` items into parts of at most `most`, a power of two each, so that few programs are compiled."""
    start = 0
    while start < count:
        stop = start + (1 << (min(count - start, most).bit_length() - 1))
        yield slice(start, stop)
        start = stop


def padded_ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Block ids, int32, with `SKIPPED` up to the next power of two: a program is compiled for each length."""
    return np.pad(np.asarray(ids, np.int32), (0, _excess(len(ids))), constant_values=SKIPPED)


def padded_rows(rows: jax.Array) -> jax.Array:
    """Rows [n, E] for `padded_ids`: with rows of zeros up to the next power of two."""
    return jnp.pad(rows, [(0, _excess(len(rows))), (0, 0)])


def _excess(count: int) -> int:
    """How many are missing to the next power of two; 0 if there are none."""
    return (1 << (count - 1).bit_length()) - count if count else 0


def to_host(rows: jax.Array) -> HostArray:
    """Starts the copy of an array on devices to host memory; reading the result waits for it.

    Each device copies its part.  If all have the whole array, one of them copies it.
    """
    if rows.is_fully_replicated:
        rows = rows.addressable_data(0)
    if not has_pinned_memory(rows.sharding):
        return np.asarray(rows)
    return jax.device_put(rows, rows.sharding.with_memory_kind(PINNED))


def to_device(rows: HostArray, sharding: Sharding) -> jax.Array:
    """Starts the copy of rows in host memory to the devices of a cache, whose buffer has this sharding."""
    return jax.device_put(rows, rows_sharding(sharding))


def to_pinned(rows: np.ndarray, sharding: Sharding) -> HostArray:
    """Copies a NumPy array to the kind of memory in which `to_host` puts the rows of a cache with that sharding."""
    if not has_pinned_memory(sharding):
        return rows
    if sharding.is_fully_replicated:
        sharding = SingleDeviceSharding(min(sharding.addressable_devices, key=lambda device: device.id))
    return jax.device_put(rows, rows_sharding(sharding).with_memory_kind(PINNED))


def to_numpy(rows: HostArray) -> np.ndarray:
    """Waits for an array in host memory and returns it as a NumPy array."""
    if isinstance(rows, np.ndarray):
        return rows
    if len(rows.sharding.device_set) > 1:
        parts = np.empty(rows.shape, rows.dtype)
        for shard in rows.addressable_shards:
            parts[shard.index] = to_numpy(shard.data)
        return parts
    # JAX keeps the NumPy copy alive with the array.  A temporary second array of the same memory avoids that.
    return np.asarray(jax.make_array_from_single_device_arrays(rows.shape, rows.sharding, [rows]))


def reserve(nbytes: int, device: jax.Device) -> None:
    """Pins `nbytes` of host memory in advance.

    Pinning takes half a second per GB on an H200's host.  JAX keeps the pinned memory and reuses it for later arrays.
    """
    sharding = SingleDeviceSharding(device)
    if device.platform in PINNING_PLATFORMS and has_pinned_memory(sharding):
        try:
            jax.block_until_ready(to_pinned(np.zeros(nbytes, np.uint8), sharding))
        except jax.errors.JaxRuntimeError as error:
            raise MemoryError(
                f"{nbytes / 1e9:.1f} GB of host memory cannot be pinned: make the pool smaller, or on GPUs raise "
                f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, 64 unless it is set ({error})"
            ) from error


def has_pinned_memory(sharding: Sharding) -> bool:
    """Whether all devices of the sharding have pinned host memory."""
    return all(
        PINNED in (memory.kind for memory in device.addressable_memories()) for device in sharding.addressable_devices
    )
