"""Byte maps of the entry formats: consistent and complete."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.formats import FORMATS, Format, register
from jaxkv_kernels.formats.bits import corrected_quotient
from support import oracle

ENTRIES = [kind.typical(name) for kind in (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry) for name in kind.formats]
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=str)


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
    scales = [jnp.float32(1) if entry.codec.scaled else None] * len(values)
    row = jax.eval_shape(lambda: entry.encode(values, scales))
    assert row.dtype == entry.dtype
    assert row.shape == (2, entry.nbytes // entry.dtype.itemsize)
    for part in entry.fields():
        assert jax.eval_shape(part.read, row).shape == (2, part.count)


PUBLISHED = {
    "fp8_ds_mla": 656, "fp8_v4": 584, "fp8_v41": 528, "fp8_v41_split": 528, "nvfp4_ds_mla": 352, "mxfp4_ds_mla": 368,
    "fp4_v41": 288, "fp4_v41_split": 288, "indexer_fp8": 132, "indexer_mxfp4": 68,
}  # fmt: skip
PUBLISHED_PAGES = {
    "fp8_v4": 37_440, "fp8_v41": 33_792, "fp8_v41_split": 33_792, "fp4_v41": 18_432, "fp4_v41_split": 18_432,
    "indexer_fp8": 8_448, "indexer_mxfp4": 4_352,
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
        dtype = jnp.dtype("uint8") if name in ("e8m0", "e2m1x2") else jnp.dtype(name)
        if not jnp.issubdtype(dtype, jnp.floating):
            continue
        values = rows[..., part.offset : part.offset + part.nbytes].copy().view(dtype)
        values[np.isnan(values.astype(np.float32))] = np.nan
        rows[..., part.offset : part.offset + part.nbytes] = values.view(np.uint8)
    return rows


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.quantised], ids=str)
def test_encoders_write_the_bytes_of_an_independent_encoder(entry):
    values = [rows_of_every_kind(size) for size in entry.sizes]
    scales = (np.float32(0.037), np.float32(0.5)) if entry.codec.scaled else (None, None)
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
