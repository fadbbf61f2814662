"""Byte maps of the entry formats: consistent and complete."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.formats import FORMATS, Format, register
from jaxkv_kernels.formats.bits import corrected_quotient
from support import oracle, scenes
from support.cases import further

ENTRIES = [kind.typical(name) for kind in (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry) for name in kind.formats]
MIXED = [scenes.entry_of(jaxkv.KVEntry, label, 64, 32) for label in scenes.MIXED]
every_entry = pytest.mark.parametrize("entry", [*ENTRIES, *map(further, MIXED[:2])], ids=str)


@every_entry
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_parts_fill_a_page_without_overlap(entry, block_size):
    tokens, steps = (block_size, entry.regions(block_size)) if entry.split else (1, [entry.fields(block_size)])
    begin = 0
    for region in steps:
        end = begin
        for part in region:
            assert part.offset == end
            assert part.offset % part.itemsize == 0
            end += part.nbytes
            assert part.step is None or part.step % part.itemsize == 0
        assert not entry.split or {part.step for part in region} == {end - begin}
        begin += (end - begin) * tokens
    assert begin == entry.nbytes * tokens


@every_entry
def test_encoded_entries_have_the_parts_of_a_page_of_one_token(entry):
    values = [jnp.zeros((2, size)) for size in entry.sizes]
    scales = [jnp.float32(1) if scaled else None for scaled in entry.scaled]
    row = jax.eval_shape(lambda: entry.encode(values, scales))
    assert row.dtype == entry.dtype
    assert row.shape == (2, entry.nbytes // entry.dtype.itemsize)
    for part in entry.fields():
        assert jax.eval_shape(part.read, row).shape == (2, part.count)


PUBLISHED = {
    "fp8_ds_mla": 656, "fp8_v4": 584, "fp8_v41": 528, "fp8_v41_split": 528, "nvfp4_ds_mla": 352, "mxfp4_ds_mla": 368,
    "fp4_v41": 288, "fp4_v41_split": 288, "indexer_fp8": 132, "indexer_mxfp4": 68, "indexer_mxfp8": 132,
}  # fmt: skip
PUBLISHED_PAGES = {
    "fp8_v4": 37_440, "fp8_v41": 33_792, "fp8_v41_split": 33_792, "fp4_v41": 18_432, "fp4_v41_split": 18_432,
    "indexer_fp8": 8_448, "indexer_mxfp4": 4_352, "indexer_mxfp8": 8_448,
}  # fmt: skip
"""Of 64 tokens."""


def test_entries_and_pages_have_the_published_sizes():
    entries = {entry.format: entry for entry in ENTRIES}
    assert {name: entries[name].nbytes for name in PUBLISHED} == PUBLISHED
    assert {name: entries[name].page_nbytes(64) for name in PUBLISHED_PAGES} == PUBLISHED_PAGES
    assert jaxkv.MLAEntry("mxfp4_ds_mla", latent=512, rope=64).nbytes == 400


def rows_of_every_kind(size):
    """Float32 rows [n, size]: random, tiny, huge, denormal, zero, ties, and rows with infinity or NaN."""
    rng = np.random.default_rng(size)
    noise = rng.standard_normal((12, size)).astype(np.float32)
    halves = rng.integers(-24, 25, size) / 4.0
    middle = size // 2
    rows = [
        *noise[:4],
        noise[4] * 1e-5,
        noise[5] * 1e-30,
        noise[6] * 1e-40,
        noise[7] * 1e30,
        np.exp2(rng.integers(-60, 60, size)),
        noise[8] * np.exp2(rng.integers(-20, 20, size)),
        np.zeros(size),
        -np.zeros(size),
        np.full(size, np.finfo(np.float32).max),
        np.full(size, -1e-4),
        *(halves * 2.0**n for n in (-120, -9, 0, 9, 100)),
        *(halves * scale for scale in (1.125, 1.375, 0.15625)),
        *(np.where(np.arange(size) == middle, x, noise[9]) for x in (np.inf, -np.inf, np.nan, 448.0, 6.0, 2688.0)),
        np.where(np.arange(size) == middle, np.nextafter(np.float32(448), np.float32(500)), 1e-3),
        np.where(np.arange(size) == middle, np.nextafter(np.float32(6), np.float32(7)), noise[10]),
        *of_every_kind(rng, 8 * size).reshape(8, size),
    ]
    with np.errstate(invalid="ignore"):  # casting signalling NaNs
        return np.stack(rows).astype(np.float32)


def without_nan_signs(rows, entry):
    """Encoded rows whose NaNs of part dtypes are all the same: the sign of a NaN depends on the device."""
    rows = np.asarray(rows).copy().view(np.uint8)
    for part in entry.fields():
        name = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(part.dtype, part.dtype)
        dtype = jnp.dtype("uint8") if name in ("e8m0", "e2m1x2", "int4x2") else jnp.dtype(name)
        if not jnp.issubdtype(dtype, jnp.floating):
            continue
        values = rows[..., part.offset : part.offset + part.nbytes].copy().view(dtype)
        values[np.isnan(values.astype(np.float32))] = np.nan
        rows[..., part.offset : part.offset + part.nbytes] = values.view(np.uint8)
    return rows


OF_OTHER_SIZES = map(further, (jaxkv.IndexerEntry("indexer_mxfp4", 64), jaxkv.KVEntry("int4", 8, 256)))
QUANTISED = [entry for entry in ENTRIES if entry.quantised]


@pytest.mark.parametrize("entry", [*QUANTISED, *OF_OTHER_SIZES, *map(further, MIXED)], ids=str)
def test_encoders_write_the_bytes_of_an_independent_encoder(entry):
    values = [rows_of_every_kind(size) for size in entry.sizes]
    scales = [x if scaled else None for x, scaled in zip(np.float32((0.037, 0.5)), entry.scaled, strict=False)]
    found = jax.jit(lambda values: entry.encode(values, [x if x is None else jnp.float32(x) for x in scales]))(values)
    with np.errstate(all="ignore"):
        right = oracle.encode(entry, values, tuple(1.0 if x is None else x for x in scales))
    found, right = without_nan_signs(found, entry), without_nan_signs(right, entry)
    differ = np.argwhere(found != right)
    assert not len(differ), (len(differ), differ[:4], found[tuple(differ[0])], right[tuple(differ[0])])


@pytest.mark.parametrize("block_size", [64, 3])
@pytest.mark.parametrize(("name", "values", "scales"), [("fp8_v41", 512, 16), ("fp4_v41", 256, 32)])
def test_scales_of_v41_follow_each_token_or_all_tokens_of_a_page(name, values, scales, block_size):
    """Both byte maps have the same number of bytes per token, so that nothing else distinguishes their pages."""
    width = values + scales
    k = np.random.default_rng(0).standard_normal((2 * block_size, 512)).astype(np.float32)
    rows = oracle.encode(jaxkv.MLAEntry.typical(name), np.split(k, [448], axis=-1))
    expected = {name: np.zeros((2, block_size * width), np.uint8)}
    expected[f"{name}_split"] = np.zeros((2, -(-block_size * width // values) * values), np.uint8)
    for token, row in enumerate(rows):
        block, i = divmod(token, block_size)
        interleaved, split = (page[block] for page in expected.values())
        interleaved[i * width :][:width] = row
        split[i * values :][:values] = row[:values]
        split[block_size * values + i * scales :][:scales] = row[values:]
    slots = jnp.arange(2 * block_size, dtype=jnp.int32)
    for form, pages in expected.items():
        entry = jaxkv.MLAEntry.typical(form)
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=block_size, entry=entry)
        cache = jaxkv.write_mla(jaxkv.KVCache.zeros(layout), k[:, :448], k[:, 448:], slots, layer=0)
        np.testing.assert_array_equal(np.asarray(cache.buffer).reshape(2, -1), pages)
        found = jaxkv.gather_mla(
            cache, slots[:2][None], jnp.asarray([0, len(k)]), layer=0, total=len(k), dtype=jnp.float32
        )
        right = oracle.decode(entry, rows)
        np.testing.assert_array_equal(np.concatenate(found, axis=-1), np.concatenate(right, axis=-1))


def test_the_oracle_knows_every_format():
    assert oracle.FORMATS.keys() == FORMATS.keys()


def test_the_example_of_a_format_of_your_own():
    _, _, code = jaxkv.formats.__doc__.partition(":\n\n")
    try:
        exec(textwrap.dedent(code.partition("\n\nAll")[0]), scope := {})
    finally:
        del FORMATS["fixed8"]
    values = np.linspace(-4, 3.5, 64, dtype=np.float32)
    for found in (scope["k"], scope["v"]):
        np.testing.assert_array_equal(found, np.round(32 * values)[None, None] / 32)


@pytest.mark.parametrize(
    ("name", "nearest"), [("bf17", "bf16"), ("BF16", "bf16"), ("float32", "f32"), ("fp8_ds", "fp8_ds_mla"), (jnp, None)]
)
def test_the_nearest_name_is_suggested(name, nearest):
    with pytest.raises(ValueError, match=r"MLAEntry format .*: expected one of bf16, f16, f32, fp8, ") as error:
        jaxkv.MLAEntry(name)
    _, found, suggestion = str(error.value).partition("; did you mean ")
    assert suggestion == (f"{nearest!r}?" if found else "")
    assert bool(found) == (nearest is not None)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'fp8' is already registered"):
        register(FORMATS["fp8"])
    with pytest.raises(ValueError, match="expected a Format"):
        register("fp8")  # type: ignore[arg-type]
    assert all(isinstance(form, Format) for form in FORMATS.values())


def of_every_kind(rng, count):
    """Float32 numbers: any bits, denormal ones, normally distributed ones, zeros, infinities and NaN, shuffled."""
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    found = bits.view(np.float32).copy()
    found[0::5] = (bits[0::5] & 0x807FFFFF).view(np.float32)
    found[1::5] = rng.standard_normal(len(found[1::5]))
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 1e-45, 2.0**-126, 3.4028235e38], np.float32)
    found[2::25] = rng.choice(ends, len(found[2::25]))
    return rng.permutation(found)


@pytest.mark.parametrize("divisors", ["one for each value", "one for all values"])
def test_quotients_have_the_bits_of_a_correctly_rounded_division(divisors):
    rng = np.random.default_rng(0)
    values, divisor = of_every_kind(rng, 2**18).reshape(64, -1), of_every_kind(rng, 2**18).reshape(64, -1)
    if divisors == "one for all values":
        divisor = divisor[:, :1]
    found = np.asarray(jax.jit(corrected_quotient)(values, divisor))
    with np.errstate(all="ignore"):
        right = values / divisor
    small = np.abs(right) <= 2.0**-126
    assert (np.abs(found[small]) <= 2.0**-126).all()
    assert (np.signbit(found) == np.signbit(right))[~np.isnan(right)].all()
    np.testing.assert_array_equal(found[~small], right[~small])


def sglang_arrays(x):
    """Values [T, H, n] in SGLang's FP4 pool: bytes [T, H, n / 2], and exponents [T, H * n / 16]; float32 as there."""
    x = np.asarray(x, np.float32)
    tiles = x.reshape(len(x), -1, 16)
    exponent = np.ceil(np.log2(np.maximum(np.abs(tiles).max(axis=-1) / np.float32(6), np.float32(1e-10))))
    scaled = tiles / np.exp2(exponent)[..., None]
    bounds = np.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    code = (np.abs(scaled)[..., None] >= bounds).sum(axis=-1) + 8 * (scaled < 0)
    code = code.astype(np.uint8).reshape(x.shape)
    return (code[..., 1::2] << 4) + code[..., 0::2], (exponent + 127).astype(np.uint8)


