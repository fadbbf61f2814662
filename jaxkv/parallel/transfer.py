"""Copying blocks to a cache on other devices, for prefill on some devices and decode on others."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxkv.cache import KVCache
from jaxkv.checks import block_ids, check_one_buffer, describe
from jaxkv.ops import blocks
from jaxkv.ops.blocks import pairs_of_groups
from jaxkv_kernels.addressing import one_array


def transfer_blocks(source: KVCache, source_blocks, target: KVCache, target_blocks, *, implementation=None) -> KVCache:
    """Copies blocks, all layers at once, from device to device.  Returns without waiting for the copy.

    Call it outside of `jit`.  Each of `source` and `target` is on one device, replicated on several (tensor-parallel
    MLA), or consists of one cache per device (`zeros`).  In the last case, each source cache is copied to the target
    cache of the same index.

    Args:
      source: the cache to read from.
      source_blocks: ints [n], on the host.
      target: the cache to write to; it is donated.
      target_blocks: distinct ints [n], on the host.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The target with the blocks stored.

    Raises:
      ValueError: an id is outside its cache, or occurs twice in `target_blocks`; there are not as many ids in
        `target_blocks` as in `source_blocks`; the fingerprints of the layouts differ, for example because they divide
        the tokens of requests in other ways (`layout.shards`); or the caches are divided over different numbers of
        devices.
    """
    for name, cache in (("source", source), ("target", target)):
        if not isinstance(cache, KVCache):
            raise ValueError(f"`{name}` is {describe(cache)}: expected a KVCache")
        check_one_buffer(name, cache.layout)
    source_ids = block_ids("source_blocks", source_blocks, source.layout.num_blocks)
    target_ids = block_ids("target_blocks", target_blocks, target.layout.num_blocks, distinct=True)
    if source_ids.size != target_ids.size:
        count = source_ids.size
        raise ValueError(f"`target_blocks` has {target_ids.size} ids: expected as many as `source_blocks`, {count}")
    ours, theirs = (one_array(cache.buffer).size // cache.layout.size for cache in (source, target))
    if ours != theirs:
        raise ValueError(
            f"`target` is divided over {theirs} devices: expected as many as `source`, {ours}; context parallel "
            "caches can only be copied to context parallel caches"
        )
    if source.layout.fingerprint != target.layout.fingerprint:
        pairs_of_groups(source=source.layout, target=target.layout)
        if source.layout.packed != target.layout.packed:
            raise ValueError(
                "`target` has other groups packed in its blocks than `source`, and blocks are copied with all of them: "
                f"{_packed('source', source)}, {_packed('target', target)}; make both caches from PackedLayouts that "
                "differ only in the number of blocks"
            )
        raise ValueError(
            "`target` stores the same entries as `source` in another order, padding or dtype: use the same layout for "
            "both, or convert the blocks with `jaxkv.convert_blocks`"
        )
    data = _read(source, source_ids, one_array(source.buffer).sharding, implementation)
    data = jax.device_put(data, one_array(target.buffer).sharding)
    return _write(target, target_ids, data, one_array(target.buffer).sharding, implementation)


def _packed(name: str, cache: KVCache) -> str:
    packed = cache.layout.packed
    return f"`{name}` has " + ("one group" if packed is None else f"those of a PackedLayout of fingerprint {packed}")


@partial(jax.jit, static_argnums=(2, 3))
def _read(cache, ids, sharding: Sharding, implementation) -> jax.Array:
    """Payloads of blocks [n, E].  Those of several caches are concatenated along the first axis."""
    return _on_each(partial(blocks.read_blocks, implementation=implementation), sharding, 0)(cache, ids)


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _write(cache, ids, data, sharding: Sharding, implementation) -> KVCache:
    return _on_each(partial(blocks.write_blocks, implementation=implementation), sharding, 1)(cache, ids, data)


def _on_each(function: Callable[..., Any], sharding: Sharding, rows: int) -> Callable[..., Any]:
    """`function(cache, ids, *rows)` on every device that has a cache of that sharding."""
    if not isinstance(sharding, NamedSharding):
        return function
    specs = sharding.spec, PartitionSpec(), *[sharding.spec] * rows
    # JAX cannot track which values vary over the mesh inside Pallas GPU kernels.
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
