"""Attention of many new tokens to keys and values that are gathered from the cache first."""

from dataclasses import replace
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    Dims,
    check_cache,
    computed,
    entry_scale,
    int32,
    logit_cap_of,
    mla_dims,
    positive_int,
    running_sum,
    static_bool,
    static_scale,
    window_of,
)
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.attention import check_seen, decode_mla, request_fields
from jaxkv.ops.operation import Operation
from jaxkv.ops.plan import DecodePlan
from jaxkv.ops.samples import BATCH, PAGED, array, sample_dtype, sample_options
from jaxkv_kernels import calls
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.scores import with_sinks

CHUNK_BYTES = 2**28
"""The default bound on the bytes of the keys and values of a chunk: 26,214 tokens for 16 heads of 192 and 128 values in
bfloat16, 3,276 tokens for 128."""


@overload
def prefill_mla(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    kv_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_decodes: int = 0,
    plan: DecodePlan | None = None,
    expanded_bytes: int = CHUNK_BYTES,
    return_lse: Literal[False] = False,
    implementation: Implementations | None = None,
) -> jax.Array: ...
@overload
def prefill_mla(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    kv_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_decodes: int = 0,
    plan: DecodePlan | None = None,
    expanded_bytes: int = CHUNK_BYTES,
    return_lse: Literal[True],
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def prefill_mla(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    kv_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_decodes: int = 0,
    plan: DecodePlan | None = None,
    expanded_bytes: int = CHUNK_BYTES,
    return_lse: bool = False,
    implementation: Implementations | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Multi-head latent attention of many new tokens per request, with keys and values expanded per head.

    For each head h, key = (W_UK[h] @ kv_c, k_pe) and value = W_UV[h] @ kv_c; score = (q_nope . W_UK[h] @ kv_c + q_pe .
    k_pe) * scale.  Up to rounding, the result is that of `decode_mla` with q_latent = q_nope @ W_UK, multiplied by
    W_UV.  This function takes fewer flops if query tokens are many: for DeepSeek's sizes, 640 per pair of a query and a
    key instead of 2,176, and 262,144 to expand a cached token, all per head.  From 171 query tokens on, that is fewer,
    whatever the length of the context.

    As for `decode_mla`, the entries of the new tokens must already be in the cache, and the mask is causal and aligned
    to the end: query token t of Q sees the first `seq_len - Q + 1 + t` tokens, unless `window` or `causal` say
    otherwise.  New tokens are read back from the cache, like all others.  With quantised entries, all query tokens
    therefore see the values that later steps see, and a prompt has the same entries whether it is prefilled at once or
    in chunks.

    The last Q tokens of each request are expanded and attended to at once.  Earlier tokens are expanded in chunks of
    bounded memory, in a loop over the longest request or, with a window, from the first token that a query token sees.
    Without a causal mask, all tokens are expanded in chunks.  The results are merged by their log-sum-exps.

    With `cu_q_lens`, the batch is ragged: requests have different numbers of query tokens, and their rows follow one
    another.  The earlier tokens of all requests then form one sequence, which is expanded in chunks.  The work depends
    on the length of this sequence, not on the longest request.  Requests that are decoding may come first:
    `decode_mla` computes the rows of the first `num_decodes` requests, because expanding cached tokens does not pay for
    one query token.

    On Hopper, cuDNN computes the attention of bfloat16 and float16 queries whose heads have up to 256 values, in
    multiples of 8.  Without `cu_q_lens`, jaxkv's kernel computes attention to earlier tokens if keys have 128 + 64
    values and values 128, with a window and a logit cap of up to 64, too.  All other attention runs on XLA, because
    cuDNN has no logit caps, and windows only for the new tokens of batches that are not ragged.

    As in `decode_mla` on GPUs, inf or NaN in a token that some query tokens of the request see may reach those that do
    not see it, unless all attention runs on XLA.  Tokens that no query token sees have no influence.  Unlike in
    `decode_mla`, a token in a block outside the cache is not masked, but has an entry of zeros, and so have all tokens
    if a traced layer is outside the cache.  Gradients are as in `decode_mla`, also with respect to `w_uk` and `w_uv`.

    Args:
      q_nope: float [B, Q, H, N], queries without their rotary part; [T, H, N] with `cu_q_lens`.
      q_pe: [B, Q, H, P] or [T, H, P], rotary queries after RoPE, the dtype of `q_nope`.
      w_uk: [H, N, R], the dtype of `q_nope`.
      w_uv: [H, V, R], the dtype of `q_nope`.
      cache: a cache of `MLAEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: static number, the model's own softmax scale.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      logit_cap: static float, as in `decode_mla`.
      window: static int, the last tokens that a query token sees, or (left, right), as in `decode_mla`.
      causal: static bool; if False, a query token also sees later tokens, as in `decode_mla`.
      sinks: float32 [H]; attention sinks, as in `decode_mla`.
      cu_q_lens: int32 [B + 1], for a ragged batch: running sum of the numbers of query tokens, from 0, as in
        `decode_mla`.  The queries of request b are rows cu_q_lens[b] to cu_q_lens[b + 1] - 1, and belong to its last
        tokens.  Rows from the last sum on are padding, and query tokens past the last row are left out.
      num_decodes: static number of requests at the beginning of a ragged batch that are decoding.  Each has one row:
        cu_q_lens[b] is b for b = 0 to `num_decodes`.  Its `seq_lens` may be 0.
      plan: what `plan_decode` returned for the requests that are decoding, as in `decode_mla`.
      expanded_bytes: static bound on the bytes of the expanded keys and values of a chunk of earlier tokens; 256 MiB by
        default.  Temporary memory is up to about four times that.  A chunk has at least one token of each request (one
        token in all with `cu_q_lens`), even if that exceeds the bound.  The new tokens are expanded at once, because
        queries and results are as large.
      return_lse: also return the log-sum-exp of the scores, without sinks.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out [B, Q, H, V] or [T, H, V], of q_nope's dtype; with `return_lse` also lse, float32 [B, Q, H] or [T, H], natural
      logarithm.  A query that sees no token gets 0 and -inf, and so does padding.

    Raises:
      ValueError: a shape, dtype, static layer, scale or `window` is wrong; `num_decodes` exceeds the requests or the
        rows; `num_decodes` or `plan` is passed without `cu_q_lens`, or `plan` was made for another shape or dtype.
    """
    return_lse = static_bool("return_lse", return_lse)
    check_cache(cache, MLAEntry)
    dims, dtype = mla_dims(cache), (str(getattr(q_nope, "dtype", None)),)
    rows = "B Q" if cu_q_lens is None else "T"
    q_nope = dims.check("q_nope", q_nope, f"{rows} H N")
    q_pe = dims.check("q_pe", q_pe, f"{rows} H P", dtype)
    w_uk = dims.check("w_uk", w_uk, "H N R", dtype)
    w_uv = dims.check("w_uv", w_uv, "H V R", dtype)
    if sinks is not None:
        dims.check("sinks", sinks, "H", ("float32",))
    call = calls.PrefillMLA(
        q_nope=q_nope,
        q_pe=q_pe,
        w_uk=w_uk,
        w_uv=w_uv,
        **_prefill_fields("q_nope", q_nope, dims, cache, block_tables, seq_lens, layer, cu_q_lens, window, causal),
        scale=static_scale(scale),
        kv_scale=entry_scale("kv_scale", kv_scale, cache),
        logit_cap=logit_cap_of(logit_cap),
        chunk_bytes=positive_int("expanded_bytes", expanded_bytes, below=None),
    )
    _check_decodes(num_decodes, plan, cu_q_lens, dims)
    _check_data(cache, call, q_nope, cu_q_lens, num_decodes)
    results = []
    if num_decodes < q_nope.shape[0]:
        results.append(run(_without_decodes(call, num_decodes) if num_decodes else call, implementation))
    if num_decodes:
        options = {"logit_cap": logit_cap, "window": window, "causal": causal}
        results.insert(0, _decodes(call, num_decodes, cache, plan, implementation, **options))
    out, lse = results[0] if len(results) == 1 else (jnp.concatenate(x) for x in zip(*results, strict=True))
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _without_decodes(call: calls.PrefillMLA, num_decodes: int) -> calls.PrefillMLA:
    """The ragged call without its first `num_decodes` requests, which have one row each."""

    def rest(sums, *arrays):
        return sums[num_decodes:] - num_decodes, *(x[num_decodes:] for x in arrays)

    arrays = call.q_nope, call.q_pe, call.block_tables, call.seq_lens
    sums, q_nope, q_pe, block_tables, seq_lens = computed(rest, call.cu_q_lens, *arrays)
    return replace(call, q_nope=q_nope, q_pe=q_pe, block_tables=block_tables, seq_lens=seq_lens, cu_q_lens=sums)


def _decodes(
    call: calls.PrefillMLA, num_decodes: int, cache: KVCache[MLAEntry], plan, implementation, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """The rows of the first `num_decodes` requests, by `decode_mla` with `options`: out [num_decodes, H, V] and lse."""
    first = slice(num_decodes)
    # As for kernels: the user's program may have stricter rules than JAX's default ones.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        precision = lax.Precision.HIGHEST if call.dtype == jnp.float32 else None
        q_latent = jnp.einsum("bhn,hnr->bhr", call.q_nope[first], call.w_uk, precision=precision)
        out, lse = decode_mla(
            q_latent, call.q_pe[first], cache, call.block_tables[first], call.seq_lens[first], layer=call.layer,
            scale=call.scale, kv_scale=call.kv_scale, plan=plan, return_lse=True, implementation=implementation,
            **options,
        )  # fmt: skip
        out = out[..., : call.w_uv.shape[-1]]  # formats of DeepSeek V4 also sum rotary parts
        return jnp.einsum("bhr,hvr->bhv", out, call.w_uv, precision=precision), lse


@overload
def prefill_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    gathered_bytes: int = CHUNK_BYTES,
    return_lse: Literal[False] = False,
    implementation: Implementations | None = None,
) -> jax.Array: ...
@overload
def prefill_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    gathered_bytes: int = CHUNK_BYTES,
    return_lse: Literal[True],
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def prefill_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    logit_cap: float | None = None,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    sinks: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    gathered_bytes: int = CHUNK_BYTES,
    return_lse: bool = False,
    implementation: Implementations | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Grouped-query or multi-head attention of many new tokens per request, to keys and values that are gathered first.

    Up to rounding, the result is that of `decode_kv`, which reads the cache again for every few query tokens.  As
    there, the entries of the new tokens must already be in the cache, and the mask is causal and aligned to the end:
    query token t of Q sees the first `seq_len - Q + 1 + t` tokens, unless `window` or `causal` say otherwise.  New
    tokens are read back from the cache, like all others.

    The last Q tokens of each request are gathered and attended to at once.  Earlier tokens are gathered in chunks of
    bounded memory, in a loop over the longest request or, with a window, from the first token that a query token sees.
    Without a causal mask, all tokens are gathered in chunks.  The results are merged by their log-sum-exps.

    Which of the two is faster depends on the number of new tokens.  On an H200, with 32 query heads and 8 KV heads of
    128 bfloat16 values, 4,096 new tokens take 0.5 ms instead of 1.1; 256 take longer than by `decode_kv`, and so do
    1,024 with a window of 1,024 and earlier tokens.

    With `cu_q_lens`, the batch is ragged: requests have different numbers of query tokens, and their rows follow one
    another.  The earlier tokens of all requests then form one sequence, which is gathered in chunks, and the work
    depends on the length of this sequence.  For requests that are decoding, `decode_kv` is faster.

    On Hopper, cuDNN computes the attention of bfloat16 and float16 queries whose heads have up to 256 values, in
    multiples of 8, without a logit cap.  With a window, it attends to the new tokens only, and only if the batch is not
    ragged.  All other attention runs on XLA, which compares all query tokens of a ragged batch with all tokens, also
    with those of other requests.

    As in `decode_kv` on GPUs, inf or NaN in a token that some query tokens of the request see may reach those that do
    not see it, if cuDNN attends to it.  Unlike in `decode_kv`, a token in a block outside the cache is not masked, but
    has an entry of zeros, and so have all tokens if a traced layer is outside the cache.  Gradients are as in
    `decode_mla`.

    Args:
      q: float [B, Q, Hq, D], or [T, Hq, D] with `cu_q_lens`; Hq a multiple of the cache's heads H.  Query head i reads
        KV head i // (Hq / H).
      cache: a cache of `KVEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: static number, the softmax scale.
      k_scale: float scalar, [H] or [num_blocks, block_size, H], required by format `fp8` and rejected by the others;
        value = stored * k_scale.  The last form is that of `decode_kv`.
      v_scale: the same for v and the format of values; value = stored * v_scale.
      logit_cap: static float, as in `decode_mla`.
      window: static int, the last tokens that a query token sees, or (left, right), as in `decode_mla`.
      causal: static bool; if False, a query token also sees later tokens, as in `decode_mla`.
      sinks: float32 [Hq]; attention sinks, as in `decode_mla`.
      cu_q_lens: int32 [B + 1], for a ragged batch: running sum of the numbers of query tokens, from 0, as in
        `decode_mla`.  The queries of request b are rows cu_q_lens[b] to cu_q_lens[b + 1] - 1, and belong to its last
        tokens.  Rows from the last sum on are padding, and query tokens past the last row are left out.
      gathered_bytes: static bound on the bytes of the keys and values of a chunk of earlier tokens; 256 MiB by default.
        A chunk has at least one token of each request (one token in all with `cu_q_lens`), even if that exceeds the
        bound.
      return_lse: also return the log-sum-exp of the scores, without sinks.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out [B, Q, Hq, Dv] or [T, Hq, Dv], of q's dtype; with `return_lse` also lse, float32 [B, Q, Hq] or [T, Hq],
      natural logarithm.  A query that sees no token gets 0 and -inf, and so does padding.

    Raises:
      ValueError: a shape, dtype, static layer, scale or `window` is wrong.
    """
    entry = check_cache(cache, KVEntry)
    return_lse, heads = static_bool("return_lse", return_lse), cache.layout.num_heads
    dims = Dims(D=(entry.head_dim, "the entry's head_dim"))
    q = dims.check("q", q, "B Q Hq D" if cu_q_lens is None else "T Hq D")
    if dims["Hq"] % heads:
        raise ValueError(f"`q` has {dims['Hq']} heads: expected a multiple of the cache's {heads} heads")
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
    call = calls.PrefillKV(
        q=q,
        **_prefill_fields("q", q, dims, cache, block_tables, seq_lens, layer, cu_q_lens, window, causal),
        scale=static_scale(scale),
        k_scale=entry_scale("k_scale", k_scale, cache, heads=True),
        v_scale=entry_scale("v_scale", v_scale, cache, heads=True),
        logit_cap=logit_cap_of(logit_cap),
        chunk_bytes=positive_int("gathered_bytes", gathered_bytes, below=None),
    )
    _check_data(cache, call, q, cu_q_lens)
    out, lse = run(call, implementation)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _prefill_fields(
    name: str, q, dims: Dims, cache: KVCache, block_tables, seq_lens, layer, cu_q_lens, window, causal
) -> dict[str, Any]:
    """The fields of a call that define its requests and its mask, checked; `name` is that of the queries `q`."""
    fields = request_fields(dims, cache, block_tables, seq_lens, layer)
    tokens = None
    if cu_q_lens is None:
        tokens = dims["Q"]
    elif not dims["T"]:
        raise ValueError(f"`{name}` has shape {tuple(q.shape)}: expected [T, H, D] with T at least 1")
    else:
        dims.check_running_sum("cu_q_lens", cu_q_lens)
    window, ahead = window_of(window, causal, dims["M"] * cache.layout.block_size, tokens)
    cu_q_lens = None if cu_q_lens is None else running_sum(cu_q_lens)
    return {**fields, "cu_q_lens": cu_q_lens, "window": window, "ahead": ahead}


def _check_data(cache: KVCache, call: calls.PrefillCall[Any], q, cu_q_lens, num_decodes: int = 0) -> None:
    """In checked mode, checks `cu_q_lens` and the tokens that some query token sees."""
    if not data_checks.checking():
        return
    tokens = jnp.full_like(call.seq_lens, q.shape[1])
    if cu_q_lens is not None:
        tokens = jnp.diff(int32(cu_q_lens))
        _check_rows(int32(cu_q_lens), len(q), num_decodes)
    check_seen(cache, call, tokens)


def _check_decodes(num_decodes, plan, cu_q_lens, dims) -> None:
    """ValueError unless `num_decodes` is the number of requests of the batch that may be decoding."""
    if isinstance(num_decodes, bool) or not isinstance(num_decodes, int) or num_decodes < 0:
        raise ValueError(f"`num_decodes` is {num_decodes!r}: expected a static int, 0 or more")
    if cu_q_lens is None and (num_decodes or plan is not None):
        raise ValueError("`num_decodes` and `plan` are for ragged batches: pass `cu_q_lens`, too")
    if cu_q_lens is not None and num_decodes > min(dims["B"], dims["T"]):
        raise ValueError(
            f"`num_decodes` is {num_decodes}: expected at most the {dims['B']} requests and {dims['T']} query tokens"
        )
    if plan is not None and not num_decodes:
        raise ValueError("`plan` is for the requests that are decoding, and `num_decodes` is 0: expected None")


def _check_rows(cu_q_lens, rows: int, decodes: int) -> None:
    """Checks that requests have rows of the queries, and those that are decoding one each."""
    steps = jnp.diff(cu_q_lens, prepend=cu_q_lens[:1])
    number = jnp.arange(len(cu_q_lens), dtype=jnp.int32)
    data_checks.require(cu_q_lens[:1] == 0, "cu_q_lens", cu_q_lens[:1], "a running sum starts at 0")
    data_checks.require(steps >= 0, "cu_q_lens", cu_q_lens, "a running sum never falls")
    data_checks.require(cu_q_lens <= rows, "cu_q_lens", cu_q_lens, f"there are {rows} query tokens")
    alone = (number > decodes) | (cu_q_lens == number)
    data_checks.require(alone, "cu_q_lens", cu_q_lens, f"each of the first {decodes} requests has one row")


def _sample_mla(cache):
    dtype, (latent, rope) = sample_dtype(cache.layout.entry), cache.layout.entry.sizes
    heads, nope, value = 16, 128, 128
    queries = array(dtype, BATCH, 8, heads, nope), array(dtype, BATCH, 8, heads, rope)
    weights = array(dtype, heads, nope, latent), array(dtype, heads, value, latent)
    return (*queries, *weights, cache, *PAGED), {"scale": 1.0, **sample_options(cache, "kv_scale")}


def _sample_kv(cache):
    q = array(sample_dtype(cache.layout.entry), BATCH, 8, 16, cache.layout.entry.head_dim)
    return (q, cache, *PAGED), {"scale": 1.0, **sample_options(cache, "k_scale", "v_scale")}


OPERATIONS = (
    Operation(prefill_mla, _sample_mla, entries=(MLAEntry,)),
    Operation(prefill_kv, _sample_kv, entries=(KVEntry,)),
)