def sixteen_bits(rng, *shape):
    """bfloat16 values of many magnitudes, multiples of 1/4, and zeros of both signs."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-40, 20, shape))
    values = np.where(rng.random(shape) < 0.3, rng.integers(-24, 25, shape) / 4, values)
    return jnp.asarray(np.where(rng.random(shape) < 0.1, -0.0, values), jnp.bfloat16)


def all_entries(cache, layer):
    """The bytes of all entries of a layer, by slot."""
    blocks, slots = cache.layout.num_blocks, cache.layout.num_slots
    tables = jnp.arange(blocks, dtype=jnp.int32)[None]
    return jaxkv.gather_entries(cache, tables, jnp.asarray([0, slots]), layer=layer, total=slots)


def test_latents_of_sglangs_fp4_pool():
    """A page is a slice of its values, then the same slice of its scales; rows and fields lead there and back."""
    entry = jaxkv.MLAEntry("kvfp4")
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=3, block_size=16, entry=entry)
    latent, rope = sixteen_bits(np.random.default_rng(0), 48, 512), sixteen_bits(np.random.default_rng(1), 48, 64)
    (latents, scales), (ropes, others) = sglang_arrays(latent[:, None]), sglang_arrays(rope[:, None])
    values, scales = np.concatenate([latents, ropes], axis=-1), np.concatenate([scales, others], axis=-1)
    slots = jnp.arange(48, dtype=jnp.int32)
    written = jaxkv.write_mla(jaxkv.KVCache.zeros(layout), latent, rope, slots, layer=1)
    pages = np.asarray(written.buffer).reshape(3, 2, -1)[:, 1]
    np.testing.assert_array_equal(pages[:, : 16 * 288], values.reshape(3, -1))
    np.testing.assert_array_equal(pages[:, 16 * 288 :], scales.reshape(3, -1))
    rows = entry.pack({"latent": values[:, 0, :256], "rope": values[:, 0, 256:], "scales": scales})
    stored = jaxkv.write_entries(jaxkv.KVCache.zeros(layout), rows, slots, layer=1)
    np.testing.assert_array_equal(stored.buffer, written.buffer)
    found = entry.unpack(all_entries(stored, 1))
    np.testing.assert_array_equal(jnp.concatenate([found["latent"], found["rope"]], axis=-1), values[:, 0])
    np.testing.assert_array_equal(found["scales"].view(jnp.uint8), scales)


@pytest.mark.ci
def test_keys_and_values_of_sglangs_fp4_pool():
    entry = jaxkv.KVEntry("kvfp4", 64, 32)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=3, block_size=16, entry=entry, num_heads=2)
    k, v = sixteen_bits(np.random.default_rng(0), 48, 2, 64), sixteen_bits(np.random.default_rng(1), 48, 2, 32)
    (keys, key_scales), (values, value_scales) = sglang_arrays(k), sglang_arrays(v)
    slots = jnp.arange(48, dtype=jnp.int32)
    written = jaxkv.write_kv(jaxkv.KVCache.zeros(layout), k, v, slots, layer=1)
    arrays = {"K": keys, "V": values}
    arrays |= {"K scales": key_scales.reshape(48, 2, 4), "V scales": value_scales.reshape(48, 2, 2)}
    stored = jaxkv.write_entries(jaxkv.KVCache.zeros(layout), entry.pack(arrays), slots, layer=1)
    np.testing.assert_array_equal(stored.buffer, written.buffer)
    found = entry.unpack(all_entries(written, 1))
    assert found.keys() == arrays.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array.view(jnp.uint8), arrays[name])


@pytest.mark.ci
@every_entry
def test_fields_lead_there_and_back(entry):
    rows = np.random.default_rng(0).integers(0, 256, (3, 2, entry.nbytes), np.uint8)
    padding = [field for field in entry.fields() if field.name == "padding"]
    for field in padding:
        rows[..., field.offset : field.offset + field.nbytes] = 0
    fields = entry.unpack(rows)
    assert all(fields[field.name].shape == (3, 2, field.count) for field in entry.fields() if field not in padding)
    np.testing.assert_array_equal(entry.pack(fields), rows)
    np.testing.assert_array_equal(entry.pack({name: x.view(jnp.uint8) for name, x in fields.items()}), rows)


def test_fields_that_do_not_fit_are_rejected():
    entry, right = jaxkv.KVEntry("int8", 16, 8), {"K": 16, "V": 8, "K scales": 4, "V scales": 4}
    fields = {name: np.zeros((5, count), np.uint8) for name, count in right.items()}
    assert entry.pack(fields).shape == (5, entry.nbytes)
    with pytest.raises(ValueError, match="`stored` has K, V: expected K, V, K scales, V scales"):
        entry.pack({"K": fields["K"], "V": fields["V"]})
    with pytest.raises(ValueError, match=r"`stored\['V'\]` is uint8\[5, 16\]: expected 8 int8 \(8 bytes\)"):
        entry.pack({**fields, "V": fields["K"]})
    with pytest.raises(ValueError, match=r"`stored\['V scales'\]` is float32\[1, 1\]: .* \[5\] in the others"):
        entry.pack({**fields, "V scales": np.zeros((1, 1), np.float32)})
    for wrong in (np.zeros((5, 31), np.uint8), np.zeros((5, 32), np.int8)):
        with pytest.raises(ValueError, match=r"expected uint8 \[\.\.\., 32\]"):
            entry.unpack(wrong)


@pytest.mark.ci
def test_int4_rounds_rotated_values_to_15_steps():
    """Also those of heads with one large value, which rounds all others to 0 if they are not rotated."""
    entry, x = jaxkv.KVEntry("int4", 128), np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    spiked = np.where(np.arange(128) == 5, 40, x).astype(np.float32)
    found = jax.jit(lambda *values: entry.decode(entry.encode(values), jnp.float32))(x, spiked)
    orthonormal = oracle.hadamard(128) / 128**0.5
    np.testing.assert_allclose(orthonormal @ orthonormal, np.eye(128), atol=1e-12)
    for values, stored in zip((x, spiked), found, strict=True):
        step = np.abs(values @ orthonormal).max(axis=-1, keepdims=True) / 7
        assert (np.abs((stored - values) @ orthonormal) <= step / 2 * (1 + 1e-5)).all()
    rounded = np.rint(spiked / (40 / 7)) * (40 / 7)
    assert (np.linalg.norm(found[1] - spiked, axis=-1) < np.linalg.norm(rounded - spiked, axis=-1)).all()


@pytest.mark.ci
def test_indexer_keys_with_four_different_scales_are_read():
    entry, rng = jaxkv.IndexerEntry("indexer_mxfp8"), np.random.default_rng(0)
    values = jnp.asarray(rng.standard_normal((7, 128)), jnp.float8_e4m3fn)
    scales = rng.integers(117, 130, (7, 4)).astype(np.uint8)
    rows = entry.pack({"values": values, "scales": scales})
    right = np.float64(np.asarray(values, np.float32)) * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=-1)
    np.testing.assert_array_equal(entry.decode(rows, jnp.float32)[0], right)
    key, scale = entry.key_and_scale(rows, jnp.bfloat16)
    np.testing.assert_array_equal(key.astype(jnp.float32) * scale, right)


def vllm_page(k, v, scale):
    """Pages of vLLM's NVFP4 cache: data and scales of keys, then of values, each [H, N, ...]; scales are permuted."""
    regions = []
    for x in (k, v):  # [B, N, H, D]
        blocks, tokens, heads, size = x.shape
        entry = oracle.encode(jaxkv.KVEntry("nvfp4", size, size), [x, x], (scale, scale))
        data, scales = entry[..., : size // 2], entry[..., size : size + size // 16]
        place = np.zeros((blocks, heads, tokens, size // 16), np.uint8)
        part = size // 64
        for t in range(tokens):
            for s in range(size // 16):
                place[:, :, t // 4 * 4 + s // part, s % part * 4 + t % 4] = scales[:, t, :, s]
        regions += [data.swapaxes(1, 2).reshape(blocks, -1), place.reshape(blocks, -1)]
    return np.concatenate(regions, axis=-1)


@pytest.mark.ci
def test_nvfp4_pages_whose_scales_are_permuted_across_tokens():
    entry, rng = jaxkv.KVEntry("nvfp4", 128), np.random.default_rng(0)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=3, block_size=8, entry=entry, num_heads=2)
    k, v = (rng.standard_normal((3, 8, 2, 128)).astype(np.float32) for _ in range(2))
    slots, scale = jnp.arange(24, dtype=jnp.int32), np.float32(0.25)
    new = (jnp.asarray(x.reshape(24, 2, 128)) for x in (k, v))
    written = jaxkv.write_kv(jaxkv.KVCache.zeros(layout), *new, slots, layer=1, k_scale=scale, v_scale=scale)
    fields, first = {}, 0
    page = vllm_page(k, v, scale)
    for part in "KV":
        for name, width in ((part, 64), (f"{part} scales", 8)):
            region = jnp.asarray(page[:, first : first + 16 * width].reshape(3, 2, 8, width))
            first += 16 * width
            if name != part:
                ordered = jaxkv.swizzle_scales(region, inverse=True)
                np.testing.assert_array_equal(jaxkv.swizzle_scales(ordered), region)
                region = ordered
            fields[name] = region.swapaxes(1, 2).reshape(24, 2, width)
    assert first == page.shape[1]
    stored = jaxkv.write_entries(jaxkv.KVCache.zeros(layout), entry.pack(fields), slots, layer=1)
    np.testing.assert_array_equal(stored.buffer, written.buffer)


@pytest.mark.ci
def test_records_of_512_plain_bytes():
    """448 + 64 values that are e4m3 already are the record, and are read as they are."""
    entry, rng = jaxkv.MLAEntry("fp8", latent=448, rope=64), np.random.default_rng(0)
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=4, entry=entry)
    records = rng.integers(0, 256, (8, 512), np.uint8)
    latent, rope = jnp.split(jnp.asarray(records).view(jnp.float8_e4m3fn), [448], axis=-1)
    cache = jaxkv.write_mla(jaxkv.KVCache.zeros(layout), latent, rope, jnp.arange(8), layer=0)
    np.testing.assert_array_equal(np.asarray(cache.buffer).reshape(8, 512), records)
    np.testing.assert_array_equal(all_entries(cache, 0), records)
