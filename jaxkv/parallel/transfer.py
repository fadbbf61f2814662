"""Copying blocks to a cache on other devices, for prefill on some devices and decode on others."""

import jax

from jaxkv.cache import KVCache
from jaxkv.checks import block_ids, check_one_buffer, describe
from jaxkv.ops.blocks import pairs_of_groups
from jaxkv.ops.rows import devices_of, read_rows, rows_sharding, write_rows
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
    ours, theirs = devices_of(source), devices_of(target)
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
    rows = read_rows(source, source_ids, implementation=implementation)
    rows = jax.device_put(rows, rows_sharding(one_array(target.buffer).sharding))
    return write_rows(target, target_ids, rows, implementation=implementation)


def _packed(name: str, cache: KVCache) -> str:
    packed = cache.layout.packed
    return f"`{name}` has " + ("one group" if packed is None else f"those of a PackedLayout of fingerprint {packed}")
