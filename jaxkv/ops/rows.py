"""Blocks of caches on one or several devices as rows of one array, read and written by compiled programs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxkv.cache import KVCache
from jaxkv.dispatch import Implementations
from jaxkv.ops.blocks import read_blocks, write_blocks
from jaxkv_kernels.addressing import one_array


def devices_of(cache: KVCache) -> int:
    """Over how many devices the blocks of a cache are divided: 1 also for a cache that several devices have whole."""
    return one_array(cache.buffer).size // cache.layout.size


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
