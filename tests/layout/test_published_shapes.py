"""The shapes in which other libraries allocate caches, each viewed in place and used by every operation.

A shape is written as its axes, outermost first: L layers, B blocks, N tokens of a block, H heads, C content, and 2 for
keys and values.  Layouts are made from the strides of NumPy's views of the keys and of the values.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from support import oracle
from support.cases import further
from support.compare import assert_close, assert_same_bits

COUNTS = {"L": 3, "B": 6, "N": 4, "H": 2, "C": 8, "2": 2}
HEAD_DIM, VALUE_DIM = 8, 4
"""The values of a key, and of a value where the two differ."""

KEYS_AND_VALUES = {
    "2BNHC": "vLLM, FlashAttention until 2026, a layer",
    "2BHNC": "the same, HND",
    "B2NHC": "vLLM, FlashInfer: NHD, a layer",
    "B2HNC": "the same, HND",
    "BLN2HC": "vLLM, cross-layer, stride order (1, 0, 3, 2, 4)",
    "B2HLNC": "vLLM, cross-layer, HND: (167623, 2, 8, 16, 16, 64)",
    "LBNH2C": "vLLM since KVCacheLayout LBNHC: values follow their keys; tpu-inference, levanter: heads interleaved",
    "BHLN2C": "vLLM since KVCacheLayout BHLNC",
    "2LBNHC": "SGLang, host memory, layer_first",
    "2BNLHC": "SGLang, host memory, page_first: tokens outside of layers",
    "2BLNHC": "SGLang, host memory, page_first_direct",
    "2BHNLC": "SGLang, host memory, page_head",
    "BNH, C and C": "vLLM, FLASH_ATTN_DIFFKV, a layer: content of a key and a value of another size",
    "LBNHC, then LBNHC": "SGLang, the same with values of another size; FlashInfer: two arrays, in one allocation",
}
UNSUPPORTED = {
    "BHCN": (
        "vLLM, PagedAttention: V [B, H, D, N]; the content of its K [B, H, D / x, N, x] has two strides",
        "`value_strides.content` is 4: expected 1, as the content of an entry is contiguous",
    ),
}
LATENTS = {
    "BNC": "vLLM, FlashMLA, FlashInfer, a layer",
    "BLNC": "vLLM, cross-layer, stride order (1, 0, 2, 3); SGLang, host memory, page_first_direct",
    "LBNC": "SGLang, layer_first",
    "BNLC": "SGLang, host memory, page_first",
}
PADDED = "tpu-inference: content padded to a multiple of 128, 576 of 640"


def normal(array, axes):
    """A view of an array of `axes` as [L, B, N, H, ..., C], with axes of length 1 where it has none."""
    present = [a for a in "LBNH2C" if a in axes]
    moved = np.transpose(array, [axes.index(a) for a in present])
    for i, a in enumerate("LBNH"):
        if a not in axes:
            moved = np.expand_dims(moved, i)
    return moved


def shape_of(axes, content):
    return [(COUNTS | {"C": content})[a] for a in axes]


def keys_and_values(name, flat):
    """Views [L, B, N, H, n] of the keys and of the values in a flat array, or its size if that is None."""
    axes, _, others = name.partition(", ")
    if others == "C and C":
        shape = shape_of(axes + "C", HEAD_DIM + VALUE_DIM)
        return (
            np.prod(shape) if flat is None else np.split(normal(flat.reshape(shape), axes + "C"), [HEAD_DIM], axis=-1)
        )
    if others:
        shapes = shape_of(axes, HEAD_DIM), shape_of(others.removeprefix("then "), VALUE_DIM)
        first = np.prod(shapes[0])
        if flat is None:
            return first + np.prod(shapes[1])
        names = axes, others.removeprefix("then ")
        return [normal(x.reshape(s), n) for x, s, n in zip((flat[:first], flat[first:]), shapes, names, strict=True)]
    shape = shape_of(axes, HEAD_DIM)
    return np.prod(shape) if flat is None else np.moveaxis(normal(flat.reshape(shape), axes), 4, 0)


def strides_of(view):
    return dict(zip(("layer", "block", "token", "head"), (step // 4 for step in view.strides), strict=False))


def address(view):
    return view.__array_interface__["data"][0] // 4


def viewed(name):
    """A random flat array of that shape, and its layout."""
    flat = np.random.default_rng(0).standard_normal(keys_and_values(name, None)).astype(np.float32)
    keys, values = keys_and_values(name, flat)
    layers, blocks, tokens, heads, _ = keys.shape
    layout = jaxkv.CacheLayout.from_strides(
        num_layers=layers, num_blocks=blocks, block_size=tokens, num_heads=heads,
        entry=jaxkv.KVEntry("f32", keys.shape[-1], values.shape[-1]), size=flat.size,
        strides=strides_of(keys), offset=address(keys) - address(flat),
        value_strides=strides_of(values), value_offset=address(values) - address(flat),
    )  # fmt: skip
    return flat, layout


def cache_of(array, layout):
    return jaxkv.KVCache(jnp.asarray(array.reshape(-1)), layout)


TABLES, LENGTHS = np.asarray([[3, 1, 5], [0, 4, 2]], np.int32), np.asarray([10, 5], np.int32)


def entries_of(array, layer):
    """The entries [S, H, ...] of each request, from an array [L, B, N, H, ...]."""
    for table, length in zip(TABLES, LENGTHS, strict=True):
        yield array[layer][table].reshape(-1, *array.shape[3:])[:length]


@pytest.mark.parametrize("name", [further(name) if i % 2 else name for i, name in enumerate(KEYS_AND_VALUES)])
def test_keys_and_values(name):
    flat, layout = viewed(name)
    cache, held = cache_of(flat, layout), keys_and_values(name, flat)
    layer, heads = layout.num_layers - 1, layout.num_heads
    rng = np.random.default_rng(1)

    new = [rng.standard_normal((3, heads, size)).astype(np.float32) for size in layout.entry.sizes]
    written = jaxkv.write_kv(cache, *map(jnp.asarray, new), jnp.asarray([13, -1, 2]), layer=layer)
    expected = flat.copy()
    for part, values in zip(keys_and_values(name, expected), new, strict=True):
        part[layer, 3, 1], part[layer, 0, 2] = values[0], values[2]
    assert_same_bits(written.buffer, expected)

    sums = jnp.asarray(np.r_[0, np.cumsum(LENGTHS)])
    gathered = jaxkv.gather_kv(cache, jnp.asarray(TABLES), sums, total=15, layer=layer, dtype="float32")
    for part, values in zip(held, gathered, strict=True):
        assert_same_bits(values, np.concatenate([*entries_of(part, layer)]))
    slots = jnp.asarray([13, 2, 99])
    for part, values in zip(held, jaxkv.read_kv(cache, slots, layer=layer, dtype="float32"), strict=True):
        assert_same_bits(values, np.stack([part[layer, 3, 1], part[layer, 0, 2], np.zeros_like(part[0, 0, 0])]))

    q = rng.standard_normal((2, 1, 2 * heads, HEAD_DIM)).astype(np.float32)
    plan = jaxkv.plan_decode(cache, jnp.asarray(TABLES), jnp.asarray(LENGTHS), num_heads=2 * heads, dtype="float32")
    out = jaxkv.decode_kv(
        jnp.asarray(q), cache, jnp.asarray(TABLES), jnp.asarray(LENGTHS), layer=layer, scale=0.3, plan=plan
    )
    for request, tokens in enumerate(zip(*(entries_of(part, layer) for part in held), strict=True)):
        right, _ = oracle.attention(q[request], *tokens, 0.3)
        assert_close(out[request], right, roundings=64, magnitude=1)
    check_blocks(cache, flat, lambda flat: keys_and_values(name, flat))


def check_blocks(cache, flat, parts_of):
    """Copies blocks, exports them, converts them to the default layout and back."""
    layout, held = cache.layout, parts_of(flat)
    copied = jaxkv.copy_blocks(cache, jnp.asarray([1, 4]), jnp.asarray([0, 5]))
    expected = flat.copy()
    for part in parts_of(expected):
        part[:, 0], part[:, 5] = part[:, 1].copy(), part[:, 4].copy()
    assert_same_bits(copied.buffer, expected)

    rows = jaxkv.read_blocks(cache, jnp.asarray([4, 2]))
    assert rows.shape == (2, layout.block_nbytes // 4)
    back = jaxkv.write_blocks(jaxkv.KVCache(jnp.zeros_like(cache.buffer), layout), jnp.asarray([4, 2]), rows)
    expected = np.zeros_like(flat)
    for target, source in zip(parts_of(expected), held, strict=True):
        target[:, [4, 2]] = source[:, [4, 2]]
    assert_same_bits(back.buffer, expected)

    plain = jaxkv.CacheLayout(
        num_layers=layout.num_layers, num_blocks=6, block_size=4, num_heads=layout.num_heads, entry=layout.entry
    )
    converted = jaxkv.convert_blocks(rows, layout, plain)
    entries = np.concatenate(held, axis=-1)[:, [4, 2]]
    assert_same_bits(np.asarray(converted), entries.swapaxes(0, 1).reshape(2, -1))
    assert_same_bits(jaxkv.convert_blocks(converted, plain, layout), rows)


def test_content_that_is_not_contiguous_is_unsupported():
    ((axes, (_, message)),) = UNSUPPORTED.items()
    keys, values = (normal(np.zeros(shape_of(a, HEAD_DIM), np.float32), a) for a in ("BHNC", axes))
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxkv.CacheLayout.from_strides(
            num_layers=1, num_blocks=6, block_size=4, num_heads=2, entry=jaxkv.KVEntry("f32", HEAD_DIM),
            size=keys.size + values.size, strides=strides_of(keys), value_offset=keys.size,
            value_strides=strides_of(values) | {"content": values.strides[-1] // 4},
        )  # fmt: skip


@pytest.mark.parametrize(("axes", "content"), [*((axes, None) for axes in LATENTS), ("BNC", 640)])
def test_latents(axes, content):
    entry = jaxkv.MLAEntry("f32", latent=512, rope=64) if content else jaxkv.MLAEntry("f32", latent=32, rope=8)
    latent, rope = entry.sizes
    array = np.random.default_rng(0).standard_normal(shape_of(axes, content or latent + rope)).astype(np.float32)

    def entries(flat):
        return normal(flat.reshape(array.shape), axes)[..., : latent + rope]

    held = entries(array)
    layers, blocks, tokens, heads, _ = held.shape
    layout = jaxkv.CacheLayout.from_strides(
        num_layers=layers, num_blocks=blocks, block_size=tokens, num_heads=heads, entry=entry, size=array.size,
        strides=strides_of(held),
    )  # fmt: skip
    cache, layer = cache_of(array, layout), layers - 1
    rng = np.random.default_rng(1)
    new = [rng.standard_normal((3, n)).astype(np.float32) for n in entry.sizes]
    written = jaxkv.write_mla(cache, *map(jnp.asarray, new), jnp.asarray([13, -1, 2]), layer=layer)
    expected = array.copy()
    for token, (block, place) in {0: (3, 1), 2: (0, 2)}.items():
        entries(expected)[layer, block, place, 0] = np.concatenate([part[token] for part in new])
    assert_same_bits(written.buffer, expected.reshape(-1))

    q = [rng.standard_normal((2, 1, 3, n)).astype(np.float32) for n in entry.sizes]
    out = jaxkv.decode_mla(
        *map(jnp.asarray, q), cache, jnp.asarray(TABLES), jnp.asarray(LENGTHS), layer=layer, scale=0.1
    )
    for request, tokens in enumerate(entries_of(held, layer)):
        right, _ = oracle.attention(np.concatenate([x[request] for x in q], -1), tokens, tokens[..., :latent], 0.1)
        assert_close(out[request], right, roundings=64, magnitude=1)
    if content is None:
        check_blocks(cache, array.reshape(-1), lambda flat: [entries(flat)])


F32 = jaxkv.KVEntry("f32", 8)
STEPS = {"layer": 0, "block": 64, "token": 8, "head": 0}


@pytest.mark.parametrize(
    ("entry", "given", "message"),
    [
        (jaxkv.MLAEntry("f32", 4, 4), {}, "MLAEntry.* is stored as a whole: only the keys and values"),
        (jaxkv.KVEntry("int8", 6, 2), {"dtype": "uint8"}, r"K scales would begin at byte 6, expected a multiple of 4"),
        (jaxkv.KVEntry("bf16", 3, 5), {"dtype": "float32"}, r"`dtype` is float32 .* the 6 and 10 bytes"),
        (F32, {"value_offset": 36}, r"value \(layer 0, block 0, head 0, token 0\) begins at element 36, and key \(.*"
         r"token 4\) has elements \[32, 40\) "),
        (F32, {"value_strides": {**STEPS, "token": 4}}, r"value \(.*token 1\) begins at element 1028, and value \(.*"
         r"token 0\) has elements \[1024, 1032\) \(strides Strides\(layer=\d+, block=64, head=8, token=4"),
        (F32, {"value_strides": {**STEPS, "block": -64}}, "`value_strides.block` is -64: expected at least 1"),
        (F32, {"value_strides": {**STEPS, "content": 2}}, "`value_strides.content` is 2: expected 1"),
        (F32, {"value_strides": {"block": 64}}, "`value_strides` is {'block': 64}: expected Strides"),
        (F32, {"value_offset": 1.5}, "`value_offset` is 1.5: expected an int"),
        (F32, {"value_offset": 1028}, r"values lie in elements \[1028, 2052\), the buffer has `size` 2048"),
        (F32, {"value_offset": -8, "offset": 1024}, r"values lie in elements \[-8, 1016\)"),
    ],
)  # fmt: skip
def test_wrong_places_of_values(entry, given, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.CacheLayout.from_strides(
            num_layers=1, num_blocks=16, block_size=8, entry=entry, size=2048,
            strides=STEPS, **{"value_offset": 1024, **given},
        )  # fmt: skip


def test_places_of_values_need_strides():
    with pytest.raises(ValueError, match=r"`value_offset` is 64 and .*: expected none of them without `strides`"):
        jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=8, entry=F32, value_offset=64)


def test_values_that_follow_their_keys_are_not_apart():
    steps = {"layer": 0, "block": 128, "token": 16, "head": 0}
    given = {}, {"value_offset": 8}, {"value_strides": {**steps, "layer": 99}}, {"value_offset": 4}
    first, *same, other = (
        jaxkv.CacheLayout.from_strides(
            num_layers=1, num_blocks=4, block_size=8, entry=jaxkv.KVEntry("f32", *sizes), size=512, strides=steps, **own
        )
        for own, sizes in zip(given, [(8,), (8,), (8,), (4, 12)], strict=True)
    )
    assert {first} == {*same}
    assert {first.fingerprint} == {layout.fingerprint for layout in same}
    assert (first.value_offset, other.value_offset) == (None, None), "nor are values of another width"


def test_quantised_values_right_behind_their_keys_have_planes():
    """Scales of an int8 entry follow its values; in planes, each array of values is followed by its own."""
    strides = {"layer": 0, "block": 8 * 24, "token": 24, "head": 0}
    sizes = dict(num_layers=1, num_blocks=4, block_size=8, entry=jaxkv.KVEntry("int8", 8), size=4 * 8 * 24 + 8)
    layout = jaxkv.CacheLayout.from_strides(**sizes, strides=strides, value_offset=12)
    assert layout.value_offset == 12
    assert [part.width for part in layout.pages.parts] == [12, 12]
    assert layout.is_layer_contiguous


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_kernels_for_gpus_support_keys_and_values_that_lie_apart(form):
    entry, steps = jaxkv.KVEntry(form, 128), {"layer": 0, "block": 4096, "token": 256, "head": 128}
    layout = jaxkv.CacheLayout.from_strides(
        num_layers=1, num_blocks=6, block_size=16, num_heads=2, entry=entry, size=2 * 6 * 4096, strides=steps,
        value_offset=6 * 4096,
    )  # fmt: skip
    cache = jaxkv.KVCache(jnp.zeros(layout.size, layout.dtype), layout)
    new, tables = jnp.zeros((1, 2, 128), jnp.bfloat16), jnp.zeros((1, 2), jnp.int32)
    for operation, args, options in (
        (jaxkv.write_kv, (cache, new, new, jnp.zeros(1, jnp.int32)), {}),
        (jaxkv.gather_kv, (cache, tables, jnp.zeros(2, jnp.int32)), {"total": 1, "dtype": "bfloat16"}),
        (jaxkv.decode_kv, (new, cache, tables, jnp.zeros(1, jnp.int32)), {"scale": 1.0}),
    ):
        options |= dict.fromkeys(("k_scale", "v_scale"), 1.0) if layout.entry.codec.scaled else {}
        with interpreting(True):
            reasons = jaxkv.explain(operation, *args, layer=0, **options).reasons
        assert reasons["mosaic_gpu"] == ()
        assert not any("lie apart" in reason for reason in reasons["triton"])


def test_the_table_and_the_memory_map_show_both_planes():
    _, layout = viewed("B2NHC")
    table = str(layout)
    assert re.search(
        r"keys +count.*\n(.*\n)*block +6 +128 +512\n(.*\n)*\nvalues +count.*\n(.*\n)*block +6 +128 +512\n", table
    )
    assert "offset       64 elements, 256 bytes (values of 32 bytes)" in table
    picture, metadata = layout._repr_svg_()
    assert "values" in picture
    assert "keys and values, one after the other" in metadata["alt"]
