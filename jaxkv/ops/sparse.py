"""Sparse attention of new tokens to the selected slots of the cache."""

from typing import Any

import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.dispatch import checked as checks
from jaxkv.dispatch.backends import Call, run
from jaxkv.dispatch.validate import (
    check_cache,
    entry_scale,
    int32,
    layer_index,
    logit_cap_of,
    mla_dims,
    softmax_scale,
)
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import BATCH, array, sample_options, sample_queries
from jaxkv_kernels.formats.entries import MLAEntry


def decode_mla_sparse(
    q_latent,
    q_pe,
    cache: KVCache,
    slots,
    *,
    layer,
    scale,
    kv_scale=None,
    counts=None,
    sinks=None,
    logit_cap: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation=None,
) -> Any:
    """Absorbed multi-head latent attention to the given slots only (DeepSeek V3.2).

    Args:
      q_latent: float [B, Q, Hq, R], queries multiplied by W_UK.
      q_pe: [B, Q, Hq, P], rotary queries after RoPE, the dtype of `q_latent`.
      cache: a cache of `MLAEntry`; its entries are converted to the queries' dtype.
      slots: int32 [B, Q, K], the slots that each query token attends to (`positions_to_slots`); negative ones and
        those past the cache are masked.  For causal attention, select only tokens that the query token may see.
      layer: int, or traced int32 scalar.
      scale: float, the model's own softmax scale.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      counts: int32 [B, Q]; only the first `counts` slots of a query token are used, and the others may hold any value.
        Default: all K slots.
      sinks: float32 [Hq]; attention sinks: one logit per head that is added to the softmax's denominator, without a
        value.  `out` is multiplied by exp(lse) / (exp(lse) + exp(sink)); `lse` does not change.
      logit_cap: static float, from 2**-126 to 2**126; scores become cap * tanh(score / cap).  A cap far above all
        scores changes nothing.  GPU kernels support caps up to 64, `xla` all.
      return_lse: also return the log-sum-exp of the scores.
      batch_invariant: whether the result of a query token has the same bits whatever the rest of the batch is.  Its
        slots are then split by their own number alone, which takes longer if query tokens are few.  `mosaic_gpu` only.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out, of q_latent's shape and dtype; with `return_lse` also lse, float32 [B, Q, Hq], natural logarithm.  A query
      token all of whose slots are masked gets 0 and -inf; low finite scores are never masked.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    call = _bind(q_latent, q_pe, cache, slots, layer, scale, kv_scale, counts, sinks, logit_cap, batch_invariant)
    out, lse = run(call, implementation)
    return (out, lse) if return_lse else out


def _bind(q_latent, q_pe, cache, slots, layer, scale, kv_scale, counts, sinks, logit_cap, batch_invariant) -> Call:
    check_cache(cache, MLAEntry)
    dims = mla_dims(cache)
    dims.check("q_latent", q_latent, "B Q Hq R")
    dims.check("q_pe", q_pe, "B Q Hq P", (str(q_latent.dtype),))
    dims.check_ints("slots", slots, "B Q K")
    if counts is not None:
        dims.check_ints("counts", counts, "B Q")
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
    slots, counts = int32(slots), int32(counts)
    layer, pages = layer_index(layer, cache), cache.layout.pages
    if checks.checking():
        checks.check_layer(layer, pages)
        used = slots >= 0
        if counts is not None:
            inside = (counts >= 0) & (counts <= slots.shape[-1])
            checks.require(inside, "counts", counts, f"there are {slots.shape[-1]} slots per query token")
            used &= jnp.arange(slots.shape[-1])[None, None] < counts[..., None]
        checks.check_slots("slots", jnp.where(used, slots, -1), pages)
        checks.check_live_entries(cache, slots, used, layer)
    arrays = {
        "q_latent": q_latent,
        "q_pe": q_pe,
        "buffer": cache.buffer,
        "slots": slots,
        "counts": counts,
        "sinks": sinks,
        "layer": layer,
        "scale": softmax_scale(scale),
        "kv_scale": entry_scale("kv_scale", kv_scale, cache),
    }
    options = {
        "pages": pages,
        "entry": cache.layout.entry,
        "logit_cap": logit_cap_of(logit_cap),
        "batch_invariant": bool(batch_invariant),
    }
    return Call("decode_mla_sparse", arrays, options)


def _sample(cache):
    queries = sample_queries(cache, *cache.layout.entry.sizes)
    return (*queries, cache, array("int32", BATCH, 1, 32)), {"scale": 1.0, **sample_options(cache, "kv_scale")}


OPERATIONS = (Operation(decode_mla_sparse, _bind, _sample, entries=(MLAEntry,)),)
