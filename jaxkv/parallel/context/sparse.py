"""The DeepSeek V3.2 indexer and sparse attention over several devices.

Each device scores its own tokens, and attends to those of them that are among the best of all devices.  The calls are
the same as on one device: `indexer_logits`, `select_topk`, `jaxkv.positions_to_slots`, `decode_mla_sparse`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache, int32, positive_int
from jaxkv.layout.layout import TokenShards, checked_shards
from jaxkv.ops import indexer, sparse
from jaxkv.ops.query_chunks import LOGITS_BYTES, in_query_chunks, logits_bytes_of_a_token
from jaxkv.parallel.context.merge import merge_states
from jaxkv.parallel.context.share import requests_of_tokens, shard_along, whole_lengths
from jaxkv_kernels.formats.bits import ordered_bits
from jaxkv_kernels.formats.entries import IndexerEntry

LAST = 2**31 - 1
"""The rank of positions that are not to be selected."""


def indexer_logits(q, weights, cache: KVCache, block_tables, seq_lens, *, axis, **options) -> jax.Array:
    """`jaxkv.indexer_logits` for the device's own share of the tokens.  Call it inside `shard_map`.

    Args:
      q: [B, Q, Hi, D], the same on all devices along `axis`.
      weights: [B, Q, Hi], the same on all devices along `axis`.
      cache: the cache of this device.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      **options: `layer`, `max_len` (of the share) and `implementation`, as in `jaxkv.indexer_logits`.

    Returns:
      float32 [B, Q, max_len], by position in the share; -inf at positions that a query token does not see.

    Raises:
      ValueError: a shape, dtype or static layer is wrong, or `axis` does not have a device per shard.
    """
    dims = Dims()
    dims.check("q", q, "B Q Hi D", (str(getattr(q, "dtype", None)),))
    dims.check("weights", weights, "B Q Hi")
    tables, lengths, *_ = requests_of_tokens(cache, block_tables, seq_lens, dims, dims["Q"], axis)
    q_rows, weight_rows = (x.reshape(-1, 1, *x.shape[2:]) for x in (q, weights))
    logits = indexer.indexer_logits(q_rows, weight_rows, cache, tables, lengths, **options)
    return logits.reshape(*weights.shape[:2], -1)


def select_topk(logits, k: int, *, shards: TokenShards, axis, implementation=None) -> jax.Array:
    """Selects the positions in the device's share whose logits are among the k largest of all devices.

    Call it inside `shard_map`.

    Every device finds its own k largest logits.  These are gathered, and the k largest of them are selected, in the
    order of `jaxkv.select_topk`.  All devices together therefore select the same tokens as one device would.

    Args:
      logits: float32 [..., N], of this share; -inf marks a position that is not to be selected.
      k: static number of tokens, on all devices together.
      shards: how tokens are divided, `cache.layout.shards`.
      axis: mesh axis (or several) of the `shard_map` around this call.
      implementation: as in `jaxkv.select_topk`, for the selection within the share.

    Returns:
      int32 [..., min(k, N)], positions in the share; -1 where the share has fewer selected tokens.

    Raises:
      ValueError: `logits` is not a float32 array with at least one axis, `k` is not a positive int, or `axis` does not
        have a device per shard.
    """
    shard = shard_along(axis, checked_shards(shards))
    positions = indexer.select_topk(logits, k, implementation=implementation)[..., : logits.shape[-1]]
    ranks = _ranks(jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=-1))
    ranks = jnp.where(positions < 0, LAST, ranks)
    rounds, rest = jnp.divmod(positions, shards.interleave)
    tokens = (rounds * shards.num_shards + shard) * shards.interleave + rest
    gathered = [jnp.moveaxis(x, 0, -1) for x in lax.all_gather((ranks, tokens), axis)]
    best = lax.sort([x.reshape(*positions.shape[:-1], -1) for x in gathered], num_keys=2)
    last_rank, last_token = (x[..., min(k, x.shape[-1]) - 1, None] for x in best)
    chosen = (ranks < last_rank) | ((ranks == last_rank) & (tokens <= last_token))
    return jnp.where(chosen, positions, -1)


def _ranks(logits):
    """int32 ranks in the order of `jaxkv.select_topk`: NaN has the lowest rank, then the largest logit; -0 equals 0."""
    return ~ordered_bits(logits)


def select_slots(
    q, weights, cache: KVCache, block_tables, seq_lens, k: int, *, axis, max_len: int,
    logits_bytes=LOGITS_BYTES, implementation=None, **options,
) -> jax.Array:  # fmt: skip
    """`jaxkv.select_slots` for the device's own share of the tokens.  Call it inside `shard_map`.

    Runs `indexer_logits`, `select_topk` and `jaxkv.positions_to_slots` on one chunk of query tokens at a time.

    Args:
      q: [B, Q, Hi, D], the same on all devices along `axis`.
      weights: [B, Q, Hi], the same on all devices along `axis`.
      cache: the cache of this device.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included.
      k: static number of tokens, on all devices together.
      axis: mesh axis (or several) of the `shard_map` around this call.
      max_len: static number of cached tokens of the share that are scored.
      logits_bytes: as in `jaxkv.select_slots`, for the logits of the share.
      implementation: as in `jaxkv.select_slots`.
      **options: `layer`.

    Returns:
      int32 [B, Q, min(k, max_len)], slots in the cache of this device; -1 where the share has fewer selected tokens.

    Raises:
      ValueError: a shape, dtype or static argument is wrong, or `axis` does not have a device per shard.
    """
    dims = Dims()
    dims.check("q", q, "B Q Hi D", (str(getattr(q, "dtype", None)),))
    dims.check("weights", weights, "B Q Hi")
    check_cache(cache, IndexerEntry)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    layout = cache.layout
    most_bytes = positive_int("logits_bytes", logits_bytes, below=None)
    positive_int("max_len", max_len)

    def select(q, weights, lengths):
        scored = {"axis": axis, "max_len": max_len, "implementation": implementation, **options}
        logits = indexer_logits(q, weights, cache, block_tables, lengths, **scored)
        positions = select_topk(logits, k, shards=layout.shards, axis=axis, implementation=implementation)
        return indexer.positions_to_slots(positions, block_tables, block_size=layout.block_size)

    return in_query_chunks(
        select, q, weights, whole_lengths(block_tables, int32(seq_lens), layout),
        token_bytes=logits_bytes_of_a_token(weights, max_len), most_bytes=most_bytes,
    )  # fmt: skip


def decode_mla_sparse(q_latent, q_pe, cache: KVCache, slots, *, axis, return_lse=False, **options) -> Any:
    """`jaxkv.decode_mla_sparse` over the selected slots of all devices.  Call it inside `shard_map`.

    Each device attends to the slots in its own cache, and the partial results are merged.

    Args:
      q_latent: float [B, Q, Hq, R], the same on all devices along `axis`.
      q_pe: [B, Q, Hq, P], the same on all devices along `axis`.
      cache: the cache of this device.
      slots: int32 [B, Q, K], slots in the cache of this device; negative ones are masked.
      axis: mesh axis (or several) of the `shard_map` around this call.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `kv_scale`, `counts`, `extra` (slots in another cache of this device), `logit_cap`
        and `implementation`, as in `jaxkv.decode_mla_sparse`.

    Returns:
      The result of `jaxkv.decode_mla_sparse`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, there is no such axis, or `sinks` are given.
    """
    if options.get("sinks") is not None:
        raise ValueError("`sinks` are given: expected None, because every device would add them to its share")
    parts = sparse.decode_mla_sparse(q_latent, q_pe, cache, slots, return_lse=True, **options)
    out, lse = merge_states(*parts, axis=axis)
    return (out, lse) if return_lse else out
