"""Storing the entries of new tokens."""

from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache, computed, entry_scale, int32, layer_index, mla_dims, static_bool
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import TOKENS, array, sample_new, sample_options
from jaxkv_kernels import calls
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.rotary import rotated


def write_mla(
    cache: KVCache[MLAEntry],
    kv_c: ArrayLike,
    k_pe: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    layer: ArrayLike,
    kv_scale: ArrayLike | None = None,
    cos_sin: ArrayLike | None = None,
    interleaved: bool = False,
    implementation: Implementations | None = None,
) -> KVCache[MLAEntry]:
    """Stores latents and rotary keys.

    Args:
      cache: a cache of `MLAEntry`.
      kv_c: float [T, R], latents after their norm.
      k_pe: float [T, P], rotary keys after RoPE, or before it if `cos_sin` is passed.
      slot_mapping: int32 [T], the slot of each token.  Tokens whose slot is negative or past the cache are skipped.  If
        two tokens have the same slot, it may hold a mixture of both entries afterwards.
      layer: int, or traced int32 scalar.  A traced layer outside the cache writes nothing.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; stored = value / kv_scale.
      cos_sin: float32 [T, P], the cosines and then the sines of P / 2 angles per token, by which the pairs of values of
        `k_pe` are rotated.  Products and sums are float32, and are rounded to the dtype of `k_pe`; their last bit may
        differ between devices.  The result is stored as without `cos_sin`.
      interleaved: static; whether pairs are values 2i and 2i + 1 of `k_pe`, instead of i and i + P / 2.  The rotated
        values take the places of the pair: queries must have their values in the same order.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with T entries stored and every other byte as it was; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, MLAEntry)
    dims = mla_dims(cache)
    kv_c, k_pe = dims.check("kv_c", kv_c, "T R"), dims.check("k_pe", k_pe, "T P")
    cos_sin, interleaved = _checked_rotation(cos_sin, interleaved, dims, "P")
    kv_scale = entry_scale("kv_scale", kv_scale, cache)
    slots, layer = checked_slots("slot_mapping", slot_mapping, layer, cache, dims)
    call = calls.WriteMLA(
        **entries_of(cache), kv_c=kv_c, k_pe=k_pe, slot_mapping=slots, layer=layer, kv_scale=kv_scale, cos_sin=cos_sin,
        interleaved=interleaved,
    )  # fmt: skip
    return KVCache(run(call, implementation), cache.layout)


def write_kv(
    cache: KVCache[KVEntry],
    k: ArrayLike,
    v: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    layer: ArrayLike,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    cos_sin: ArrayLike | None = None,
    interleaved: bool = False,
    implementation: Implementations | None = None,
) -> KVCache[KVEntry]:
    """Stores keys and values of all heads.

    Args:
      cache: a cache of `KVEntry`.
      k: float [T, H, D], after RoPE, or before it if `cos_sin` is passed.
      v: float [T, H, Dv].
      slot_mapping: int32 [T], as in `write_mla`.
      layer: int, or traced int32 scalar, as in `write_mla`.
      k_scale: float scalar, [H] or [num_blocks, block_size, H], required by format `fp8` and rejected by the others;
        stored = value / k_scale.  The last form is that of `decode_kv`: the scales at `slot_mapping` are used.
      v_scale: the same for v; stored = value / v_scale.
      cos_sin: float32 [T, D], the cosines and then the sines of D / 2 angles per token, by which the pairs of values of
        each head of `k` are rotated, as in `write_mla`.  All D values are rotated; rotate keys of which only some are
        rotary beforehand.  XLA rotates the keys, on GPUs before the kernel that stores them.
      interleaved: static; whether pairs are values 2i and 2i + 1 of a key, instead of i and i + D / 2, as in
        `write_mla`.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with T entries per head stored and every other byte as it was; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, KVEntry)
    entry = cache.layout.entry
    dims = Dims(
        H=(cache.layout.num_heads, "the cache's heads"),
        D=(entry.sizes[0], "the entry's head_dim"),
        Dv=(entry.sizes[1], "the entry's value_dim"),
    )
    k, v = dims.check("k", k, "T H D"), dims.check("v", v, "T H Dv")
    cos_sin, interleaved = _checked_rotation(cos_sin, interleaved, dims, "D")
    k_scale = entry_scale("k_scale", k_scale, cache, heads=True)
    v_scale = entry_scale("v_scale", v_scale, cache, heads=True)
    slots, layer = checked_slots("slot_mapping", slot_mapping, layer, cache, dims)
    keys = k if cos_sin is None else computed(partial(_rotated_heads, interleaved=interleaved), k, cos_sin)
    call = calls.WriteKV(
        **entries_of(cache), k=keys, v=v, slot_mapping=slots, layer=layer, k_scale=k_scale, v_scale=v_scale
    )
    return KVCache(run(call, implementation), cache.layout)


