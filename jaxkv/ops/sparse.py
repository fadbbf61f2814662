"""Sparse attention of new tokens to the selected slots of a cache, or of two."""

from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    QUERIES,
    Dims,
    check_cache,
    entry_scale,
    int32,
    layer_index,
    logit_cap_of,
    mla_dims,
    softmax_scale,
    static_bool,
)
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.attention import in_float
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import BATCH, array, sample_options, sample_queries
from jaxkv_kernels import calls
from jaxkv_kernels.addressing import one_array
from jaxkv_kernels.extra_slots import ExtraSlots
from jaxkv_kernels.formats.entries import MLAEntry


class ExtraCache(NamedTuple):
    """A second cache for `decode_mla_sparse`, with a layout, a format and a layer of its own.

    DeepSeek V4 attends to the entries of a window in one cache, and to selected compressed entries in another.  Both
    may be views of one buffer (`PackedLayout`).
    """

    cache: KVCache[MLAEntry]
    """A cache of `MLAEntry`, with as many values per latent and rotary part as the first cache has."""
    slots: ArrayLike
    """int32 [B, Q, K'], slots of this cache, masked as those of the first one are."""
    layer: ArrayLike
    """int, or traced int32 scalar."""
    counts: ArrayLike | None = None
    """int32 [B, Q]; only the first `counts` slots of a query token are used.  Default: all K' slots."""
    kv_scale: ArrayLike | None = None
    """As that of the first cache: required by format `fp8`, and rejected by formats without a scale."""


