"""Writes: the entries of an independent encoder where they belong, and every other byte as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing import assert_caches_equal
from jaxkv.testing.buffers import to_bytes, to_cache
from support import oracle, scenes
from support.arrays import on_device
from support.cases import apart, further, on_layouts
from support.compare import assert_close, assert_same_bits
from support.suites.base import Suite, dtype_of, formats, layout_of


def new_tokens(entry, num_heads, count, seed=3):
    """Parts [T, H, n_i] as the dtype in which a model has them."""
    rng = np.random.default_rng(seed)
    return [on_device(rng.standard_normal((count, num_heads, n)), dtype_of(entry)) for n in entry.sizes]


def scales_of(entry, num_heads):
    """Keyword arguments, and the scales as the oracle takes them."""
    if not any(entry.scaled):
        return {}, (1.0, 1.0)
    if isinstance(entry, jaxkv.MLAEntry):
        return {"kv_scale": 0.04}, (0.04, 0.04)
    heads = np.linspace(0.01, 0.05, num_heads, dtype=np.float32)
    k_scaled, v_scaled = entry.scaled
    arguments = {"k_scale": on_device(heads)} if k_scaled else {}
    arguments |= {"v_scale": 0.02} if v_scaled else {}
    return arguments, (heads[:, None] if k_scaled else 1.0, 0.02 if v_scaled else 1.0)


class WriteChecks(Suite):
    """Checks of `write_mla`, `write_kv` and `write_indexer_k`."""

    def write(self, cache, parts, slots, layer, scales):
        """The operation for the cache's entry."""
        if isinstance(cache.layout.entry, jaxkv.MLAEntry):
            return self.run(jaxkv.write_mla, cache, parts[0][:, 0], parts[1][:, 0], slots, layer=layer, **scales)
        if isinstance(cache.layout.entry, jaxkv.KVEntry):
            return self.run(jaxkv.write_kv, cache, *parts, slots, layer=layer, **scales)
        return self.run(jaxkv.write_indexer_k, cache, parts[0][:, 0], slots, layer=layer)

    def check(self, layout, layer, slots, kind):
        """Writes tokens at `slots` of `layer` into garbage, and compares the whole buffer."""
        entry, heads = layout.entry, layout.num_heads
        parts = new_tokens(entry, heads, len(slots))
        keywords, scales = scales_of(entry, heads)
        before = scenes.garbage(layout, np.random.default_rng(5), kind)
        cache = self.write(to_cache(layout, before), parts, on_device(slots, jnp.int32), layer, keywords)
        encoded = oracle.encode(entry, parts, scales)
        expected = before.copy()
        entries = scenes.fetch(layout, expected, layer)
        for token, slot in enumerate(slots):
            if 0 <= slot < layout.num_slots:
                entries[slot // layout.block_size, :, slot % layout.block_size] = encoded[token]
        scenes.place(layout, expected, layer, entries)
        assert (expected != before).any()
        assert_caches_equal(cache, to_cache(layout, expected), padding=True)

    def check_slice(self, layout):
        """Writes to a cache whose buffer is a part of another array, as those of a model's layers may be."""
        entry, rng = layout.entry, np.random.default_rng(6)
        parts, slots = new_tokens(entry, layout.num_heads, 12), on_device(rng.permutation(layout.num_slots)[:12])
        whole = on_device(rng.uniform(0, 100, (3, layout.size)), layout.dtype)

        @jax.jit
        def written(whole):
            return self.write(jaxkv.KVCache(whole[1], layout), parts, slots, 1, {}).buffer, whole

        found, after = written(whole)
        right = self.write(jaxkv.KVCache(whole[1], layout), parts, slots, 1, {})
        assert_same_bits(found, right.buffer)
        assert_same_bits(after, whole)

    def slots(self, layout, rng, count=12):
        """Distinct slots among skipped ones: negative, one past the end, far past it."""
        good = rng.permutation(layout.num_slots)[:count]
        bad = [-1, -(2**31), layout.num_slots, 2**31 - 1]
        return [int(slot) for slot in rng.permutation([*good, *bad])]


class WriteEntriesChecks(WriteChecks):
    """Checks of `write_entries`, and of values that are stored as they are."""

    def check_bytes(self, entry, name):
        """Bytes that are no encoder's: random ones."""
        layout, rng = layout_of(name, entry, num_heads=1 if entry.one_head else 2), np.random.default_rng(0)
        slots = self.slots(layout, rng)
        rows = rng.integers(0, 256, (len(slots), layout.num_heads, entry.nbytes), np.uint8)
        before = scenes.garbage(layout, rng, "random")
        given = on_device(rows[:, 0] if entry.one_head else rows)
        cache = self.run(jaxkv.write_entries, to_cache(layout, before), given, on_device(slots, jnp.int32), layer=1)
        expected = before.copy()
        entries = scenes.fetch(layout, expected, 1)
        for row, slot in zip(rows, slots, strict=True):
            if 0 <= slot < layout.num_slots:
                entries[slot // layout.block_size, :, slot % layout.block_size] = row
        scenes.place(layout, expected, 1, entries)
        assert_caches_equal(cache, to_cache(layout, expected), padding=True)

    def check_quantised(self, entry, name):
        """All values of a float8 dtype, NaN included."""
        layout, rng = layout_of(name, entry, num_heads=1 if entry.one_head else 2), np.random.default_rng(0)
        slots = jnp.asarray(self.slots(layout, rng), jnp.int32)
        rows = rng.integers(0, 256, (slots.size, layout.num_heads, entry.nbytes), np.uint8)
        parts = [on_device(part) for part in np.split(rows.view(entry.values_dtype), entry.sizes[:1], axis=-1)]
        before = scenes.garbage(layout, rng, "random")
        found = self.write(to_cache(layout, before), parts, slots, 1, {})
        right = self.run(
            jaxkv.write_entries, to_cache(layout, before), on_device(rows[:, 0] if entry.one_head else rows), slots,
            layer=1,
        )  # fmt: skip
        assert_caches_equal(found, right, padding=True)


class WriteEntries(WriteEntriesChecks):
    """The same on every layout."""

    @on_layouts([*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.MIXED_ENTRIES, *scenes.INDEXER_ENTRIES], few=True)
    def test_stores_the_bytes(self, entry, name):
        self.check_bytes(entry, name)

    @apart
    def test_bytes_of_keys_and_values_that_lie_apart(self, entry, name):
        self.check_bytes(entry, name)

    @formats([entry for entry in (*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES) if entry.format in ("fp8", "fp8_e5m2")])
    def test_quantised_values_are_stored_as_they_are(self, entry):
        self.check_quantised(entry, "LBNHC")


def rotary_part(entry):
    """Which part of an entry a write can rotate."""
    return 0 if isinstance(entry, jaxkv.KVEntry) else 1


class RotatedChecks(WriteChecks):
    """Checks of `write_mla` and `write_kv` with `cos_sin`."""

    def rotated(self, entry, heads, count, interleaved, cos_sin):
        """New tokens, bfloat16 in value, and the same with keys or rotary parts rotated in float64."""
        new, keys = new_tokens(type(entry)("bf16", *entry.sizes), heads, count), rotary_part(entry)
        wide, half = np.asarray(new[keys], np.float64), entry.sizes[keys] // 2
        index = np.arange(2 * half).reshape((half, 2) if interleaved else (2, half))
        first, second = index.T if interleaved else index
        (a, b), (cos, sin) = (wide[..., first], wide[..., second]), np.split(np.float64(cos_sin)[:, None], 2, axis=-1)
        found = np.empty_like(wide)
        found[..., first], found[..., second] = a * cos - b * sin, b * cos + a * sin
        new = [part.astype(dtype_of(entry)) for part in new]
        return new, [*new[:keys], found, *new[keys + 1 :]]

    def check_rotated(self, entry, name, interleaved, heads=1):
        """Multiples of 1/8 instead of cosines and sines: products and sums are exact, and so are bytes."""
        layout, rng = layout_of(name, entry, num_heads=heads), np.random.default_rng(0)
        slots = self.slots(layout, rng)
        cos_sin = rng.integers(-8, 9, (len(slots), entry.sizes[rotary_part(entry)])).astype(np.float32) / 8
        new, expected = self.rotated(entry, heads, len(slots), interleaved, cos_sin)
        scales, _ = scales_of(entry, heads)
        before, slots = scenes.garbage(layout, rng, "random"), on_device(slots, jnp.int32)
        rotation = {"cos_sin": on_device(cos_sin), "interleaved": interleaved}
        found = self.write(to_cache(layout, before), new, slots, 1, {**scales, **rotation})
        expected = [on_device(part, dtype_of(entry)) for part in expected]
        right = self.write(to_cache(layout, before), expected, slots, 1, scales)
        assert_caches_equal(found, right, padding=True)
        assert (to_bytes(found) != before).any()


class RotatedWrites(RotatedChecks):
    """The same on every layout."""

    @on_layouts(scenes.MLA_ENTRIES[4:5])
    def test_interleaved_on_every_layout(self, entry, name):
        self.check_rotated(entry, name, True)

    @formats(scenes.MLA_ENTRIES)
    def test_halves_in_every_format(self, entry):
        self.check_rotated(entry, "BLNHC", False)

    @on_layouts(scenes.KV_ENTRIES[:1])
    def test_keys_of_halves_on_every_layout(self, entry, name):
        self.check_rotated(entry, name, False, heads=2)

    @formats(scenes.KV_ENTRIES)
    def test_interleaved_keys_in_every_format(self, entry):
        self.check_rotated(entry, "BLNHC", True, heads=2)

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_rotates_by_angles(self, dtype, interleaved):
        entry, slots = jaxkv.MLAEntry("f32", 64, 64), jnp.arange(40, dtype=jnp.int32)
        angles = np.random.default_rng(0).uniform(-1e4, 1e4, (40, 32))
        cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
        (latent, rope), (_, right) = (
            [part[:, 0] for part in parts] for parts in self.rotated(entry, 1, 40, interleaved, cos_sin)
        )
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=64, entry=entry)
        cache = self.run(
            jaxkv.write_mla, jaxkv.KVCache.zeros(layout), latent.astype(dtype), rope.astype(dtype), slots,
            layer=0, cos_sin=on_device(cos_sin), interleaved=interleaved,
        )  # fmt: skip
        stored = jnp.asarray(scenes.fetch(layout, to_bytes(cache), 0)[0, 0, :40].view(np.float32)[:, 64:])
        assert_close(stored.astype(dtype), right, roundings=2, magnitude=2)
        assert_same_bits(stored, stored.astype(dtype).astype(jnp.float32))  # rounded to the dtype of the keys


OF_TILES = [
    entry
    for entry in (*scenes.MLA_ENTRIES, *scenes.INDEXER_ENTRIES)
    if any("scales" in field.name for field in entry.fields())
]
"""Entries that store a scale for each tile of values."""

formats_with_scales = pytest.mark.parametrize(
    "entry",
    [entry if entry.format in ("fp8_ds_mla", "indexer_fp8") else further(entry) for entry in OF_TILES],
    ids=[entry.format for entry in OF_TILES],
)


class Writes(WriteChecks):
    """The same on every layout."""

    @on_layouts([*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.MIXED_ENTRIES, *scenes.INDEXER_ENTRIES])
    def test_stores_the_encoders_bytes_and_touches_nothing_else(self, entry, name):
        layout = layout_of(name, entry, num_heads=1 if entry.one_head else 2)
        self.check(layout, 1, self.slots(layout, np.random.default_rng(0)), "nan")

    @apart
    def test_keys_and_values_that_lie_apart(self, entry, name):
        layout = layout_of(name, entry, num_heads=2)
        self.check(layout, 1, self.slots(layout, np.random.default_rng(0)), "random")

    @formats([scenes.MLA_ENTRIES[0], jaxkv.KVEntry("int8", 128)])
    def test_the_buffer_may_be_a_slice_of_another_array(self, entry):
        self.check_slice(layout_of("BLNHC", entry))

    def test_latents_without_a_rotary_part(self):
        layout = layout_of("BLNHC", jaxkv.MLAEntry("bf16", latent=128, rope=0))
        self.check(layout, 1, self.slots(layout, np.random.default_rng(0)), "nan")

    @formats([*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.INDEXER_ENTRIES])
    def test_neighbours_of_random_bytes_survive_in_every_layer(self, entry):
        layout = layout_of("BLNHC", entry, num_heads=1 if entry.one_head else 2)
        for layer in range(layout.num_layers):
            self.check(layout, layer, self.slots(layout, np.random.default_rng(layer)), "random")

    @pytest.mark.parametrize("block_size", [1, 3, 16, 61])
    @formats([scenes.MLA_ENTRIES[0], scenes.INDEXER_ENTRY])
    def test_odd_block_sizes(self, entry, block_size):
        layout = layout_of("BLNHC padded", entry, block_size=block_size)
        self.check(layout, 2, self.slots(layout, np.random.default_rng(0)), "nan")

    @formats_with_scales
    def test_quantised_bytes_of_extreme_rows(self, entry):
        layout = layout_of("BLNHC", entry)
        n = entry.sizes[0]
        rng = np.random.default_rng(0)
        noise = rng.standard_normal((8, n)).astype(np.float32)
        rows = np.stack(
            [
                np.zeros(n),
                noise[0] * 1e-30,
                noise[1] * 1e-40,  # denormal
                noise[2] * 1e30,
                np.full(n, np.finfo(np.float32).max),
                np.where(np.arange(n) == 5, 448.0, 1e-3),
                np.where(np.arange(n) == 5, np.nextafter(np.float32(448), np.float32(500)), 1e-3),
                noise[3] * np.exp2(rng.integers(-20, 20, n)),
                np.full(n, -1e-4),
            ]
        ).astype(np.float32)
        parts = [on_device(rows[:, None])] + [jnp.zeros((len(rows), 1, size)) for size in entry.sizes[1:]]
        cache = self.write(jaxkv.KVCache.zeros(layout), parts, jnp.arange(len(rows)), 0, {})
        entries = scenes.fetch(layout, to_bytes(cache), 0)[0, 0, : len(rows)]
        assert_same_bits(entries, oracle.encode(entry, [part[:, 0] for part in parts]))

    @formats_with_scales
    def test_a_nan_stays_visible(self, entry):
        layout = layout_of("BLNHC", entry)
        parts = [jnp.ones((1, 1, size)) for size in entry.sizes]
        parts[0] = parts[0].at[0, 0, 3].set(jnp.nan)
        cache = self.write(jaxkv.KVCache.zeros(layout), parts, on_device([7]), 0, {})
        stored = oracle.decode(entry, scenes.fetch(layout, to_bytes(cache), 0)[0, 0, 7])[0]
        assert np.isnan(stored[3])

    def test_fp8_saturates(self):
        layout = layout_of("BLNHC", scenes.MLA_ENTRIES[3])
        parts = [jnp.full((1, 1, size), -1e6, jnp.float32) for size in layout.entry.sizes]
        cache = self.write(jaxkv.KVCache.zeros(layout), parts, on_device([0]), 0, {"kv_scale": 0.5})
        stored = oracle.decode(layout.entry, scenes.fetch(layout, to_bytes(cache), 0)[0, 0, 0], (0.5, 0.5))
        assert (stored[0] == -224).all()

    def test_fp8_is_a_quotient_of_one_rounding(self):
        layout = layout_of("BLNHC", scenes.KV_ENTRIES[3], num_heads=3)
        self.check(layout, 1, self.slots(layout, np.random.default_rng(0), 300), "nan")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("scale", [0.04, 1.0, -0.3, 3e30, 3.4e38, 1.2e-38, 3e-39, 1e-45, 0.0, np.inf, np.nan])
    def test_fp8_divides_every_value_with_one_rounding(self, dtype, scale):
        """All values of 16 bits, or as many of 32 bits, half of which are near the ties of e4m3."""
        entry, scale = jaxkv.KVEntry("fp8", head_dim=64), np.float32(scale)
        if dtype == "float32":
            values = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32).view(dtype)
            ties = (np.arange(2**15) % 256 + 0.5) * 2.0 ** -(np.arange(2**15) % 17)
            with np.errstate(all="ignore"):
                values[::2] = (ties * scale).astype(np.float32)
        else:
            values = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
        values = values.reshape(-1, 64)
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=16, block_size=64, num_heads=1, entry=entry)
        parts = [on_device(values)[:, None], on_device(values[::-1])[:, None]]
        cache = self.write(
            jaxkv.KVCache.zeros(layout), parts, jnp.arange(len(values)), 0,
            {"k_scale": on_device(scale), "v_scale": on_device(scale)},
        )  # fmt: skip
        stored = to_bytes(cache).reshape(-1, entry.nbytes)
        with np.errstate(all="ignore"):
            right = oracle.encode(entry, [np.asarray(part)[:, 0] for part in parts], (scale, scale))
        nan = [(found & 0x7F) == 0x7F for found in (stored, right)]
        assert_same_bits(*nan)
        assert_same_bits(*(np.where(nan[0], 0, found) for found in (stored, right)))

    def test_traced_layer_outside_the_cache_writes_nothing(self):
        layout = layout_of("BLNHC", scenes.MLA_ENTRIES[0])
        before = scenes.garbage(layout, np.random.default_rng(0), "random")
        parts = new_tokens(layout.entry, 1, 3)
        for layer in (-1, layout.num_layers, 2**31 - 1):
            after = self.write(to_cache(layout, before), parts, on_device([0, 5, 99]), on_device(layer, jnp.int32), {})
            assert_caches_equal(after, to_cache(layout, before), padding=True)

    def test_no_tokens(self):
        layout = layout_of("BLNHC", scenes.MLA_ENTRIES[0])
        before = scenes.garbage(layout, np.random.default_rng(0), "random")
        after = self.write(to_cache(layout, before), new_tokens(layout.entry, 1, 0), jnp.zeros(0, jnp.int32), 0, {})
        assert_caches_equal(after, to_cache(layout, before), padding=True)

    def test_slots_of_other_integer_types_do_not_wrap_round(self):
        layout = layout_of("BLNHC", scenes.MLA_ENTRIES[0])
        before = scenes.garbage(layout, np.random.default_rng(0), "random")
        parts = new_tokens(layout.entry, 1, 2)
        wrapped = np.asarray([2**32 + 5, -(2**32) + 5], np.int64)  # 5, had they been cut to 32 bits
        after = self.write(to_cache(layout, before), parts, wrapped, 0, {})
        assert_caches_equal(after, to_cache(layout, before), padding=True)
        with jax.enable_x64(True):
            after = self.write(to_cache(layout, before), parts, jnp.asarray(wrapped), 0, {})
            assert_caches_equal(after, to_cache(layout, before), padding=True)