def write_indexer_k(
    cache: KVCache[IndexerEntry],
    k: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    layer: ArrayLike,
    implementation: Implementations | None = None,
) -> KVCache[IndexerEntry]:
    """Stores indexer keys.

    Format `indexer_fp8` quantises them: a page holds the values of all its tokens, then their scales.

    Args:
      cache: a cache of `IndexerEntry`.
      k: float [T, D], D = 128 in DeepSeek V3.2.
      slot_mapping: int32 [T], as in `write_mla`.
      layer: int, or traced int32 scalar, as in `write_mla`.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with T keys stored and every other byte as it was; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    check_cache(cache, IndexerEntry)
    dims = Dims(D=(cache.layout.entry.sizes[0], "the entry's head_dim"))
    k = dims.check("k", k, "T D")
    slots, layer = checked_slots("slot_mapping", slot_mapping, layer, cache, dims)
    call = calls.WriteIndexerK(**entries_of(cache), k=k, slot_mapping=slots, layer=layer)
    return KVCache(run(call, implementation), cache.layout)


def _checked_rotation(cos_sin, interleaved, dims: Dims, axis: str) -> tuple[jax.Array | None, bool]:
    """`cos_sin` [T, `axis`] and `interleaved` of a write; ValueError if they are wrong."""
    interleaved = static_bool("interleaved", interleaved)
    if cos_sin is not None:
        cos_sin = dims.check("cos_sin", cos_sin, f"T {axis}", ("float32",))
        if not dims[axis] or dims[axis] % 2:
            raise ValueError(f"`cos_sin` has {dims[axis]} values per token: expected keys of pairs of values")
    elif interleaved:
        raise ValueError("`interleaved` is set: expected `cos_sin` too, because keys are not rotated without it")
    return cos_sin, interleaved


@partial(jax.jit, static_argnames="interleaved")
def _rotated_heads(k: jax.Array, cos_sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Keys [T, H, D], of which all heads are rotated by `cos_sin` [T, D]."""
    return rotated(k, cos_sin[:, None], interleaved=interleaved)


def checked_slots(
    name: str, slots: ArrayLike, layer: ArrayLike, cache: KVCache, dims: Dims, *, written: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The slots [T] and the layer of a call, as kernels expect them; ValueError if their shapes or dtypes are wrong.

    `name`: what messages call `slots`.  Slots that are `written` may occur only once.
    """
    dims.check_ints(name, slots, "T")
    slots, layer = int32(slots), layer_index(layer, cache)
    pages = cache.layout.pages
    if data_checks.checking():
        data_checks.check_layer(layer, pages)
        data_checks.check_slots(name, slots, pages)
        if written:
            data_checks.check_written_once(name, slots, "slot")
    return slots, layer


def entries_of(cache: KVCache) -> dict[str, Any]:
    """The fields of a `CacheCall` that describe the cache."""
    return {"buffer": cache.buffer, "pages": cache.layout.pages, "entry": cache.layout.entry}


def _sample(*scales):
    return lambda cache: ((cache, *sample_new(cache), array("int32", TOKENS)), sample_options(cache, *scales))


OPERATIONS = (
    Operation(write_mla, _sample("kv_scale"), entries=(MLAEntry,)),
    Operation(write_kv, _sample("k_scale", "v_scale"), entries=(KVEntry,)),
    Operation(write_indexer_k, _sample(), entries=(IndexerEntry,)),
)
