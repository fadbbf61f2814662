"""Blocks of caches on one or several devices as rows of one array, read and written by compiled programs."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxkv.cache import KVCache
from jaxkv.dispatch import Implementations
from jaxkv.ops.blocks import read_blocks, write_blocks
from jaxkv_kernels.addressing import one_array


def devices_of(cache: KVCache) -> int:
    """Over how many devices the blocks of a cache are divided: 1 also for a cache that several devices have whole."""
    return one_array(cache.buffer).size // cache.layout.size


def parts_of(cache: KVCache) -> tuple[int, ...]:
    """Which of the parts of a cache, of which there are `devices_of(cache)`, devices of this process have."""
    if one_array(cache.buffer).is_fully_addressable:
        return tuple(range(devices_of(cache)))
    return tuple(part for part, _ in _addressable(cache))


def addressable_part(cache: KVCache) -> KVCache:
    """The parts of a cache that devices of this process have, as a cache on these devices alone, without a copy.

    Each process can run programs of its own on such a part, and replace it by `with_part`.  A cache that no other
    process has a part of is returned as it is.
    """
    if one_array(cache.buffer).is_fully_addressable:
        return cache
    parts = [arrays for _, arrays in _addressable(cache)]
    if len({len(arrays) for arrays in parts}) > 1:
        raise ValueError(
            f"devices of this process have the parts {parts_of(cache)} of `cache` {[*map(len, parts)]} times: expected "
            "a mesh in which a process has each of its parts equally often"
        )
    mesh = Mesh(np.asarray([[array.device for array in arrays] for arrays in parts]), ("parts", "replicas"))
    sharding = NamedSharding(mesh, PartitionSpec("parts"))
    arrays = [array for arrays in parts for array in arrays]
    size = len(parts) * cache.layout.size
    return KVCache(jax.make_array_from_single_device_arrays((size,), sharding, arrays), cache.layout)


def with_part(cache: KVCache, part: KVCache) -> KVCache:
    """A cache whose `addressable_part` is `part`, without a copy; that of `cache` has been donated."""
    whole, own = one_array(cache.buffer), one_array(part.buffer)
    if len(whole.sharding.device_set) == len(own.sharding.device_set):
        return part
    arrays = [shard.data for shard in own.addressable_shards]
    return KVCache(jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, arrays), cache.layout)


def _addressable(cache: KVCache) -> list[tuple[int, list[jax.Array]]]:
    """The parts that devices of this process have, in order, each with its arrays, one per device."""
    found = defaultdict[int, list[jax.Array]](list)
    for shard in one_array(cache.buffer).addressable_shards:
        found[(shard.index[0].start or 0) // cache.layout.size].append(shard.data)
    return sorted(found.items())


def rows_sharding(sharding: Sharding) -> Sharding:
    """Where the rows of a cache lie whose buffer has this sharding."""
    return NamedSharding(sharding.mesh, _spec(sharding)) if isinstance(sharding, NamedSharding) else sharding


def read_rows(cache: KVCache, blocks, *, implementation: Implementations | None = None) -> jax.Array:
    """`read_blocks` of a cache on any devices.  Call it outside of `jit`.

    Args:
      cache: any cache.
      blocks: int32 [n], blocks to read.  A program is compiled for each n; the row of an id outside the cache, such as
        -1, is 0.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      [n, D * E] of the buffer's dtype, where D is `devices_of(cache)`: a row has the parts of all devices, in their
      order, and each device has its own.
    """
    return _read_rows(cache, blocks, one_array(cache.buffer).sharding, implementation)


def write_rows(cache: KVCache, blocks, rows, *, implementation: Implementations | None = None) -> KVCache:
    """`write_blocks` to a cache on any devices, which is donated, of rows as `read_rows` returns them.

    Call it outside of `jit`.
    """
    return _write_rows(cache, blocks, rows, one_array(cache.buffer).sharding, implementation)


@partial(jax.jit, static_argnums=(2, 3))
def _read_rows(cache, blocks, sharding: Sharding, implementation) -> jax.Array:
    read = partial(read_blocks, implementation=implementation)
    if not isinstance(sharding, NamedSharding):
        return read(cache, blocks)
    return _on_each(read, sharding, (sharding.spec, PartitionSpec()), _spec(sharding))(cache, blocks)


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _write_rows(cache, blocks, rows, sharding: Sharding, implementation) -> KVCache:
    write = partial(write_blocks, implementation=implementation)
    if not isinstance(sharding, NamedSharding):
        return write(cache, blocks, rows)
    specs = sharding.spec, PartitionSpec(), _spec(sharding)
    return _on_each(write, sharding, specs, sharding.spec)(cache, blocks, rows)


def _spec(sharding: NamedSharding) -> PartitionSpec:
    return PartitionSpec(None, *sharding.spec)


def _on_each(function: Callable[..., Any], sharding: NamedSharding, in_specs, out_specs) -> Callable[..., Any]:
    # JAX cannot track which values vary over the mesh inside Pallas GPU kernels.
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
