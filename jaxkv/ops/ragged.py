"""One call that stores a step's new tokens and attends, with the arguments of tpu-inference's kernels.

Code that is written for these kernels (`mla_ragged_paged_attention`, `ragged_paged_attention`) runs on GPUs by calling
the functions of the same names here.  Arguments of the same names have the same meaning as in tpu-inference
(`kernels/ragged_paged_attention/v3/kernel.py` and `kernel_hd64.py`, `kernels/mla/v2/kernel.py`, version 0.32.0).
These functions differ as follows:

- The cache is a `KVCache`, with a `layer`.
- The options of `TPUOptions`, such as sizes for a TPU, are accepted and have no effect.
- `update_kv_cache=False`, for a layer that reads the entries of another one, needs no new keys and values.  The kernels
  expect arrays, which they ignore.
- New keys, values and latents for caches of format `fp8` may be float8_e4m3fn, divided by their scale before the call,
  as the kernels require.  They may also be of another float dtype; then they are divided by the scale here.
- A `sliding_window` may also be a pair (left, right), as in `decode_mla`.  An int needs a causal mask.
- Tokens of no sequence have results of 0.
"""

import math
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    QUERIES,
    Dims,
    check_cache,
    entry_scale,
    float_dtype,
    int32,
    mla_dims,
    positive_scale,
    running_sum,
    static_bool,
)
from jaxkv.dispatch import Implementations
from jaxkv.ops.attention import converted, decode_kv, decode_mla, query_axes
from jaxkv.ops.writes import write_kv, write_mla
from jaxkv_kernels.addressing import lengths_in_table, ragged_slots, table_tokens
from jaxkv_kernels.formats.bits import FP8, e4m3_values
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry


class TPUOptions(TypedDict, total=False):
    """Options of tpu-inference's kernels that do not change results here, and are ignored."""

    mask_value: float | None
    """What masked scores are replaced by there.  Here, masked tokens have the weight 0."""
    skip_kv_mask: bool
    """Whether tokens beyond a sequence need no mask there.  Here, they have no influence."""
    chunk_prefill_size: int | None
    num_kv_pages_per_block: tuple[int, int, int] | int | None
    num_queries_per_block: tuple[int, int, int] | int | None
    d_block_sizes: tuple[int, int, int, int] | None
    p_block_sizes: tuple[int, int, int, int] | None
    m_block_sizes: tuple[int, int, int, int] | None
    vmem_limit_bytes: int | None
    decode_batch_size: int
    mixed_q_split: int
    s_dtype: DTypeLike
    """The dtype of scores there.  Here, they are float32."""
    two_step_flash_attention: bool
    p_same_dtype_as_v: bool
    transpose_kv_cache: bool
    """The layout of the cache there.  Here, it is that of the `KVCache`."""
    debug_mode: bool
    disable_bounds_checks: bool
    disable_semaphore_checks: bool


