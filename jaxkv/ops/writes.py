"""Storing the entries of new tokens."""

from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    FLOATS,
    Dims,
    check_cache,
    computed,
    describe,
    entry_scale,
    int32,
    layer_index,
    mla_dims,
    static_bool,
)
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import TOKENS, array, sample_new, sample_options
from jaxkv_kernels import calls
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry
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
      kv_c: float [T, R], latents after their norm.  Into format `fp8`, latents and rotary keys that are already e4m3
        (float8_e4m3fn; in `fp8_e5m2`, float8_e5m2) are stored as they are, without `kv_scale`.
      k_pe: float [T, P], rotary keys after RoPE, or before it if `cos_sin` is passed.
      slot_mapping: int32 [T], the slot of each token.  Tokens whose slot is negative or past the cache are skipped.  If
        two tokens have the same slot, it may hold a mixture of both entries afterwards.
      layer: int, or traced int32 scalar.  A traced layer outside the cache writes nothing.
      kv_scale: float scalar, required by format `fp8` for float values, and rejected otherwise; stored = value /
        kv_scale.
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
    dtypes = _dtypes(cache)
    kv_c, k_pe = dims.check("kv_c", kv_c, "T R", dtypes), dims.check("k_pe", k_pe, "T P", dtypes)
    cos_sin, interleaved = _checked_rotation(cos_sin, interleaved, dims, "P")
    slots, layer = checked_slots("slot_mapping", slot_mapping, layer, cache, dims)
    if _quantised({"kv_c": kv_c, "k_pe": k_pe}, {"kv_scale": kv_scale, "cos_sin": cos_sin}):
        return _written(cache, (kv_c, k_pe), slots, layer, implementation)
    kv_scale = entry_scale("kv_scale", kv_scale, cache)
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
      k: float [T, H, D], after RoPE, or before it if `cos_sin` is passed.  If both have format `fp8`, keys and values
        that are already e4m3 (float8_e4m3fn; in `fp8_e5m2`, float8_e5m2) are stored as they are, without scales.
      v: float [T, H, Dv].
      slot_mapping: int32 [T], as in `write_mla`.
      layer: int, or traced int32 scalar, as in `write_mla`.
      k_scale: float scalar, [H] or [num_blocks, block_size, H], required by format `fp8` for float values, and rejected
        otherwise; stored = value / k_scale.  The last form is that of `decode_kv`: the scales at `slot_mapping` are
        used.
      v_scale: the same for v and the format of values; stored = value / v_scale.
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
    dtypes = _dtypes(cache)
    k, v = dims.check("k", k, "T H D", dtypes), dims.check("v", v, "T H Dv", dtypes)
    cos_sin, interleaved = _checked_rotation(cos_sin, interleaved, dims, "D")
    slots, layer = checked_slots("slot_mapping", slot_mapping, layer, cache, dims)
    if _quantised({"k": k, "v": v}, {"k_scale": k_scale, "v_scale": v_scale, "cos_sin": cos_sin}):
        return _written(cache, (k, v), slots, layer, implementation)
    k_scale = entry_scale("k_scale", k_scale, cache, heads=True)
    v_scale = entry_scale("v_scale", v_scale, cache, heads=True)
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


def write_entries[E: Entry](
    cache: KVCache[E],
    entries: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    layer: ArrayLike,
    implementation: Implementations | None = None,
) -> KVCache[E]:
    """Stores the bytes of entries that are already encoded: the counterpart of `gather_entries`.

    `entry.pack` makes such bytes of arrays that another library stores separately, such as quantised values and their
    scales.

    Args:
      cache: a cache.
      entries: uint8 [T, nbytes], or [T, H, nbytes] for a cache of `KVEntry`: the bytes of each entry, its parts in the
        order of the format, also if pages are split or keys and values lie apart.  They are not checked.
      slot_mapping: int32 [T], as in `write_mla`.
      layer: int, or traced int32 scalar, as in `write_mla`.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with T entries (per head) stored and every other byte as it was; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    entry = check_cache(cache, Entry)
    dims = Dims(H=(cache.layout.num_heads, "the cache's heads"), W=(entry.nbytes, "the bytes of an entry"))
    rows = dims.check("entries", entries, "T W" if entry.one_head else "T H W", ("uint8",))
    slots, layer = checked_slots("slot_mapping", slot_mapping, layer, cache, dims)
    call = calls.WriteEntries(**entries_of(cache), rows=rows, slot_mapping=slots, layer=layer)
    return KVCache(run(call, implementation), cache.layout)


def _dtypes(cache: KVCache) -> tuple[str, ...]:
    """The dtypes of new values: floats, and the one in which the cache stores all values."""
    stored = cache.layout.entry.values_dtype
    return FLOATS if stored is None or str(stored) in FLOATS else (*FLOATS, str(stored))


def _quantised(values: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether new values are stored as they are; ValueError if only one is, or if `options` would change them."""
    found = {name: str(value.dtype) not in FLOATS for name, value in values.items()}
    if any(found.values()):
        (first, second), given = values, [name for name, option in options.items() if option is not None]
        if not all(found.values()):
            raise ValueError(
                f"`{first}` has dtype {values[first].dtype} and `{second}` has dtype {values[second].dtype}: expected "
                "both to be quantised, or neither"
            )
        if given:
            raise ValueError(
                f"`{given[0]}` is {describe(options[given[0]])}: expected None, as `{first}` and `{second}` are "
                f"{values[first].dtype} and are stored as they are"
            )
    return any(found.values())


def _written[E: Entry](
    cache: KVCache[E], values: tuple[jax.Array, ...], slots: jax.Array, layer: jax.Array, implementation
) -> KVCache[E]:
    """The cache with values stored as they are, one array after the other in each entry."""
    entry = cache.layout.entry
    rows = computed(lambda *values: entry.pack(dict(zip(entry.named_sizes, values, strict=True))), *values)
    call = calls.WriteEntries(**entries_of(cache), rows=rows, slot_mapping=slots, layer=layer)
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


def _sample_entries(cache):
    heads = () if cache.layout.entry.one_head else (cache.layout.num_heads,)
    rows = array("uint8", TOKENS, *heads, cache.layout.entry.nbytes)
    return (cache, rows, array("int32", TOKENS)), {"layer": 0}


OPERATIONS = (
    Operation(write_mla, _sample("kv_scale"), entries=(MLAEntry,)),
    Operation(write_kv, _sample("k_scale", "v_scale"), entries=(KVEntry,)),
    Operation(write_indexer_k, _sample(), entries=(IndexerEntry,)),
    Operation(write_entries, _sample_entries, entries=(MLAEntry, KVEntry, IndexerEntry)),
)
