"""The DeepSeek V3.2 indexer over several devices: each scores its tokens, and attends to its share of the overall best.

As on one device: `indexer_logits`, `select_topk`, `jaxkv.positions_to_slots`, `decode_mla_sparse`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.dispatch.validate import Dims, positive_int
from jaxkv.ops import indexer, sparse
from jaxkv.parallel.context.merge import merge_states
from jaxkv.parallel.context.share import here, requests_of_tokens

LAST = 2**31 - 1
"""The rank of positions that are not to be selected."""


def indexer_logits(
    q, weights, cache: KVCache, block_tables, seq_lens, *, axis, interleave: int = 1, **options
) -> jax.Array:
    """`jaxkv.indexer_logits` of the device's own share; inside `shard_map`.

    Args:
      q: [B, Q, Hi, D], the same on all devices along `axis`.
      weights: [B, Q, Hi], the same on all devices along `axis`.
      cache: the device's own.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to 0 and to
        what the tables of all devices have room for, as if the request had that many.
      axis: mesh axis (or several) of the `shard_map` around this call.
      interleave: static int, consecutive tokens that one shard owns.
      **options: `layer`, `max_len` (of the share) and `implementation` as `jaxkv.indexer_logits` has them.

    Returns:
      float32 [B, Q, max_len], by position in the share; -inf where a query token does not see that far.

    Raises:
      ValueError: a shape, dtype or static layer is wrong, or there is no such axis.
    """
    dims = Dims()
    dims.check("q", q, "B Q Hi D", (str(getattr(q, "dtype", None)),))
    dims.check("weights", weights, "B Q Hi")
    tables, lengths = requests_of_tokens(cache, block_tables, seq_lens, dims, dims["Q"], axis, interleave)
    q_rows, weight_rows = (x.reshape(-1, 1, *x.shape[2:]) for x in (q, weights))
    logits = indexer.indexer_logits(q_rows, weight_rows, cache, tables, lengths, **options)
    return logits.reshape(*weights.shape[:2], -1)


def select_topk(logits, k: int, *, axis, interleave: int = 1, implementation=None) -> jax.Array:
    """The positions in the device's share that are among the k largest logits of all devices; inside `shard_map`.

    Every device finds its own k best.  These are gathered, and the k best of them are selected: NaN before all others,
    and the earlier token among equal logits.  The result is the same tokens as on one device.

    Args:
      logits: float32 [..., N], of this share; -inf marks a position that is not to be selected.
      k: static number of tokens, on all devices together.
      axis: mesh axis (or several) of the `shard_map` around this call.
      interleave: static int, consecutive tokens that one shard owns.
      implementation: that of `jaxkv.select_topk` on the share.

    Returns:
      int32 [..., min(k, N)], positions in the share, -1 elsewhere.

    Raises:
      ValueError: `logits` is not a float32 array with at least one axis, `k` is not a positive int, or there is no such
        axis.
    """
    positive_int("interleave", interleave)
    me = here(axis)
    positions = indexer.select_topk(logits, k, implementation=implementation)[..., : logits.shape[-1]]
    ranks = _ranks(jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=-1))
    ranks = jnp.where(positions < 0, LAST, ranks)
    rounds, rest = jnp.divmod(positions, interleave)
    tokens = (rounds * me["num_shards"] + me["shard"]) * interleave + rest
    gathered = [jnp.moveaxis(x, 0, -1) for x in lax.all_gather((ranks, tokens), axis)]
    best = lax.sort([x.reshape(*positions.shape[:-1], -1) for x in gathered], num_keys=2)
    last_rank, last_token = (x[..., min(k, x.shape[-1]) - 1, None] for x in best)
    chosen = (ranks < last_rank) | ((ranks == last_rank) & (tokens <= last_token))
    return jnp.where(chosen, positions, -1)


def _ranks(logits):
    """int32 ranks in the order of `jaxkv.select_topk`: lowest for NaN, then for the largest logit; -0 equals 0."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    return ~jnp.where(jnp.isnan(logits), LAST, bits ^ ((bits >> 31) & LAST))


def decode_mla_sparse(q_latent, q_pe, cache: KVCache, slots, *, axis, return_lse=False, **options) -> Any:
    """`jaxkv.decode_mla_sparse` to slots of all devices, each of which attends to its own; inside `shard_map`.

    Args:
      q_latent: float [B, Q, Hq, R], the same on all devices along `axis`.
      q_pe: [B, Q, Hq, P], the same on all devices along `axis`.
      cache: the device's own.
      slots: int32 [B, Q, K], slots of the device's own cache; negative ones are masked.
      axis: mesh axis (or several) of the `shard_map` around this call.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `kv_scale`, `counts`, `logit_cap`, `implementation` as `jaxkv.decode_mla_sparse` has
        them.

    Returns:
      As `jaxkv.decode_mla_sparse`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, there is no such axis, or `sinks` are given.
    """
    if options.get("sinks") is not None:
        raise ValueError("`sinks` are given: expected None, because every device would add them to its share")
    parts = sparse.decode_mla_sparse(q_latent, q_pe, cache, slots, return_lse=True, **options)
    out, lse = merge_states(*parts, axis=axis)
    return (out, lse) if return_lse else out