def mla_ragged_paged_attention(
    ql_nope: ArrayLike,
    q_pe: ArrayLike,
    new_kv_c: ArrayLike | None,
    new_k_pe: ArrayLike | None,
    cache_kv: KVCache[MLAEntry],
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    *,
    layer: ArrayLike,
    sm_scale: float = 1.0,
    sliding_window: int | tuple[int, int] | None = None,
    soft_cap: float | None = None,
    out_dtype: DTypeLike | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    update_kv_cache: bool = True,
    implementation: Implementations | None = None,
    **tpu_options: Unpack[TPUOptions],
) -> tuple[jax.Array, KVCache[MLAEntry]]:
    """Stores new latents and attends to them and to those before: `write_mla`, then ragged `decode_mla`.

    Args:
      ql_nope: float or float8_e4m3fn [T, Hq, R], the new tokens' queries multiplied by W_UK.  (Since 2026, the kernel
        expects [Hq, T, R], and returns results in this order: transpose both.)
      q_pe: [T, Hq, P], rotary queries after RoPE, the dtype of `ql_nope`.
      new_kv_c: float [T, R], the new tokens' latents, or float8_e4m3fn for a cache of format `fp8`, divided by
        `k_scale`.  Ignored without `update_kv_cache`, and may then be None.
      new_k_pe: [T, P], their rotary parts after RoPE, of the same kind.
      cache_kv: a cache of `MLAEntry`.
      kv_lens: int32 [S], tokens of each sequence, the new ones included.
      page_indices: int32 [S * M], the blocks of each sequence in order, M for each.
      cu_q_lens: int32 [S + 1], running sum from 0 of the new tokens of each sequence.  A sum that is less than
        an earlier one is replaced by the earlier one.
      distribution: int32 [3], (decode, decode or chunked prefill, all): its last number is that of the sequences.
        Sequences from there on are ignored: their `kv_lens`, `page_indices` and `cu_q_lens` may hold anything.  The
        other two numbers, which divide the work of TPU kernels, have no effect.
      layer: int, or traced int32 scalar.
      sm_scale: float, the softmax scale.
      sliding_window: static positive int; a query sees only the last `sliding_window` tokens, itself included.  A pair
        of ints (left, right) is a window as in `decode_mla`.
      soft_cap: static float; scores become soft_cap * tanh(score / soft_cap).
      out_dtype: dtype of the results, which are first rounded to that of the queries; by default the latter.
      q_scale: float, a factor of the scores, for queries that the caller has divided by it.
      k_scale: float, the scale of the stored entries, required by format `fp8` (with float8_e4m3fn latents, the default
        is 1) and rejected by the others.  Scores are those of the stored keys, multiplied by it.
      v_scale: float, a factor of the results of format `fp8`, which are sums of stored latents; default 1.  Usually the
        same number as `k_scale`, because latents are stored once, as keys and as values.
      update_kv_cache: static bool; if False, nothing is stored: the layer, whose index is `layer`, has the entries of
        the new tokens already.
      implementation: None (the best that supports the call), a name, or a sequence of names, for each of the two calls.
      tpu_options: ignored, whatever their values.

    Returns:
      (out, cache): out [T, Hq, R] of ql_nope's dtype (e4m3 converted, as in `decode_kv`) or `out_dtype`, 0 for tokens
      of no sequence.
      A token whose position is beyond the sequence's table is not stored.  Donate the cache to update it in place.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
      TypeError: `tpu_options` has an option that the kernels do not have.
    """
    _check_options("mla_ragged_paged_attention", tpu_options)
    check_cache(cache_kv, MLAEntry, name="cache_kv")
    slots, (tables, lengths, cu_q_lens) = _paged(
        cache_kv, "ql_nope", ql_nope, kv_lens, page_indices, cu_q_lens, distribution
    )
    # The operations below would name their own arguments.
    entry, dims = cache_kv.layout.entry, mla_dims(cache_kv)
    dims.check("ql_nope", ql_nope, "T Hq R", QUERIES)
    dims.check("q_pe", q_pe, "T Hq P", QUERIES)
    scale: Any = sm_scale
    if q_scale is not None:
        scale = positive_scale("q_scale", q_scale) * scale
    if static_bool("update_kv_cache", update_kv_cache):
        dims.check("new_kv_c", new_kv_c, "T R", QUERIES)
        dims.check("new_k_pe", new_k_pe, "T P", QUERIES)
        (kv_c, k_pe), write_scale, k_scale = _stored((new_kv_c, new_k_pe), k_scale, entry.format, entry.input_dtype)
        cache_kv = write_mla(
            cache_kv, kv_c, k_pe, slots, layer=layer, kv_scale=write_scale, implementation=implementation
        )  # fmt: skip
    q_latent, q_pe = (converted(q, entry.input_dtype) for q in (ql_nope, q_pe))
    out = decode_mla(
        q_latent, q_pe, cache_kv, tables, lengths, layer=layer, scale=scale, kv_scale=k_scale, window=sliding_window,
        logit_cap=soft_cap, cu_q_lens=cu_q_lens, implementation=implementation,
    )  # fmt: skip
    if v_scale is None and k_scale is not None:
        v_scale = 1.0
    if v_scale is not k_scale:
        # `decode_mla` has multiplied the sums of stored latents by `k_scale`.
        wanted: Any = entry_scale("v_scale", v_scale, cache_kv)
        out = (out.astype(jnp.float32) * (wanted / k_scale)).astype(out.dtype)
    return _as_dtype(out, out_dtype), cache_kv


