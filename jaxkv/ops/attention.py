"""Dense attention of new tokens to the cache."""

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    FLOATS,
    QUERIES,
    Dims,
    check_cache,
    computed,
    entry_scale,
    int32,
    layer_index,
    logit_cap_of,
    mla_dims,
    query_scale,
    softmax_scale,
    static_bool,
)
from jaxkv.dispatch import Implementations
from jaxkv.ops.masking import mask_fields, seen_by_some
from jaxkv.ops.operation import Operation
from jaxkv.ops.plan import DecodePlan, groups_of, prefix_plan, run_planned
from jaxkv.ops.ragged_queries import Arrangement, arrange
from jaxkv.ops.samples import PAGED, sample_options, sample_queries
from jaxkv.ops.shared_prefix import SharedPrefixes, shared_prefixes
from jaxkv_kernels import calls
from jaxkv_kernels.addressing import slots_for
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.masks import Mask
from jaxkv_kernels.scores import merged, with_sinks


@overload
def decode_mla(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    tree_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    prefix_tables: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    prefix_of: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    plan: DecodePlan | None = None,
    implementation: Implementations | None = None,
) -> jax.Array: ...
@overload
def decode_mla(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    tree_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    prefix_tables: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    prefix_of: ArrayLike | None = None,
    return_lse: Literal[True],
    plan: DecodePlan | None = None,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def decode_mla(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    tree_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    prefix_tables: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    prefix_of: ArrayLike | None = None,
    return_lse: bool = False,
    plan: DecodePlan | None = None,
    implementation: Implementations | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Absorbed multi-head latent attention of one or several new tokens per request.

    score = (q_latent . kv_c + q_pe . k_pe) * scale; the result is the softmax-weighted sum of the latents kv_c.  The
    entries of the new tokens must already be in the cache.  The mask is causal and aligned to the end: query token t of
    Q sees the first `seq_len - Q + 1 + t` tokens.

    The result of a query token does not depend on tokens that it does not see.  On `xla` this holds whatever they
    contain.  `triton` and `mosaic_gpu` multiply the values of a token by a weight of 0 for the query tokens of the same
    request that do not see it.  If these values hold inf or NaN and another query token of the request sees them, `out`
    may be NaN.  Data that is used only in keys has no such effect, and neither have tokens that no query token of the
    request sees.

    Both results have gradients in forward and reverse mode, on every implementation: with respect to queries, `sinks`,
    scales, and the buffer of a cache whose format is bf16, f16 or f32 and whose buffer has this dtype.  With respect to
    other float buffers, NotImplementedError is raised.

    Args:
      q_latent: float or float8_e4m3fn [B, Hq, R], [B, Q, Hq, R] or, with `cu_q_lens`, [T, Hq, R]: queries multiplied
        by W_UK.  Queries of e4m3 are converted to the entries' dtype, or bfloat16 if these are quantised, which loses
        nothing.
      q_pe: rotary queries after RoPE, of the shape of `q_latent` with P instead of R, and of its dtype.
      cache: a cache of `MLAEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: float, the model's own softmax scale, which cannot be inferred from R and P.
      q_scale: float scalar or [Hq], the scale of queries of e4m3, default 1; value = stored * q_scale.  Queries of
        other dtypes have none.  A scalar loses nothing.  With one scale per head, the queries of all heads but those
        with the largest scale are rounded once, to the dtype to which they are converted.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      logit_cap: static float, from 2**-126 to 2**126; scores become cap * tanh(score / cap).  A cap far above all
        scores changes nothing.  GPU kernels support caps up to 64, `xla` all.
      window: static int or pair of ints; which tokens around its own a query token sees.  The query token at position p
        (`seq_len` - Q + t for token t of Q) sees these positions below `seq_len`, and with a causal mask only those up
        to p:

            (left, right)    p - left <= position <= p + right; a limit of -1 excludes nothing
            int              p - window < position: the last `window` tokens, its own included

        An int must be positive and needs a causal mask, with which it means the same as (window - 1, -1).  Numbers may
        be of any size, and those of at least the capacity of the table have no effect.  Where a request has fewer than
        Q tokens, p may be negative.
      causal: static bool; if False, a query token also sees later tokens: all `seq_len` tokens of its request, or those
        in the `window`.
      mask: static function of int32 positions of queries and of keys, which are broadcast, to bool: whether a query
        sees a key.  It narrows what `window`, `causal` and `tree_mask` show, is traced as the rest of the program, and
        should be defined once, because a program is compiled again for another function.  `xla` supports all functions,
        GPU kernels those of `jaxkv.masks`, which show intervals of tokens.  There, each query token is a request of its
        own for the kernels, so that several query tokens of a request read its keys several times.
      tree_mask: bool [B, Q, Q]; which of the new tokens of its request a query token sees, for trees of draft tokens:
        query token i sees new token j if tree_mask[b, i, j].  It replaces the causal mask, and `causal` must be True.
        All tokens before the new ones are visible.  A `window` counts the order of tokens, not their depth in the tree,
        and its limits apply as without a causal mask.  In a request with fewer than Q tokens, new tokens at negative
        positions do not exist.  With `cu_q_lens`, bool [T, J]: row t for query token t, column j for new token j of its
        request; new tokens past the last column are not seen.  On GPUs, kernels attend to the tokens before the new
        ones, XLA to the new ones, and the results are merged.
      sinks: float32 [Hq]; attention sinks: one logit per head that is added to the softmax's denominator, without a
        value.  `out` is multiplied by exp(lse) / (exp(lse) + exp(sink)); `lse` does not change.
      cu_q_lens: int32 [B + 1], running sum from 0 of the query tokens of each request, whose numbers may differ: those
        of request b are q_latent[cu_q_lens[b] : cu_q_lens[b + 1]], its last tokens.  T may differ from the last sum:
        rows past it belong to no request, and query tokens past the last row are left out.  A sum that is less than an
        earlier one is replaced by the earlier one.  For unused requests at the end, pass the last sum again, 0, or a
        negative number (`checked` reports sums that fall).  The tables and lengths of requests without query tokens may
        hold anything.
      prefix_tables: int32 [M'], the blocks of a prefix that all requests share, or [G, M'], those of several prefixes.
        Its tokens come before the requests' own tokens, which alone are in `block_tables` and count in `seq_lens`.  All
        query tokens of a request see its whole prefix, which is read once for all requests.  The mask of own tokens is
        the same as without a prefix; there must be no `window` and no `mask`.
      prefix_lens: int32 scalar, or [G], the tokens of each prefix, clamped as `seq_lens`.
      prefix_of: int32 [B], the prefix of each request, a row of `prefix_tables` [G, M']; another number, such as -1,
        for none.
      return_lse: also return the log-sum-exp of the scores.
      plan: what `plan_decode` returned for the same tables, lengths, prefixes, numbers of heads and query tokens, and
        query dtype; if None, the call makes its own plan.  With a plan for other lengths, results are wrong, though
        nothing outside the cache is read; only `checked` reports it, since a check would cost a kernel per layer.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out, of q_latent's shape and dtype (e4m3 converted), with R + P instead of R in the formats of DeepSeek V4, whose
      values include rotary parts (see `decode_mla_sparse`); with `return_lse` also lse, float32, of q_latent's shape
      without R, natural logarithm.  A query that sees no token, or belongs to no request, gets 0 and -inf.  Low finite
      scores are never masked: only a score beyond the range of float32 becomes -inf and gets no weight.  Tokens in
      blocks outside the cache are masked.  If a traced layer is outside the cache, no query sees a token.

    Raises:
      ValueError: a shape, dtype, static layer, scale, `window` or `mask` is wrong, `causal` is False with a
        `tree_mask`, or `plan` was made for another shape, dtype or mask.
    """
    return_lse = static_bool("return_lse", return_lse)
    check_cache(cache, MLAEntry)
    dims = mla_dims(cache)
    axes = query_axes("q_latent", q_latent, ragged=cu_q_lens is not None)
    q_latent = dims.check("q_latent", q_latent, f"{axes} R", QUERIES)
    q_pe = dims.check("q_pe", q_pe, f"{axes} P", (str(q_latent.dtype),))
    (q_latent, q_pe), scale = in_float((q_latent, q_pe), q_scale, softmax_scale(scale), cache.layout.entry.input_dtype)
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
    requests = request_fields(dims, cache, block_tables, seq_lens, layer)
    q_len = dims["Q"] if axes == "B Q Hq" else None
    tokens = 1 if axes == "B Hq" else q_len
    masks: dict[str, Any] = {"window": window, "causal": causal, "mask": mask, "tree_mask": tree_mask}
    call = calls.DecodeMLA(
        q_latent=q_latent,
        q_pe=q_pe,
        **requests,
        **mask_fields(dims, requests, tokens, cu_q_lens=cu_q_lens, **masks),
        kv_scale=entry_scale("kv_scale", kv_scale, cache),
        scale=scale,
        logit_cap=logit_cap_of(logit_cap),
        plan=None,
        trailing=None,
    )
    prefixes = shared_prefixes(dims, prefix_tables, prefix_lens, prefix_of, window, mask)
    out, lse = _attended(cache, call, dims, q_len, cu_q_lens, prefixes, sinks, plan, implementation)
    return (out, lse) if return_lse else out


@overload
def decode_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    tree_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    prefix_tables: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    prefix_of: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    plan: DecodePlan | None = None,
    implementation: Implementations | None = None,
) -> jax.Array: ...
@overload
def decode_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    tree_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    prefix_tables: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    prefix_of: ArrayLike | None = None,
    return_lse: Literal[True],
    plan: DecodePlan | None = None,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def decode_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    tree_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    prefix_tables: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    prefix_of: ArrayLike | None = None,
    return_lse: bool = False,
    plan: DecodePlan | None = None,
    implementation: Implementations | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Grouped-query or multi-head attention of one or several new tokens per request.

    Query head i reads KV head i // (Hq / H).  The mask is causal as in `decode_mla`.  The same guarantees hold for
    tokens that a query token does not see, including those before its window.  Gradients are as in `decode_mla`.

    Args:
      q: float [B, Hq, D], [B, Q, Hq, D] or, with `cu_q_lens`, [T, Hq, D]; Hq a multiple of the cache's heads H.
        Queries of float8_e4m3fn are converted as in `decode_mla`.
      cache: a cache of `KVEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: float, the softmax scale.
      q_scale: float scalar or [Hq], the scale of queries of e4m3, as in `decode_mla`.
      k_scale: float scalar, [H] or [num_blocks, block_size, H], required by format `fp8` and rejected by the others;
        value = stored * k_scale.  The last form has a scale per token and head of this layer, where the token is: a
        token of slot `block * block_size + offset` has k_scale[block, offset].  Only `xla` supports it.
      v_scale: the same for v and the format of values; value = stored * v_scale.
      logit_cap: static float, from 2**-126 to 2**126; scores become cap * tanh(score / cap).  A cap far above all
        scores changes nothing.  GPU kernels support caps up to 64, `xla` all.
      window: static int, the last tokens that a query token sees, or (left, right), as in `decode_mla`.
      causal: static bool; if False, a query token also sees later tokens, as in `decode_mla`.
      mask: static function of positions of queries and of keys, as in `decode_mla`.
      tree_mask: bool [B, Q, Q] or, with `cu_q_lens`, [T, J]; which new tokens a query token sees, as in `decode_mla`.
      sinks: float32 [Hq]; attention sinks, as in `decode_mla`.
      cu_q_lens: int32 [B + 1], running sum of the query tokens of each request, as in `decode_mla`.
      prefix_tables: int32 [M'] or [G, M'], the blocks of a prefix that all requests share, or those of several
        prefixes, as in `decode_mla`.
      prefix_lens: int32 scalar, or [G], the tokens of each prefix.
      prefix_of: int32 [B], the prefix of each request, a row of `prefix_tables` [G, M'].
      return_lse: also return the log-sum-exp of the scores.
      plan: what `plan_decode` returned for the same tables, lengths, prefixes, numbers of heads and query tokens, and
        query dtype; if None, the call makes its own plan.  With a plan for other lengths, results are wrong, though
        nothing outside the cache is read; only `checked` reports it, since a check would cost a kernel per layer.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out, of q's shape with Dv instead of D, and of its dtype (e4m3 converted); with `return_lse` also lse, float32,
      of q's shape without D, natural logarithm.  A query that sees no token, or belongs to no request, gets 0
      and -inf; low finite scores are never masked.  Tokens in blocks outside the cache are masked.

    Raises:
      ValueError: a shape, dtype, static layer, scale, `window` or `mask` is wrong, `causal` is False with a
        `tree_mask`, or `plan` was made for another shape, dtype or mask.
    """
    return_lse = static_bool("return_lse", return_lse)
    check_cache(cache, KVEntry)
    heads = cache.layout.num_heads
    dims = Dims(D=(cache.layout.entry.sizes[0], "the entry's head_dim"))
    axes = query_axes("q", q, ragged=cu_q_lens is not None)
    q = dims.check("q", q, f"{axes} D", QUERIES)
    if dims["Hq"] % heads:
        raise ValueError(f"`q` has {dims['Hq']} heads: expected a multiple of the cache's {heads} heads")
    (q,), scale = in_float((q,), q_scale, softmax_scale(scale), cache.layout.entry.input_dtype)
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
    requests = request_fields(dims, cache, block_tables, seq_lens, layer)
    q_len = dims["Q"] if axes == "B Q Hq" else None
    tokens = 1 if axes == "B Hq" else q_len
    masks: dict[str, Any] = {"window": window, "causal": causal, "mask": mask, "tree_mask": tree_mask}
    call = calls.DecodeKV(
        q=q,
        **requests,
        **mask_fields(dims, requests, tokens, cu_q_lens=cu_q_lens, **masks),
        k_scale=entry_scale("k_scale", k_scale, cache, heads=True),
        v_scale=entry_scale("v_scale", v_scale, cache, heads=True),
        scale=scale,
        logit_cap=logit_cap_of(logit_cap),
        plan=None,
        trailing=None,
    )
    prefixes = shared_prefixes(dims, prefix_tables, prefix_lens, prefix_of, window, mask)
    out, lse = _attended(cache, call, dims, q_len, cu_q_lens, prefixes, sinks, plan, implementation)
    return (out, lse) if return_lse else out


def converted(q: Any, dtype: DTypeLike) -> jax.Array:
    """Queries `q` as they are, or those of e4m3 as `dtype`."""
    return q if str(q.dtype) in FLOATS else computed(lambda q: q.astype(dtype), q)


def _attended(
    cache: KVCache, call: calls.DecodeCall[Any], dims: Dims, q_len, cu_q_lens, prefixes, sinks, plan, implementation
) -> tuple[jax.Array, jax.Array]:
    """The results of a checked call, in the order of its queries: to own tokens and to `prefixes`, with `sinks`."""
    groups = groups_of(plan, None if cu_q_lens is None else dims["T"])
    arrangement = arrange(call, dims, q_len=q_len, cu_q_lens=cu_q_lens, groups=groups)
    planned = prefix_plan(plan, prefixes)
    _check_seen(cache, call, arrangement, cu_q_lens)
    out, lse = run_planned(call, arrangement, plan, implementation)
    if prefixes is not None:
        shared = _of_prefixes(cache, call, prefixes, lse, q_len, cu_q_lens, planned, implementation)
        both, lse = computed(merged, [(out, lse), shared])
        out = both.astype(out.dtype)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return out, lse


def in_float(
    queries: Sequence[jax.Array], q_scale: ArrayLike | None, scale: jax.Array, dtype: DTypeLike
) -> tuple[list[jax.Array], jax.Array]:
    """Checked queries [..., Hq, n_i] without their scale, and the softmax scale by which their scores are multiplied.

    Queries of e4m3 become queries of `dtype`.  A scalar `q_scale` multiplies the softmax scale.  Of scales per head,
    the largest does, and the queries of each head are multiplied by the quotient of its scale and the largest.
    """
    heads = queries[0].shape[-2]
    factor = query_scale(q_scale, queries[0], heads)
    if factor is None:
        return [converted(q, dtype) for q in queries], scale
    if factor.shape == ():
        return [converted(q, dtype) for q in queries], computed(jnp.multiply, scale, factor)
    limits = jnp.finfo(dtype)

    def multiplied(q, factor):
        q = q.astype(jnp.float32) * (factor / factor.max())[:, None]
        # Conversions to `dtype` alone would not do: XLA may leave out those that are followed by one to float32.
        return lax.reduce_precision(q, limits.nexp, limits.nmant).astype(dtype)

    return [computed(multiplied, q, factor) for q in queries], computed(lambda s, f: s * f.max(), scale, factor)


def query_axes(name: str, q: Any, *, ragged: bool = False) -> str:
    """The axes of queries `q` without the last one: "B Hq", "B Q Hq" or (ragged) "T Hq".

    ValueError for any other number of axes.
    """
    expected = "[T, Hq, …], because there are `cu_q_lens`" if ragged else "[B, Hq, …] or [B, Q, Hq, …]"
    if not hasattr(q, "shape"):
        raise ValueError(f"`{name}` is a {type(q).__name__}: expected an array {expected}")
    rank = len(q.shape)
    if rank not in ((3,) if ragged else (3, 4)):
        raise ValueError(f"`{name}` has {rank} axes: expected {expected}")
    if ragged:
        if not q.shape[0]:
            raise ValueError(f"`{name}` has shape {tuple(q.shape)}: expected [T, Hq, …] with T at least 1")
        return "T Hq"
    return "B Hq" if rank == 3 else "B Q Hq"


def request_fields(dims: Dims, cache: KVCache, block_tables, seq_lens, layer) -> dict[str, Any]:
    """The fields of a call on the blocks of requests in one layer of a cache, checked.  Sets the axes B and M."""
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    return {
        "buffer": cache.buffer,
        "pages": cache.layout.pages,
        "entry": cache.layout.entry,
        "block_tables": int32(block_tables),
        "seq_lens": int32(seq_lens),
        "layer": layer_index(layer, cache),
    }


def _check_seen(cache: KVCache, call: calls.DecodeCall[Any], arrangement: Arrangement, cu_q_lens) -> None:
    """In checked mode, checks the tokens that some query token sees."""
    if data_checks.checking():
        tokens = jnp.full_like(call.seq_lens, arrangement.q_len or 1)
        shown = None if call.tree is None and call.mask is None else seen_by_some(call, arrangement.q_len, cu_q_lens)
        check_seen(cache, call, tokens if cu_q_lens is None else jnp.diff(int32(cu_q_lens)), shown)


def check_seen(
    cache: KVCache,
    call: calls.DecodeCall[Any] | calls.PrefillCall[Any],
    tokens: jax.Array,
    shown: jax.Array | None = None,
) -> None:
    """Checks what some of the last `tokens` [B] query tokens of the requests see, by `check_entries`."""
    seen = jnp.where(tokens > 0, call.seq_lens, 0)
    # Each query token sees its own, and the last one of a request is its last token: no window ends before that.
    first = jnp.zeros_like(seen) if call.window is None else seen - (tokens - 1) - call.window
    check_entries(cache, call.block_tables, first, seen, call.layer, shown=shown)


def _of_prefixes(
    cache: KVCache, call: calls.DecodeCall[Any], prefixes: SharedPrefixes, lse, q_len, cu_q_lens, plan, implementation
) -> tuple[jax.Array, jax.Array]:
    """The results of attention to `prefixes`; `lse` is that of attention to own tokens."""
    if data_checks.checking():
        first, names = jnp.zeros_like(prefixes.lens), ("prefix_tables", "prefix_lens")
        check_entries(cache, prefixes.tables, first, prefixes.lens, call.layer, names=names)
    *axes, heads = lse.shape
    total = math.prod(axes)
    groups = groups_of(plan, None if prefixes.of is None and cu_q_lens is None else total)
    call, arrangement, order = prefixes.arranged(
        call, heads=heads, q_len=q_len, cu_q_lens=cu_q_lens, total=total, groups=groups
    )
    results = run_planned(call, arrangement, plan, implementation)

    def as_queries(out, lse, order):
        places = slice(None) if order is None else jnp.argsort(order)
        out, lse = out.reshape(total, heads, -1)[places], lse.reshape(total, heads)[places]
        return out.reshape(*axes, heads, -1), lse.reshape(*axes, heads)

    return computed(as_queries, *results, order)


def check_entries(
    cache: KVCache,
    block_tables,
    first,
    seq_lens,
    layer,
    *,
    shown: jax.Array | None = None,
    names: tuple[str, str] = ("block_tables", "seq_lens"),
) -> None:
    """Checks that the tokens of positions first <= p < seq_lens are in the cache, and that none holds NaN.

    If `shown`, bool [B, M * block_size], is not None, only of those for which it is true.  `names` are those of the
    arguments for tables and lengths.
    """
    pages = cache.layout.pages
    data_checks.check_layer(layer, pages)
    data_checks.check_tables(block_tables, first if shown is None else seq_lens, seq_lens, pages, *reversed(names))
    positions = jnp.arange(block_tables.shape[1] * pages.block_size, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, (block_tables.shape[0], positions.size))
    live = (positions >= first[:, None]) & (positions < seq_lens[:, None])
    if shown is not None:
        live &= shown
        blocks = live.reshape(*block_tables.shape, pages.block_size).any(axis=-1)
        data_checks.check_ids("block_tables", block_tables, pages, blocks)
    slots = slots_for(block_tables, positions, block_size=pages.block_size)
    data_checks.check_live_entries(cache, slots, live, layer)


def _sample_mla(cache):
    queries = sample_queries(cache, *cache.layout.entry.sizes)
    return (*queries, cache, *PAGED), {"scale": 1.0, **sample_options(cache, "kv_scale")}


def _sample_kv(cache):
    queries = sample_queries(cache, cache.layout.entry.head_dim)
    return (*queries, cache, *PAGED), {"scale": 1.0, **sample_options(cache, "k_scale", "v_scale")}


OPERATIONS = (
    Operation(decode_mla, _sample_mla, entries=(MLAEntry,)),
    Operation(decode_kv, _sample_kv, entries=(KVEntry,)),
)
