"""One call that stores a step's new tokens and attends, with the arguments of tpu-inference's kernels.

Code that is written for these kernels (`mla_ragged_paged_attention`, `ragged_paged_attention`) runs on GPUs by calling
the functions of the same names here.  They differ in the cache, which is a `KVCache` with a `layer`, and have no
arguments that tune a TPU.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.dispatch.validate import Dims, int32
from jaxkv.ops.attention import decode_kv, decode_mla
from jaxkv.ops.writes import write_kv, write_mla
from jaxkv_kernels.addressing.slots import lengths_in_table, ragged_slots


def mla_ragged_paged_attention(
    ql_nope,
    q_pe,
    new_kv_c,
    new_k_pe,
    cache_kv: KVCache,
    kv_lens,
    page_indices,
    cu_q_lens,
    distribution,
    *,
    layer,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation=None,
) -> tuple[jax.Array, KVCache]:
    """Stores new latents and attends to them and to those before: `write_mla`, then ragged `decode_mla`.

    Args:
      ql_nope: float [T, Hq, R], the new tokens' queries multiplied by W_UK.
      q_pe: [T, Hq, P], rotary queries after RoPE, the dtype of `ql_nope`.
      new_kv_c: float [T, R], the new tokens' latents.
      new_k_pe: [T, P], their rotary parts after RoPE.
      cache_kv: a cache of `MLAEntry`.
      kv_lens: int32 [S], tokens of each sequence, the new ones included.
      page_indices: int32 [S * M], the blocks of each sequence in order, M for each.
      cu_q_lens: int32 [S + 1], running sum from 0 of the new tokens of each sequence.
      distribution: int32 [3], (decode, decode or chunked prefill, all): its last number is that of the sequences, and
        those from there on are ignored.  The others, which divide the work of TPU kernels, have no effect.
      layer: int, or traced int32 scalar.
      sm_scale: float, the softmax scale.
      sliding_window: static positive int; a query sees only the last `sliding_window` tokens, itself included.
      soft_cap: static float; scores become soft_cap * tanh(score / soft_cap).
      q_scale: float, a factor of the scores, for queries that were divided by it.
      k_scale: float, the scale of the stored entries, required by format `fp8` and rejected by the others.
      v_scale: None, or `k_scale`: latents are stored once, as keys and as values.
      implementation: None (the best that supports the call), a name, or a sequence of names, for each of the two calls.

    Returns:
      (out, cache): out [T, Hq, R] of ql_nope's dtype, 0 for tokens of no sequence.  Donate the cache to update it in
      place.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    if v_scale is not None and v_scale is not k_scale and v_scale != k_scale:
        raise ValueError(
            f"`v_scale` is {v_scale}: expected None or `k_scale`, {k_scale}, because latents are stored once"
        )
    slots, paged = _paged(cache_kv, ql_nope, kv_lens, page_indices, cu_q_lens, distribution)
    cache_kv = write_mla(
        cache_kv, new_kv_c, new_k_pe, slots, layer=layer, kv_scale=k_scale, implementation=implementation
    )  # fmt: skip
    options = {"window": sliding_window, "logit_cap": soft_cap, "implementation": implementation}
    scale = sm_scale if q_scale is None else sm_scale * q_scale
    tables, lengths, cu_q_lens = paged
    out = decode_mla(
        ql_nope,
        q_pe,
        cache_kv,
        tables,
        lengths,
        layer=layer,
        scale=scale,
        kv_scale=k_scale,
        cu_q_lens=cu_q_lens,
        **options,
    )
    return out, cache_kv