def ragged_paged_attention(
    queries: ArrayLike,
    keys: ArrayLike | None,
    values: ArrayLike | None,
    kv_cache: KVCache[KVEntry],
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    attention_sink: ArrayLike | None = None,
    *,
    layer: ArrayLike,
    sm_scale: float = 1.0,
    sliding_window: int | tuple[int, int] | None = None,
    soft_cap: float | None = None,
    out_dtype: DTypeLike | None = None,
    q_scale: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    implementation: Implementations | None = None,
    **tpu_options: Unpack[TPUOptions],
) -> tuple[jax.Array, KVCache[KVEntry]]:
    """Stores new keys and values and attends to them and to those before: `write_kv`, then ragged `decode_kv`.

    Args:
      queries: float or float8_e4m3fn [T, Hq, D], the queries of the new tokens, not divided by `q_scale`.
      keys: float [T, H, D], their keys, or float8_e4m3fn for a cache of format `fp8`, divided by `k_scale`.  Ignored
        without `update_kv_cache`, like `values`, and may then be None.
      values: float [T, H, Dv], their values, or float8_e4m3fn, divided by `v_scale`.
      kv_cache: a cache of `KVEntry`.
      kv_lens: int32 [S], tokens of each sequence, the new ones included.
      page_indices: int32 [S * M], the blocks of each sequence in order, M for each.
      cu_q_lens: int32 [S + 1], running sum from 0 of the new tokens of each sequence.  A sum that is less than
        an earlier one is replaced by the earlier one.
      distribution: int32 [3], as in `mla_ragged_paged_attention`: its last number is that of the sequences.  Those from
        there on are ignored: their `kv_lens`, `page_indices` and `cu_q_lens` may hold anything.
      attention_sink: float32 [Hq], one logit per head that is added to the softmax's denominator, as it is.
      layer: int, or traced int32 scalar.
      sm_scale: float, the softmax scale.
      sliding_window: static positive int; a query sees only the last `sliding_window` tokens, itself included.  A pair
        of ints (left, right) is a window as in `decode_mla`.
      soft_cap: static float; scores become soft_cap * tanh(score / soft_cap).
      out_dtype: dtype of the results, which are first rounded to that of the queries; by default the latter.
      q_scale: float; queries are divided by it, rounded to the dtype in which the cache stores keys (e4m3 for format
        `fp8`, saturating), and the scores are multiplied by it.  Rejected by formats without such a dtype.
      k_scale: float or [H], the scale of the stored keys, required by format `fp8` (with float8_e4m3fn keys, the
        default is 1) and rejected by formats without a scale.
      v_scale: the same for values and their format.
      use_causal_mask: static bool; if False, a query token sees all tokens of its sequence, or those in its window.
      update_kv_cache: static bool; if False, nothing is stored.  Layers without keys and values of their own, as in
        Gemma 3n, read those of another layer in this way: pass that layer's index as `layer`.
      implementation: None (the best that supports the call), a name, or a sequence of names, for each of the two calls.
      tpu_options: ignored, whatever their values.

    Returns:
      (out, cache): out [T, Hq, Dv] of the queries' dtype (e4m3 converted, as in `decode_kv`) or `out_dtype`, 0 for
      tokens of no sequence.  A token whose position is beyond the sequence's table is not stored.  Donate the cache to
      update it in place.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
      TypeError: `tpu_options` has an option that the kernels do not have.
    """
    _check_options("ragged_paged_attention", tpu_options)
    check_cache(kv_cache, KVEntry, name="kv_cache")
    slots, (tables, lengths, cu_q_lens) = _paged(
        kv_cache, "queries", queries, kv_lens, page_indices, cu_q_lens, distribution
    )
    entry, heads = kv_cache.layout.entry, kv_cache.layout.num_heads
    dims = Dims(
        D=(entry.head_dim, "the entry's head_dim"),
        Dv=(entry.value_dim, "the entry's value_dim"),
        H=(heads, "the cache's heads"),
    )
    dims.check("queries", queries, "T Hq D", QUERIES)
    if dims["Hq"] % heads:
        raise ValueError(f"`queries` has {dims['Hq']} heads: expected a multiple of the cache's {heads} heads")
    if static_bool("update_kv_cache", update_kv_cache):
        dims.check("keys", keys, "T H D", QUERIES)
        dims.check("values", values, "T H Dv", QUERIES)
        (k,), write_k_scale, k_scale = _stored((keys,), k_scale, entry.format, entry.input_dtype)
        (v,), write_v_scale, v_scale = _stored((values,), v_scale, entry.format_names[-1], entry.input_dtype)
        kv_cache = write_kv(
            kv_cache, k, v, slots, layer=layer, k_scale=write_k_scale, v_scale=write_v_scale,
            implementation=implementation,
        )  # fmt: skip
    queries, scale = converted(queries, entry.input_dtype), sm_scale
    dtype = queries.dtype
    if q_scale is not None:
        factor: Any = positive_scale("q_scale", q_scale)
        queries, scale = _rounded(queries, factor, entry), factor * sm_scale
    out = decode_kv(
        queries, kv_cache, tables, lengths, layer=layer, scale=scale, k_scale=k_scale, v_scale=v_scale,
        logit_cap=soft_cap, window=sliding_window, causal=use_causal_mask, sinks=attention_sink, cu_q_lens=cu_q_lens,
        implementation=implementation,
    )  # fmt: skip
    return _as_dtype(out.astype(dtype), out_dtype), kv_cache


