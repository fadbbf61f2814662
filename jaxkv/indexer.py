"""The DeepSeek V3.2 indexer: score every cached key, keep the best, attend to those."""

import jax
import jax.numpy as jnp

from jaxkv import checks
from jaxkv.arguments import FLOATS, Dims, check_cache, int32, layer_index, positive_int, told
from jaxkv.cache import KVCache
from jaxkv.dispatch import Call, run
from jaxkv.slots import slots_for
from jaxkv_kernels.entries import IndexerEntry


def indexer_logits(
    q, weights, cache: KVCache, block_tables, seq_lens, *, layer, max_len: int, implementation=None
) -> jax.Array:
    """Scores of the indexer's queries against the cached keys of each request.

    logit[j] = sum over heads h of relu(q_h . k_j) * w_h, times the scale of key j (DeepGEMM's paged MQA logits).

    Args:
      q: float or float8_e4m3fn [B, Q, Hi, D].
      weights: float [B, Q, Hi]; a scale of a quantised q belongs in here.
      cache: a cache of `IndexerEntry`.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length may hold anything.
      seq_lens: int32 [B], tokens of each request, the new ones included; clamped to 0 and to the M * block_size tokens
        that a table has room for, as if the request had that many.
      layer: int, or traced int32 scalar.
      max_len: static number of positions of the result, below 2**31, as positions are int32.
      implementation: None (the best that takes the call), a name, or a sequence of names.

    Returns:
      float32 [B, Q, max_len]; -inf at positions that query token t of Q does not see: `seq_len - Q + 1 + t` and on.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    check_cache(cache, IndexerEntry)
    dims = Dims(D=(cache.layout.entry.sizes[0], "the entry's head_dim"))
    dims.check("q", q, "B Q Hi D", (*FLOATS, "float8_e4m3fn"))
    dims.check("weights", weights, "B Q Hi")
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    block_tables, seq_lens = int32(block_tables), int32(seq_lens)
    layer, pages = layer_index(layer, cache), cache.layout.pages
    max_len = positive_int("max_len", max_len)
    if checks.checking():
        checks.check_layer(layer, pages)
        checks.check_tables(block_tables, jnp.zeros_like(seq_lens), seq_lens, pages, most=max_len)
    arrays = {
        "q": q,
        "weights": weights,
        "buffer": cache.buffer,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "layer": layer,
    }
    options = {"pages": pages, "entry": cache.layout.entry, "max_len": max_len}
    return run(Call("indexer_logits", arrays, options), implementation)


def select_topk(logits, k: int, *, implementation=None) -> jax.Array:
    """The positions of the k largest logits of each row.

    Args:
      logits: float32 [..., N]; -inf marks a position that is not to be selected.
      k: static number of positions, below 2**31.
      implementation: None (the best that takes the call), a name, or a sequence of names.

    Returns:
      int32 [..., k], largest logit first (a NaN, of either sign, before all others) and the earlier position where
      logits are equal; -1 where a row has fewer than k positions.

    Raises:
      ValueError: `logits` is no float32 array with a last axis, or `k` no positive int.
    """
    if not hasattr(logits, "dtype") or logits.dtype != jnp.float32 or not logits.shape:
        raise ValueError(f"`logits` is {told(logits)}: expected float32 [..., N]")
    return run(Call("select_topk", {"logits": logits}, {"k": positive_int("k", k)}), implementation)


def positions_to_slots(positions, block_tables, *, block_size: int) -> jax.Array:
    """The slots of selected positions.

    Args:
      positions: int32 [B, Q, K], positions in each request (`select_topk`); negative ones stay -1.
      block_tables: int32 [B, M], the blocks of each request in order.
      block_size: tokens a block.

    Returns:
      int32 [B, Q, K], for `decode_mla_sparse`; -1 also for positions past the table.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    dims = Dims()
    dims.check_ints("positions", positions, "B Q K")
    return slots_for(block_tables, positions, block_size=block_size)
