"""Storing the entries of new tokens."""

from jaxkv.cache import KVCache
from jaxkv.dispatch import checked as checks
from jaxkv.dispatch.backends import Call, run
from jaxkv.dispatch.validate import Dims, check_cache, entry_scale, int32, layer_index, mla_dims, static_bool
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import TOKENS, array, sample_new, sample_options
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry


def write_mla(
    cache: KVCache,
    kv_c,
    k_pe,
    slot_mapping,
    *,
    layer,
    kv_scale=None,
    cos_sin=None,
    interleaved: bool = False,
    implementation=None,
) -> KVCache:
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
    call = _bind_mla(cache, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, interleaved)
    return KVCache(run(call, implementation), cache.layout)


def _bind_mla(cache, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, interleaved) -> Call:
    check_cache(cache, MLAEntry)
    dims = mla_dims(cache)
    dims.check("kv_c", kv_c, "T R")
    dims.check("k_pe", k_pe, "T P")
    interleaved = static_bool("interleaved", interleaved)
    if cos_sin is not None:
        dims.check("cos_sin", cos_sin, "T P", ("float32",))
        if not dims["P"] or dims["P"] % 2:
            raise ValueError(f"`cos_sin` has {dims['P']} values per token: expected a rotary part of pairs of values")
    elif interleaved:
        raise ValueError("`interleaved` is set: expected `cos_sin` too, because keys are not rotated without it")
    arrays = {"kv_c": kv_c, "k_pe": k_pe, "kv_scale": entry_scale("kv_scale", kv_scale, cache), "cos_sin": cos_sin}
    options = {"interleaved": interleaved}
    return bind_slots("write_mla", cache, dims, arrays, "slot_mapping", slot_mapping, layer, **options)


def write_kv(cache: KVCache, k, v, slot_mapping, *, layer, k_scale=None, v_scale=None, implementation=None) -> KVCache:
    """Stores keys and values of all heads.

    Args:
      cache: a cache of `KVEntry`.
      k: float [T, H, D].
      v: float [T, H, Dv].
      slot_mapping: int32 [T], as in `write_mla`.
      layer: int, or traced int32 scalar, as in `write_mla`.
      k_scale: float scalar or [H], required by format `fp8` and rejected by the others; stored = value / k_scale.
      v_scale: the same for v; stored = value / v_scale.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with T entries per head stored and every other byte as it was; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    call = _bind_kv(cache, k, v, slot_mapping, layer, k_scale, v_scale)
    return KVCache(run(call, implementation), cache.layout)


def _bind_kv(cache, k, v, slot_mapping, layer, k_scale, v_scale) -> Call:
    check_cache(cache, KVEntry)
    entry = cache.layout.entry
    dims = Dims(
        H=(cache.layout.num_heads, "the cache's heads"),
        D=(entry.sizes[0], "the entry's head_dim"),
        Dv=(entry.sizes[1], "the entry's value_dim"),
    )
    dims.check("k", k, "T H D")
    dims.check("v", v, "T H Dv")
    arrays = {
        "k": k,
        "v": v,
        "k_scale": entry_scale("k_scale", k_scale, cache, heads=True),
        "v_scale": entry_scale("v_scale", v_scale, cache, heads=True),
    }
    return bind_slots("write_kv", cache, dims, arrays, "slot_mapping", slot_mapping, layer)


def write_indexer_k(cache: KVCache, k, slot_mapping, *, layer, implementation=None) -> KVCache:
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
    call = _bind_indexer_k(cache, k, slot_mapping, layer)
    return KVCache(run(call, implementation), cache.layout)


def _bind_indexer_k(cache, k, slot_mapping, layer) -> Call:
    check_cache(cache, IndexerEntry)
    dims = Dims(D=(cache.layout.entry.sizes[0], "the entry's head_dim"))
    dims.check("k", k, "T D")
    return bind_slots("write_indexer_k", cache, dims, {"k": k}, "slot_mapping", slot_mapping, layer)


def bind_slots(operation, cache, dims, arrays, name, slots, layer, *, written: bool = True, **options) -> Call:
    """Checks the slots and the layer of an operation on the entries of T slots, and returns the call.

    `arrays` are new values and their scales, `name` is that of the argument `slots`, and `options` are those of a
    single operation.  Slots that are `written` may occur only once.
    """
    dims.check_ints(name, slots, "T")
    slots, layer = int32(slots), layer_index(layer, cache)
    pages = cache.layout.pages
    if checks.checking():
        checks.check_layer(layer, pages)
        checks.check_slots(name, slots, pages)
        if written:
            checks.check_written_once(name, slots, "slot")
    arrays = {"buffer": cache.buffer, **arrays, name: slots, "layer": layer}
    return Call(operation, arrays, {"pages": pages, "entry": cache.layout.entry, **options})


def _sample(*scales):
    return lambda cache: ((cache, *sample_new(cache), array("int32", TOKENS)), sample_options(cache, *scales))


OPERATIONS = (
    Operation(write_mla, _bind_mla, _sample("kv_scale"), entries=(MLAEntry,)),
    Operation(write_kv, _bind_kv, _sample("k_scale", "v_scale"), entries=(KVEntry,)),
    Operation(write_indexer_k, _bind_indexer_k, _sample(), entries=(IndexerEntry,)),
)