def _check_options(function: str, options: TPUOptions) -> None:
    """TypeError, as from Python, if an option has an unknown name."""
    for name in options:
        if name not in TPUOptions.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _as_dtype(out: jax.Array, dtype) -> jax.Array:
    """Results in the dtype that the caller asks for."""
    return out if dtype is None else out.astype(float_dtype("out_dtype", dtype))


def _stored(parts: tuple, scale, format: str, dtype) -> tuple[tuple, Any, Any]:
    """New values as writes expect them, the scale by which a write divides them, and that of the stored entries.

    `format` is that of the stored values, and `dtype` the entry's `input_dtype`.
    """
    if format != "fp8" or any(getattr(part, "dtype", None) != FP8 for part in parts):
        return parts, scale, scale
    return tuple(part.astype(dtype) for part in parts), 1.0, 1.0 if scale is None else scale


def _rounded(q, scale, entry) -> jax.Array:
    """`q` / `scale`, rounded to values of the dtype in which entries are stored, in a dtype that `decode_kv` supports.

    Rounding by conversions to a dtype and back would not do, because XLA may leave both out.
    """
    x = q.astype(jnp.float32) / scale
    if entry.format == "fp8":
        return e4m3_values(x).astype(q.dtype)
    if entry.quantised:
        raise ValueError(
            f"`q_scale` is given: expected None, because queries are rounded to the dtype of the stored keys, and "
            f"entries of format {entry.label!r} have no float dtype"
        )
    info = jnp.finfo(entry.dtype)
    x = jnp.clip(x, float(info.min), float(info.max))
    x = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return x.astype(jnp.promote_types(q.dtype, entry.dtype))


def _paged(cache: KVCache, name: str, q, kv_lens, page_indices, cu_q_lens, distribution):
    """The slots [T] of new tokens; block tables, lengths and running sums of query tokens of the sequences in use."""
    query_axes(name, q, ragged=True)
    dims = Dims(d=(3, "(decode, decode or chunked prefill, all)"))
    dims.check_ints("kv_lens", kv_lens, "S")
    dims.check_ints("page_indices", page_indices, "I")
    dims.check_ints("distribution", distribution, "d")
    count = dims["S"]
    Dims(**{"S+1": (count + 1, "one more than `kv_lens`")}).check_ints("cu_q_lens", cu_q_lens, "S+1")
    if math.prod(page_indices.shape) % count:
        raise ValueError(f"`page_indices` has {dims['I']} elements: expected a multiple of the {count} sequences")
    tables, block_size = int32(page_indices).reshape(count, -1), cache.layout.block_size
    # Sequences that are not in use have no tokens: the running sum stays where the last one in use ends.
    used = jnp.arange(count + 1, dtype=jnp.int32) <= int32(distribution)[2]
    kv_lens = jnp.where(used[1:], int32(kv_lens), 0)
    sums: Any = running_sum(jnp.where(used, int32(cu_q_lens), 0))
    new: Any = jnp.diff(sums)
    if data_checks.checking():
        _check_data(cache, tables, kv_lens, new)
    starts = jnp.maximum(kv_lens, 0) - new
    slots = ragged_slots(tables, sums, total=q.shape[0], block_size=block_size, seq_starts=starts)
    return slots, (tables, lengths_in_table(kv_lens, tables, block_size), sums)


def _check_data(cache: KVCache, tables, kv_lens, new) -> None:
    """Checks, in checked mode, that lengths include the new tokens, and that the tables have blocks for these."""
    pages, columns = cache.layout.pages, tables.shape[1]
    capacity = table_tokens(tables, pages.block_size)
    data_checks.require(kv_lens >= new, "kv_lens", kv_lens, "it includes the {new} new tokens of the sequence", new=new)
    enough = f"`page_indices` has {columns} blocks per sequence, for {capacity} tokens"
    data_checks.require(kv_lens <= capacity, "kv_lens", kv_lens, enough)
    begins = jnp.arange(columns, dtype=jnp.int32) * pages.block_size
    used = (begins + pages.block_size > (kv_lens - new)[:, None]) & (begins < kv_lens[:, None])
    data_checks.check_ids("page_indices", tables.reshape(-1), pages, used.reshape(-1))