@overload
def decode_mla_sparse(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    extra: ExtraCache | None = None,
    sinks: ArrayLike | None = None,
    logit_cap: float | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    batch_invariant: bool = False,
    implementation: Implementations | None = None,
) -> jax.Array: ...
@overload
def decode_mla_sparse(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    extra: ExtraCache | None = None,
    sinks: ArrayLike | None = None,
    logit_cap: float | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    batch_invariant: bool = False,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def decode_mla_sparse(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    extra: ExtraCache | None = None,
    sinks: ArrayLike | None = None,
    logit_cap: float | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[True],
    batch_invariant: bool = False,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def decode_mla_sparse(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    extra: ExtraCache | None = None,
    sinks: ArrayLike | None = None,
    logit_cap: float | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
    batch_invariant: bool = False,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
def decode_mla_sparse(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache[MLAEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    scale: ArrayLike,
    q_scale: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    extra: ExtraCache | None = None,
    sinks: ArrayLike | None = None,
    logit_cap: float | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    batch_invariant: bool = False,
    implementation: Implementations | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]:
    """Absorbed multi-head latent attention to the given slots only (DeepSeek V3.2, V4).

    Gradients are as in `decode_mla`.

    Args:
      q_latent: float or float8_e4m3fn [B, Q, Hq, R], queries multiplied by W_UK.  Those of e4m3 are converted as in
        `decode_mla`.
      q_pe: [B, Q, Hq, P], rotary queries after RoPE, the dtype of `q_latent`.
      cache: a cache of `MLAEntry`; its entries are converted to the queries' dtype.
      slots: int32 [B, Q, K], the slots that each query token attends to (`positions_to_slots`); negative ones and
        those past the cache are masked.  For causal attention, select only tokens that the query token may see.
      layer: int, or traced int32 scalar.
      scale: float, the model's own softmax scale.
      q_scale: float scalar or [Hq], the scale of queries of e4m3, as in `decode_mla`.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      counts: int32 [B, Q]; only the first `counts` slots of a query token are used, and the others may hold any value.
        Default: all K slots.
      extra: `ExtraCache`; slots of another cache, which the query tokens attend to as well, in the same softmax.
      sinks: float32 [Hq]; attention sinks: one logit per head that is added to the softmax's denominator, without a
        value.  `out` is multiplied by exp(lse) / (exp(lse) + exp(sink)); `lse` does not change.
      logit_cap: static float, from 2**-126 to 2**126; scores become cap * tanh(score / cap).  A cap far above all
        scores changes nothing.  GPU kernels support caps up to 64, `xla` all.
      return_lse: also return the log-sum-exp of the scores.
      return_max_logits: also return the largest logit of each query token and head (FlashMLA's `max_logits`): the
        maximum of the scores, multiplied by `scale` and capped, without sinks.  `xla` only.
      batch_invariant: whether the result of a query token has the same bits whatever the rest of the batch is.  Its
        slots are then split by their own number alone, which takes longer if query tokens are few.  `mosaic_gpu` only.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out [B, Q, Hq, V], of q_latent's dtype (e4m3 converted); with `return_lse` also lse, float32 [B, Q, Hq], natural
      logarithm; with `return_max_logits` also the largest logits, float32 [B, Q, Hq], after these.  V is R, or R + P in
      the formats of DeepSeek V4 and V4.1 (`fp8_v4`, `fp8_v41`, `fp8_v41_split`, `fp4_v41` and `fp4_v41_split`), whose
      values include the rotary part.  A query token all of whose slots are masked gets 0, -inf and -inf; low finite
      scores are never masked.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, or the two caches have entries of different sizes.
    """
    return_lse = static_bool("return_lse", return_lse)
    return_max_logits = static_bool("return_max_logits", return_max_logits)
    check_cache(cache, MLAEntry)
    dims = mla_dims(cache)
    q_latent = dims.check("q_latent", q_latent, "B Q Hq R", QUERIES)
    q_pe = dims.check("q_pe", q_pe, "B Q Hq P", (str(q_latent.dtype),))
    (q_latent, q_pe), scale = in_float((q_latent, q_pe), q_scale, softmax_scale(scale), cache.layout.entry.input_dtype)
    if sinks is not None:
        sinks = dims.check("sinks", sinks, "Hq", ("float32",))
    first = _checked_slots(dims, ExtraCache(cache, slots, layer, counts, kv_scale))
    call = calls.DecodeMLASparse(
        q_latent=q_latent,
        q_pe=q_pe,
        buffer=first.buffer,
        pages=first.pages,
        entry=first.entry,
        layer=first.layer,
        slots=first.slots,
        counts=first.counts,
        kv_scale=first.kv_scale,
        sinks=sinks,
        scale=scale,
        extra=None if extra is None else _checked_extra(dims, cache, extra),
        logit_cap=logit_cap_of(logit_cap),
        batch_invariant=static_bool("batch_invariant", batch_invariant),
        max_logits=return_max_logits,
    )
    out, lse, max_logits = run(call, implementation)
    if max_logits is None:
        return (out, lse) if return_lse else out
    return (out, lse, max_logits) if return_lse else (out, max_logits)


def _checked_extra(dims: Dims, cache: KVCache[MLAEntry], extra: ExtraCache) -> ExtraSlots:
    """The checked fields of `extra`; ValueError if its entries cannot be attended to beside those of `cache`."""
    if not isinstance(extra, ExtraCache):
        raise ValueError(f"`extra` is a {type(extra).__name__}: expected a jaxkv.ExtraCache")
    check_cache(extra.cache, MLAEntry, name="extra.cache")
    first, second = cache.layout.entry, extra.cache.layout.entry
    if (first.sizes, first.value_dim) != (second.sizes, second.value_dim):
        raise ValueError(
            f"`extra.cache` stores {second}, whose values have {second.value_dim} elements: expected entries of "
            f"{first.latent} + {first.rope} values, of which {first.value_dim} are summed, as in `cache` ({first})"
        )
    return _checked_slots(dims, extra, "extra.", "K'")


def _checked_slots(dims: Dims, given: ExtraCache, prefix: str = "", count: str = "K") -> ExtraSlots:
    """The checked fields of one of the two caches.

    `prefix` precedes the names of arguments in messages, and `count` is the letter of the axis of slots.
    """
    cache, slots, counts = given.cache, given.slots, given.counts
    dims.check_ints(f"{prefix}slots", slots, f"B Q {count}")
    if counts is not None:
        dims.check_ints(f"{prefix}counts", counts, "B Q")
    slots, counts = int32(slots), int32(counts)
    layer, pages = layer_index(given.layer, cache, name=f"{prefix}layer"), cache.layout.pages
    if data_checks.checking():
        data_checks.check_layer(layer, pages, name=f"{prefix}layer")
        used = slots >= 0
        if counts is not None:
            inside = (counts >= 0) & (counts <= slots.shape[-1])
            problem = f"there are {slots.shape[-1]} slots per query token"
            data_checks.require(inside, f"{prefix}counts", counts, problem)
            used &= jnp.arange(slots.shape[-1])[None, None] < counts[..., None]
        data_checks.check_slots(f"{prefix}slots", jnp.where(used, slots, -1), pages)
        data_checks.check_live_entries(cache, slots, used, layer, name=f"{prefix}cache")
    kv_scale = entry_scale(f"{prefix}kv_scale", given.kv_scale, cache)
    return ExtraSlots(one_array(cache.buffer), slots, counts, layer, kv_scale, pages, cache.layout.entry)


def _sample(cache):
    queries = sample_queries(cache, *cache.layout.entry.sizes)
    return (*queries, cache, array("int32", BATCH, 1, 32)), {"scale": 1.0, **sample_options(cache, "kv_scale")}


def _sample_of_two(cache):
    args, options = _sample(cache)
    scale = {"kv_scale": options["kv_scale"]} if "kv_scale" in options else {}
    slots: Any = array("int32", BATCH, 1, 48)
    return args, {**options, "extra": ExtraCache(cache, slots, 0, **scale)}


OPERATIONS = (Operation(decode_mla_sparse, _sample, entries=(MLAEntry,), variants={"with `extra`": _sample_of_two}),)