def ragged_paged_attention(
    queries,
    keys,
    values,
    kv_cache: KVCache,
    kv_lens,
    page_indices,
    cu_q_lens,
    distribution,
    attention_sink=None,
    *,
    layer,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale=None,
    v_scale=None,
    use_causal_mask: bool = True,
    implementation=None,
) -> tuple[jax.Array, KVCache]:
    """Stores new keys and values and attends to them and to those before: `write_kv`, then ragged `decode_kv`.

    Args:
      queries: float [T, Hq, D], the queries of the new tokens.
      keys: float [T, H, D], their keys.
      values: float [T, H, Dv], their values.
      kv_cache: a cache of `KVEntry`.
      kv_lens: int32 [S], tokens of each sequence, the new ones included.
      page_indices: int32 [S * M], the blocks of each sequence in order, M for each.
      cu_q_lens: int32 [S + 1], running sum from 0 of the new tokens of each sequence.
      distribution: int32 [3], as in `mla_ragged_paged_attention`.
      attention_sink: float32 [Hq], one logit per head that is added to the softmax's denominator.
      layer: int, or traced int32 scalar.
      sm_scale: float, the softmax scale.
      sliding_window: static positive int; a query sees only the last `sliding_window` tokens, itself included.
      soft_cap: static float; scores become soft_cap * tanh(score / soft_cap).
      q_scale: float, a factor of the scores, for queries that were divided by it.
      k_scale: float or [H], the scale of the stored keys, required by format `fp8` and rejected by the others.
      v_scale: the same for values.
      use_causal_mask: static bool; if False, every query token sees all tokens of its sequence.
      implementation: None (the best that supports the call), a name, or a sequence of names, for each of the two calls.

    Returns:
      (out, cache): out [T, Hq, Dv] of the queries' dtype, 0 for tokens of no sequence.  Donate the cache to update it
      in place.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    slots, (tables, lengths, cu_q_lens) = _paged(kv_cache, queries, kv_lens, page_indices, cu_q_lens, distribution)
    both: dict[str, Any] = {
        "layer": layer, "k_scale": k_scale, "v_scale": v_scale, "implementation": implementation,
    }  # fmt: skip
    kv_cache = write_kv(kv_cache, keys, values, slots, **both)
    out = decode_kv(
        queries, kv_cache, tables, lengths, scale=sm_scale if q_scale is None else sm_scale * q_scale,
        logit_cap=soft_cap, window=sliding_window, causal=use_causal_mask, sinks=attention_sink, cu_q_lens=cu_q_lens,
        **both,
    )  # fmt: skip
    return out, kv_cache


def _paged(cache: KVCache, q, kv_lens, page_indices, cu_q_lens, distribution):
    """The slots [T] of new tokens; block tables, lengths and running sums of query tokens of the sequences in use."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"the cache is a {type(cache).__name__}: expected a KVCache")
    dims = Dims(d=(3, "(decode, decode or chunked prefill, all)"))
    dims.check_ints("kv_lens", kv_lens, "S")
    dims.check_ints("page_indices", page_indices, "I")
    dims.check_ints("distribution", distribution, "d")
    count = dims["S"]
    Dims(**{"S+1": (count + 1, "one more than `kv_lens`")}).check_ints("cu_q_lens", cu_q_lens, "S+1")
    if math.prod(page_indices.shape) % count:
        raise ValueError(f"`page_indices` has {dims['I']} elements: expected a multiple of the {count} sequences")
    tables, block_size = int32(page_indices).reshape(count, -1), cache.layout.block_size
    used = jnp.arange(count, dtype=jnp.int32) < int32(distribution)[2]
    lengths = jnp.where(used, lengths_in_table(int32(kv_lens), tables, block_size), 0)
    cu_q_lens = int32(cu_q_lens)
    # Sequences that are not in use have no new tokens: the running sum stays where the last one in use ends.
    end = jnp.max(jnp.where(used, cu_q_lens[1:], 0), initial=0)
    cu_q_lens = jnp.minimum(cu_q_lens, end)
    starts = lengths - (cu_q_lens[1:] - cu_q_lens[:-1])
    slots = ragged_slots(tables, cu_q_lens, total=q.shape[0], block_size=block_size, seq_starts=starts)
    return slots, (tables, lengths, cu_q_lens)
