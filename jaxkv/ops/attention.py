"""Dense attention of new tokens to the cache."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.dispatch import checked as checks
from jaxkv.dispatch.backends import Call
from jaxkv.dispatch.validate import (
    Dims,
    check_cache,
    entry_scale,
    int32,
    layer_index,
    logit_cap_of,
    mla_dims,
    softmax_scale,
    window_within,
)
from jaxkv.ops.operation import Operation
from jaxkv.ops.plan import DecodePlan, Shape, check_plan, run_planned
from jaxkv.ops.samples import PAGED, sample_options, sample_queries
from jaxkv_kernels.addressing.slots import slots_for
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry


def decode_mla(
    q_latent,
    q_pe,
    cache: KVCache,
    block_tables,
    seq_lens,
    *,
    layer,
    scale,
    kv_scale=None,
    logit_cap: float | None = None,
    return_lse: bool = False,
    plan: DecodePlan | None = None,
    implementation=None,
) -> Any:
    """Absorbed multi-head latent attention of one or several new tokens per request.

    score = (q_latent . kv_c + q_pe . k_pe) * scale; the result is the softmax-weighted sum of the latents kv_c.  The
    entries of the new tokens must already be in the cache.  The mask is causal and aligned to the end: query token t of
    Q sees the first `seq_len - Q + 1 + t` tokens.

    The result of a query token does not depend on tokens that it does not see.  On `xla` this holds whatever they
    contain.  `triton` and `mosaic_gpu` multiply the values of a token by a weight of 0 for the query tokens of the same
    request that do not see it.  If these values hold inf or NaN and another query token of the request sees them, `out`
    may be NaN.  Data that is used only in keys has no such effect, and neither have tokens that no query token of the
    request sees.

    Args:
      q_latent: float [B, Hq, R] or [B, Q, Hq, R], queries multiplied by W_UK.
      q_pe: [B, Hq, P] or [B, Q, Hq, P], rotary queries after RoPE, the dtype of `q_latent`.
      cache: a cache of `MLAEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: float, the model's own softmax scale, which cannot be inferred from R and P.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      logit_cap: static float, from 2**-126 to 2**126; scores become cap * tanh(score / cap).  A cap far above all
        scores changes nothing.  GPU kernels support caps up to 64, `xla` all.
      return_lse: also return the log-sum-exp of the scores.
      plan: what `plan_decode` returned for the same tables and lengths, number of heads and query dtype; if None, the
        call makes its own plan.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out, of q_latent's shape and dtype; with `return_lse` also lse, float32 [B, Hq] or [B, Q, Hq], natural logarithm.
      A query that sees no token gets 0 and -inf.  Low finite scores are never masked: only a score beyond the range of
      float32 becomes -inf and gets no weight.  Tokens in blocks outside the cache are masked.  If a traced layer is
      outside the cache, no query sees a token.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, or `plan` was made for another shape or dtype.
    """
    call = _bind_mla(q_latent, q_pe, cache, block_tables, seq_lens, layer, scale, kv_scale, logit_cap, plan)
    out, lse = run_planned(call, plan, implementation)
    return _result(out, lse, q_latent, return_lse)


def _bind_mla(q_latent, q_pe, cache, block_tables, seq_lens, layer, scale, kv_scale, logit_cap, plan) -> Call:
    check_cache(cache, MLAEntry)
    dims = mla_dims(cache)
    axes = query_axes("q_latent", q_latent)
    dims.check("q_latent", q_latent, f"{axes} R")
    dims.check("q_pe", q_pe, f"{axes} P", (str(q_latent.dtype),))
    arrays = {
        "q_latent": _with_tokens(q_latent),
        "q_pe": _with_tokens(q_pe),
        "kv_scale": entry_scale("kv_scale", kv_scale, cache),
    }
    options = {"logit_cap": logit_cap_of(logit_cap)}
    q = arrays["q_latent"]
    return _bind("decode_mla", cache, dims, q, arrays, options, block_tables, seq_lens, layer, scale, plan)


def decode_kv(
    q,
    cache: KVCache,
    block_tables,
    seq_lens,
    *,
    layer,
    scale,
    k_scale=None,
    v_scale=None,
    logit_cap: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    plan: DecodePlan | None = None,
    implementation=None,
) -> Any:
    """Grouped-query or multi-head attention of one or several new tokens per request.

    Query head i reads KV head i // (Hq / H).  The mask is causal as in `decode_mla`.  The same guarantees hold for
    tokens that a query token does not see, including those before its window.

    Args:
      q: float [B, Hq, D] or [B, Q, Hq, D]; Hq a multiple of the cache's heads H.
      cache: a cache of `KVEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: float, the softmax scale.
      k_scale: float scalar or [H], required by format `fp8` and rejected by the others; value = stored * k_scale.
      v_scale: the same for v; value = stored * v_scale.
      logit_cap: static float, from 2**-126 to 2**126; scores become cap * tanh(score / cap).  A cap far above all
        scores changes nothing.  GPU kernels support caps up to 64, `xla` all.
      window: static positive int of any size; a query sees only the last `window` tokens, itself included.  A window of
        at least the capacity of the table has no effect.
      return_lse: also return the log-sum-exp of the scores.
      plan: what `plan_decode` returned for the same tables and lengths, number of heads and query dtype; if None, the
        call makes its own plan.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out [B, Hq, Dv] or [B, Q, Hq, Dv], of q's dtype; with `return_lse` also lse, float32 [B, Hq] or [B, Q, Hq],
      natural logarithm.  A query that sees no token gets 0 and -inf; low finite scores are never masked.  Tokens in
      blocks outside the cache are masked.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, or `plan` was made for another shape or dtype.
    """
    call = _bind_kv(
        q, cache, block_tables, seq_lens, layer, scale, k_scale, v_scale, logit_cap, window, plan
    )  # fmt: skip
    out, lse = run_planned(call, plan, implementation)
    return _result(out, lse, q, return_lse)


def _bind_kv(
    q, cache, block_tables, seq_lens, layer, scale, k_scale, v_scale, logit_cap, window, plan
) -> Call:  # fmt: skip
    check_cache(cache, KVEntry)
    heads = cache.layout.num_heads
    dims = Dims(D=(cache.layout.entry.sizes[0], "the entry's head_dim"))
    axes = query_axes("q", q)
    dims.check("q", q, f"{axes} D")
    if dims["Hq"] % heads:
        raise ValueError(f"`q` has {dims['Hq']} heads: expected a multiple of the cache's {heads} heads")
    arrays = {
        "q": _with_tokens(q),
        "k_scale": entry_scale("k_scale", k_scale, cache, heads=True),
        "v_scale": entry_scale("v_scale", v_scale, cache, heads=True),
    }
    options = {"logit_cap": logit_cap_of(logit_cap), "window": window}
    return _bind("decode_kv", cache, dims, arrays["q"], arrays, options, block_tables, seq_lens, layer, scale, plan)


def query_axes(name, q) -> str:
    """The axes of queries `q` without the last one: "B Hq" or "B Q Hq".  ValueError for any other number of axes."""
    if not hasattr(q, "shape"):
        raise ValueError(f"`{name}` is a {type(q).__name__}: expected an array [B, Hq, …] or [B, Q, Hq, …]")
    rank = len(q.shape)
    if rank not in (3, 4):
        raise ValueError(f"`{name}` has {rank} axes: expected [B, Hq, …] or [B, Q, Hq, …]")
    return "B Hq" if rank == 3 else "B Q Hq"


def _with_tokens(q):
    """`q` with a Q axis: [B, Q, Hq, D]."""
    if isinstance(q, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*q.shape[:-2], *[1] * (4 - len(q.shape)), *q.shape[-2:]), q.dtype)
    return q if len(q.shape) == 4 else q[:, None]


def _bind(operation, cache, dims, q, arrays, options, block_tables, seq_lens, layer, scale, plan) -> Call:
    """Checks the arguments that `decode_mla` and `decode_kv` have in common, and returns the call.

    `q` is one array of queries [B, Q, Hq, D].  `arrays` holds all queries and the scales, and `options` the static
    options that only this operation has.
    """
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    block_tables, seq_lens = int32(block_tables), int32(seq_lens)
    layer, pages = layer_index(layer, cache), cache.layout.pages
    if "window" in options:
        options = {**options, "window": window_within(options["window"], dims["M"] * pages.block_size)}
    if checks.checking():
        first = jnp.zeros_like(seq_lens)
        if options.get("window"):
            first = seq_lens - (q.shape[1] - 1) - options["window"]
        check_entries(cache, block_tables, first, seq_lens, layer)
    arrays = {
        **arrays,
        "buffer": cache.buffer,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "layer": layer,
        "scale": softmax_scale(scale),
        "plan": None,
    }
    options = {"pages": pages, "entry": cache.layout.entry, **options}
    _, tokens, heads, _ = q.shape
    shape = Shape.of(block_tables, pages, cache.layout.entry, heads, tokens, options.get("window"), q.dtype)
    check_plan(plan, shape, seq_lens)
    return Call(operation, arrays, options)


def check_entries(cache: KVCache, block_tables, first, seq_lens, layer) -> None:
    """Checks that the tokens of positions first <= p < seq_lens are in the cache, and that none holds NaN."""
    pages = cache.layout.pages
    checks.check_layer(layer, pages)
    checks.check_tables(block_tables, first, seq_lens, pages)
    positions = jnp.arange(block_tables.shape[1] * pages.block_size, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, (block_tables.shape[0], positions.size))
    live = (positions >= first[:, None]) & (positions < seq_lens[:, None])
    slots = slots_for(block_tables, positions, block_size=pages.block_size)
    checks.check_live_entries(cache, slots, live, layer)


def _result(out, lse, q, return_lse):
    """The kernel's `out` and (with `return_lse`) `lse`, without the Q axis if the queries `q` have none."""
    if len(q.shape) == 3:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_lse else out


def _sample_mla(cache):
    queries = sample_queries(cache, *cache.layout.entry.sizes)
    return (*queries, cache, *PAGED), {"scale": 1.0, **sample_options(cache, "kv_scale")}


def _sample_kv(cache):
    queries = sample_queries(cache, cache.layout.entry.head_dim)
    return (*queries, cache, *PAGED), {"scale": 1.0, **sample_options(cache, "k_scale", "v_scale")}


OPERATIONS = (
    Operation(decode_mla, _bind_mla, _sample_mla, entries=(MLAEntry,)),
    Operation(decode_kv, _bind_kv, _sample_kv, entries=(KVEntry,)),
)
