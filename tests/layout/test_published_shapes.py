"""The shapes in which other libraries allocate caches, each viewed in place and used by every operation.

A shape is written as its axes, outermost first: L layers, B blocks, N tokens of a block, H heads, C content, and 2 for
keys and values.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import oracle
from support.compare import assert_close, assert_same_bits

COUNTS = {"L": 3, "B": 6, "N": 4, "H": 2, "C": 8, "2": 2}
NAMES = {"L": "layer", "B": "block", "N": "token", "H": "head"}

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
}
LATENTS = {
    "BNC": "vLLM, FlashMLA, FlashInfer, a layer",
    "BLNC": "vLLM, cross-layer, stride order (1, 0, 2, 3); SGLang, host memory, page_first_direct",
    "LBNC": "SGLang, layer_first",
    "BNLC": "SGLang, host memory, page_first",
}
PADDED = "tpu-inference: content padded to a multiple of 128, 576 of 640"


def viewed(axes, entry, content=None):
    """A random array of that shape, its layout, and the array as [L, B, N, H, 2, C] (2 only where there are keys)."""
    latents = isinstance(entry, jaxkv.MLAEntry)
    counts = {**COUNTS, "C": content or (sum(entry.sizes) if latents else COUNTS["C"])}
    array = np.random.default_rng(0).standard_normal([counts[a] for a in axes]).astype(np.float32)
    steps = {a: array.strides[i] // 4 for i, a in enumerate(axes[:-1])}
    strides = {NAMES[a]: step for a, step in steps.items() if a != "2"}
    layout = jaxkv.CacheLayout.from_strides(
        num_layers=counts["L"] if "L" in axes else 1, num_blocks=counts["B"], block_size=counts["N"],
        num_heads=counts["H"] if "H" in axes else 1, entry=entry, size=array.size,
        strides={"layer": 0, "head": 0, "block": 0, "token": 0, **strides}, value_offset=steps.get("2"),
    )  # fmt: skip
    wanted = [a for a in ("L", "B", "N", "H", "C" if latents else "2", "C") if a in axes]
    wanted = list(dict.fromkeys(wanted))
    return array, layout, wanted


def normal(array, axes, wanted):
    """`array` of `axes`, as [L, B, N, H, (2,) C] with axes of length 1 where it has none."""
    moved = np.transpose(array, [axes.index(a) for a in wanted])
    for i, a in enumerate("LBNH"):
        if a not in wanted:
            moved = np.expand_dims(moved, i)
    return moved


def cache_of(array, layout):
    return jaxkv.KVCache(jnp.asarray(array.reshape(-1)), layout)


TABLES, LENGTHS = np.asarray([[3, 1, 5], [0, 4, 2]], np.int32), np.asarray([10, 5], np.int32)


def entries_of(array, layer):
    """The entries [S, H, ...] of each request, from an array [L, B, N, H, ...]."""
    for table, length in zip(TABLES, LENGTHS, strict=True):
        yield array[layer][table].reshape(-1, *array.shape[3:])[:length]


@pytest.mark.parametrize("axes", KEYS_AND_VALUES, ids=lambda axes: axes)
def test_keys_and_values(axes):
    entry = jaxkv.KVEntry("f32", head_dim=8)
    array, layout, wanted = viewed(axes, entry)
    cache, held = cache_of(array, layout), normal(array, axes, wanted)
    layer, (layers, _, _, heads, _, _) = layout.num_layers - 1, held.shape
    rng = np.random.default_rng(1)

    new = rng.standard_normal((2, 3, heads, 8)).astype(np.float32)
    written = jaxkv.write_kv(cache, *map(jnp.asarray, new), jnp.asarray([13, -1, 2]), layer=layer)
    expected = held.copy()
    expected[layer, 3, 1], expected[layer, 0, 2] = new[:, 0].swapaxes(0, 1), new[:, 2].swapaxes(0, 1)
    found = normal(np.asarray(written.buffer).reshape(array.shape), axes, wanted)
    assert_same_bits(found, expected)

    sums = jnp.asarray(np.r_[0, np.cumsum(LENGTHS)])
    gathered = jaxkv.gather_kv(cache, jnp.asarray(TABLES), sums, total=15, layer=layer, dtype="float32")
    tokens = np.concatenate([*entries_of(held, layer)])
    for part, values in enumerate(gathered):
        assert_same_bits(values, tokens[:, :, part])

    q = rng.standard_normal((2, 1, 2 * heads, 8)).astype(np.float32)
    plan = jaxkv.plan_decode(cache, jnp.asarray(TABLES), jnp.asarray(LENGTHS), num_heads=2 * heads, dtype="float32")
    out = jaxkv.decode_kv(
        jnp.asarray(q), cache, jnp.asarray(TABLES), jnp.asarray(LENGTHS), layer=layer, scale=0.3, plan=plan
    )
    for request, tokens in enumerate(entries_of(held, layer)):
        right, _ = oracle.attention(q[request], tokens[:, :, 0], tokens[:, :, 1], 0.3)
        assert_close(out[request], right, roundings=64, magnitude=1)
    check_blocks(cache, array, axes, wanted, layers)


def check_blocks(cache, array, axes, wanted, layers):
    """Copies blocks, exports them, converts them to the default layout and back."""
    layout, held = cache.layout, normal(array, axes, wanted)
    copied = jaxkv.copy_blocks(cache, jnp.asarray([1, 4]), jnp.asarray([0, 5]))
    expected = held.copy()
    expected[:, 0], expected[:, 5] = held[:, 1], held[:, 4]
    assert_same_bits(normal(np.asarray(copied.buffer).reshape(array.shape), axes, wanted), expected)

    rows = jaxkv.read_blocks(cache, jnp.asarray([4, 2]))
    assert rows.shape == (2, layout.block_nbytes // 4)
    back = jaxkv.write_blocks(jaxkv.KVCache(jnp.zeros_like(cache.buffer), layout), jnp.asarray([4, 2]), rows)
    expected = np.zeros_like(held)
    expected[:, [4, 2]] = held[:, [4, 2]]
    assert_same_bits(normal(np.asarray(back.buffer).reshape(array.shape), axes, wanted), expected)

    plain = jaxkv.CacheLayout(
        num_layers=layers, num_blocks=6, block_size=4, num_heads=layout.num_heads, entry=layout.entry
    )
    converted = jaxkv.convert_blocks(rows, layout, plain)
    assert_same_bits(np.asarray(converted), held[:, [4, 2]].swapaxes(0, 1).reshape(2, -1))
    assert_same_bits(jaxkv.convert_blocks(converted, plain, layout), rows)


@pytest.mark.parametrize(("axes", "content"), [*((axes, None) for axes in LATENTS), ("BNC", 640)])
def test_latents(axes, content):
    entry = jaxkv.MLAEntry("f32", latent=512, rope=64) if content else jaxkv.MLAEntry("f32", latent=32, rope=8)
    array, layout, wanted = viewed(axes, entry, content)
    cache, held = cache_of(array, layout), normal(array, axes, wanted)
    held, layer, (latent, rope) = held[..., : latent_width(entry)], layout.num_layers - 1, entry.sizes
    rng = np.random.default_rng(1)
    new = [rng.standard_normal((3, n)).astype(np.float32) for n in entry.sizes]
    written = jaxkv.write_mla(cache, *map(jnp.asarray, new), jnp.asarray([13, -1, 2]), layer=layer)
    expected = normal(array.copy(), axes, wanted)
    for token, (block, place) in {0: (3, 1), 2: (0, 2)}.items():
        expected[layer, block, place, 0, : latent + rope] = np.concatenate([part[token] for part in new])
    assert_same_bits(normal(np.asarray(written.buffer).reshape(array.shape), axes, wanted), expected)

    q = [rng.standard_normal((2, 1, 3, n)).astype(np.float32) for n in entry.sizes]
    out = jaxkv.decode_mla(
        *map(jnp.asarray, q), cache, jnp.asarray(TABLES), jnp.asarray(LENGTHS), layer=layer, scale=0.1
    )
    for request, tokens in enumerate(entries_of(held, layer)):
        right, _ = oracle.attention(np.concatenate([x[request] for x in q], -1), tokens, tokens[..., :latent], 0.1)
        assert_close(out[request], right, roundings=64, magnitude=1)
    if content is None:
        check_blocks(cache, array, axes, wanted, layout.num_layers)


def latent_width(entry):
    return sum(entry.sizes)


F32 = jaxkv.KVEntry("f32", 8)
STEPS = {"layer": 0, "block": 64, "token": 8, "head": 0}


@pytest.mark.parametrize(
    ("entry", "given", "message"),
    [
        (jaxkv.MLAEntry("f32", 4, 4), {}, "MLAEntry.* is stored as a whole: only the keys and values"),
        (jaxkv.KVEntry("int8", 6, 2), {"dtype": "uint8"}, r"K scales would begin at byte 6, expected a multiple of 4"),
        (jaxkv.KVEntry("bf16", 3, 5), {"dtype": "float32"}, r"`dtype` is float32 .* does divide the 6 and 10 bytes"),
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
    with pytest.raises(ValueError, match="`value_offset` is 64: expected neither without `strides`"):
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
def test_mosaic_gpu_attends_to_keys_and_values_that_lie_apart_if_they_are_not_quantised(form):
    _, layout, _ = viewed("2BNHC", jaxkv.KVEntry(form, 128), content=128)
    cache = jaxkv.KVCache(jnp.zeros(layout.size, layout.dtype), layout)
    new, tables = jnp.zeros((1, 2, 128), jnp.bfloat16), jnp.zeros((1, 2), jnp.int32)
    for operation, args, options in (
        (jaxkv.write_kv, (cache, new, new, jnp.zeros(1, jnp.int32)), {}),
        (jaxkv.gather_kv, (cache, tables, jnp.zeros(2, jnp.int32)), {"total": 1, "dtype": "bfloat16"}),
        (jaxkv.decode_kv, (new, cache, tables, jnp.zeros(1, jnp.int32)), {"scale": 1.0}),
    ):
        options |= dict.fromkeys(("k_scale", "v_scale"), 1.0) if layout.entry.codec.scaled else {}
        reasons = jaxkv.explain(operation, *args, layer=0, **options).reasons
        rejected = form == "fp8" and operation is jaxkv.decode_kv
        assert any("lie apart: supports values" in reason for reason in reasons["mosaic_gpu"]) == rejected
        assert not any("lie apart" in reason for reason in reasons["triton"])


def test_the_table_and_the_memory_map_show_both_planes():
    _, layout, _ = viewed("B2NHC", jaxkv.KVEntry("f32", 8))
    table = str(layout)
    assert re.search(
        r"keys +count.*\n(.*\n)*block +6 +128 +512\n(.*\n)*\nvalues +count.*\n(.*\n)*block +6 +128 +512\n", table
    )
    assert "offset       64 elements, 256 bytes (values of 32 bytes)" in table
    assert "values" in layout._repr_svg_()
