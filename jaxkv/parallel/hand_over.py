"""Blocks from a cache on some devices to one on others: prefill here, decode there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxkv import blocks
from jaxkv.arguments import Dims
from jaxkv.cache import KVCache


def hand_over(source: KVCache, source_blocks, target: KVCache, target_blocks, *, implementation=None) -> KVCache:
    """Copies blocks, all layers at once, from device to device; does not wait for the copy.

    Outside of `jit`.  Each cache is on one device, the same on several (tensor parallel), or one a device (`zeros`);
    of caches in a row, each hands over to the one in its place.

    Args:
      source: where the blocks are read.
      source_blocks: ints [n], on the host.
      target: the cache they are written to; donated.
      target_blocks: ints [n], on the host; where the blocks go.
      implementation: None (the best that takes the call), a name, or a sequence of names.

    Returns:
      The target with the blocks stored.

    Raises:
      ValueError: the layouts' fingerprints differ, or the tokens are divided over other numbers of devices.
    """
    source_blocks, target_blocks = np.asarray(source_blocks), np.asarray(target_blocks)
    dims = Dims()
    dims.check_ints("source_blocks", source_blocks, "n")
    dims.check_ints("target_blocks", target_blocks, "n")
    if source.layout.fingerprint != target.layout.fingerprint:
        raise ValueError(
            f"`target` holds blocks of {target.layout.fingerprint}: expected those of `source`, "
            f"{source.layout.fingerprint}; `convert_blocks` makes rows of one those of the other"
        )
    ours, theirs = (cache.buffer.size // cache.layout.size for cache in (source, target))
    if ours != theirs:
        raise ValueError(f"`target` is {theirs} caches in a row: expected as many as `source`, {ours}")
    data = _read(source, source_blocks.astype(np.int32), source.buffer.sharding, implementation)
    data = jax.device_put(data, target.buffer.sharding)
    return _write(target, target_blocks.astype(np.int32), data, target.buffer.sharding, implementation)


@partial(jax.jit, static_argnums=(2, 3))
def _read(cache, ids, sharding: Sharding, implementation) -> jax.Array:
    """Blocks [n, E]; those of each of several caches after each other."""
    return _on_each(partial(blocks.read_blocks, implementation=implementation), sharding, 0)(cache, ids)


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _write(cache, ids, data, sharding: Sharding, implementation) -> KVCache:
    return _on_each(partial(blocks.write_blocks, implementation=implementation), sharding, 1)(cache, ids, data)


def _on_each(function: Callable[..., Any], sharding: Sharding, rows: int) -> Callable[..., Any]:
    """`function(cache, ids, *rows)` on every device that has a cache of that sharding."""
    if not isinstance(sharding, NamedSharding):
        return function
    specs = sharding.spec, PartitionSpec(), *[sharding.spec] * rows
    # JAX cannot follow in Pallas's GPU kernels what varies over the mesh.
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
