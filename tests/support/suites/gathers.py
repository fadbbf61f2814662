"""Gathers, and reads at slots: bit-identical to the packed cache, equal to the oracle up to rounding, with garbage in
all other memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import to_cache
from support import oracle, scenes
from support.arrays import on_device
from support.cases import apart, on_layouts
from support.compare import assert_close, assert_same_bits
from support.suites.base import UNUSED_SUMS, Suite, formats, full_tables, layout_of, with_unused_requests


class GatherChecks(Suite):
    """Checks of `gather_mla`, `gather_kv` and `gather_indexer_k`."""

    def gather(self, cache, scene, cu_seq_lens, layer, **keywords):
        """The operation for the cache's entry; parts as a tuple, [total, ...]."""
        operations = {
            jaxkv.MLAEntry: jaxkv.gather_mla,
            jaxkv.KVEntry: jaxkv.gather_kv,
            jaxkv.IndexerEntry: jaxkv.gather_indexer_k,
        }
        found = self.run(
            operations[type(scene.entry)],
            cache,
            on_device(scene.tables),
            on_device(cu_seq_lens, jnp.int32),
            layer=layer,
            **scene.scale_arguments(),
            **keywords,
        )
        return found if isinstance(found, tuple) else (found,)

    def expected(self, scene, runs, total):
        """Float64 parts [total, H, n_i]: tokens [first, last) of each request, then zeros."""
        found = [np.zeros((total, scene.num_heads, size)) for size in scene.entry.sizes]
        row = 0
        for request, (first, last) in enumerate(runs):
            for part, values in zip(found, scene.parts(request), strict=True):
                part[row : row + last - first] = values[first:last]
            row += last - first
        return found

    def check(self, scene, layout, layer, runs=None):
        """Gathers tokens [first, last) of each request, default all, and compares with the packed cache and truth."""
        entry = scene.entry
        runs = runs or [(0, length) for length in scene.lengths]
        cu_seq_lens = np.cumsum([0, *(last - first for first, last in runs)])
        plain = entry.label in oracle.PLAIN
        keywords = {"total": int(cu_seq_lens[-1]) + 7, "dtype": entry.dtype if plain else jnp.float32}
        if any(first for first, _ in runs):
            keywords["seq_starts"] = on_device([first for first, _ in runs], jnp.int32)
        found = self.gather(scene.cache(layout, layer), scene, cu_seq_lens, layer, **keywords)
        twin = self.gather(scene.twin(layout), scene, cu_seq_lens, 0, **keywords)
        for part, packed, right in zip(found, twin, self.expected(scene, runs, keywords["total"]), strict=True):
            assert part.dtype == keywords["dtype"]
            assert_same_bits(part, packed)
            rounded = entry.codec.scaled or entry.codec.in_float32  # by the product with a scale of any value
            assert_close(part, right.reshape(part.shape), roundings=4 if rounded else 0)


class Gathers(GatherChecks):
    """The same on every layout."""

    @on_layouts([*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.MIXED_ENTRIES, *scenes.INDEXER_ENTRIES])
    def test_equals_the_packed_cache_and_the_oracle(self, entry, name):
        heads = 1 if entry.one_head else 2
        scene = scenes.scene(entry, num_heads=heads)
        self.check(scene, layout_of(name, entry, num_heads=heads), 1)

    @apart
    def test_keys_and_values_that_lie_apart(self, entry, name):
        self.check(scenes.scene(entry, num_heads=2), layout_of(name, entry, num_heads=2), 1)

    def test_latents_without_a_rotary_part(self):
        entry = jaxkv.MLAEntry("bf16", latent=128, rope=0)
        self.check(scenes.scene(entry), layout_of("BLNHC", entry), 1)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @formats([scenes.MLA_ENTRIES[0], scenes.MLA_ENTRIES[3], scenes.MLA_ENTRIES[4]])
    def test_converts_to_the_dtype_asked_for(self, entry, dtype):
        scene = scenes.scene(entry)
        cu_seq_lens = np.cumsum([0, *scene.lengths])
        found = self.gather(scene.twin(layout_of("BLNHC", entry)), scene, cu_seq_lens, 0, total=400, dtype=dtype)
        truth = self.expected(scene, [(0, length) for length in scene.lengths], 400)
        for part, right in zip(found, truth, strict=True):
            assert part.dtype == dtype
            assert_close(part, right[:, 0], roundings=2)

    @pytest.mark.parametrize("block_size", [1, 3, 16, 61])
    def test_first_token_offsets_on_odd_blocks(self, block_size):
        entry = scenes.MLA_ENTRIES[2]
        scene = scenes.scene(entry, block_size=block_size, lengths=(0, 2, 3 * block_size + 1, 2 * block_size))
        layout = layout_of("BLNHC padded", entry, block_size=block_size)
        self.check(
            scene, layout, 2, [(0, 0), (1, 2), (block_size, 3 * block_size + 1), (block_size - 1, 2 * block_size - 1)]
        )

    def test_hundreds_of_requests(self):
        entry = scenes.MLA_ENTRIES[0]
        lengths = tuple(int(n) for n in np.random.default_rng(0).integers(0, 7, 300))
        scene = scenes.scene(entry, lengths=lengths, num_blocks=300, block_size=6)
        self.check(scene, layout_of("BLNHC", entry, num_blocks=300, block_size=6), 1)

    def test_tokens_outside_the_table_or_the_cache_are_zero(self):
        entry = scenes.MLA_ENTRIES[2]
        tables = on_device([[-1, 3], [scenes.BLOCKS, 2**31 - 1]], jnp.int32)
        cache = to_cache(layout := layout_of("BLNHC", entry, block_size=16), scenes.garbage(layout, None))
        cu_seq_lens = on_device([0, 16, 70], jnp.int32)
        kv_c, k_pe = self.run(jaxkv.gather_mla, cache, tables, cu_seq_lens, layer=0, total=70, dtype=jnp.float32)
        assert not np.asarray(kv_c).any()
        assert not np.asarray(k_pe).any()

    @formats([scenes.MLA_ENTRIES[0], scenes.KV_ENTRIES[0], scenes.INDEXER_ENTRIES[0]])
    def test_tokens_past_the_table_are_zero(self, entry):
        heads = 1 if entry.one_head else 2
        scene = full_tables(entry, num_heads=heads)
        cu_seq_lens, starts = [0, 50, 55, 60, 65], on_device([100, 128, 2**31 - 3, 0], jnp.int32)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=heads), 1)
        found = self.gather(cache, scene, cu_seq_lens, 1, total=70, dtype=entry.dtype, seq_starts=starts)
        for n, part in enumerate(found):
            right = np.zeros((70, heads, entry.sizes[n]))
            right[:28], right[60:65] = scene.parts(0)[n][100:], scene.parts(3)[n][:5]
            assert_close(part, right.reshape(part.shape), roundings=0)

    @formats([scenes.MLA_ENTRIES[0], scenes.MLA_ENTRIES[4], scenes.KV_ENTRIES[0], scenes.INDEXER_ENTRIES[0]])
    def test_unused_requests_may_hold_anything(self, entry):
        heads = 1 if entry.one_head else 2
        scene = scenes.scene(entry, num_heads=heads, lengths=(70, 65))
        unused, sums = with_unused_requests(scene), np.cumsum([0, *scene.lengths])
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=heads), 1)
        starts = on_device([0, 0, -1, 2**31 - 1], jnp.int32)
        keywords = {"total": 141, "dtype": jnp.float32}
        right = self.gather(cache, scene, sums, 1, **keywords)
        for tail in ((sums[-1], sums[-1]), *UNUSED_SUMS):
            found = self.gather(cache, unused, [*sums, *tail], 1, **keywords, seq_starts=starts)
            for part, expected in zip(found, right, strict=True):
                assert_same_bits(part, expected)

    def test_total_cuts_the_rest_off(self):
        entry = scenes.MLA_ENTRIES[2]
        scene = scenes.scene(entry, lengths=(70, 70))
        found = self.gather(scene.twin(layout_of("BLNHC", entry)), scene, [0, 70, 140], 0, total=100, dtype=jnp.float32)
        for part, right in zip(found, self.expected(scene, [(0, 70), (0, 70)], 140), strict=True):
            assert_close(part, right[:100, 0], roundings=0)

    def test_what_was_written_comes_back(self):
        entry = scenes.MLA_ENTRIES[0]
        layout = layout_of("BLNHC", entry)
        tables = on_device([[4, 2], [9, 0]], jnp.int32)
        cu_seq_lens = on_device([0, 100, 130], jnp.int32)
        rng = np.random.default_rng(0)
        kv_c, k_pe = (on_device(rng.standard_normal((130, n)), jnp.bfloat16) for n in entry.sizes)
        slots = jaxkv.ragged_slots(tables, cu_seq_lens, layout, total=130)
        cache = self.run(jaxkv.write_mla, jaxkv.KVCache.zeros(layout), kv_c, k_pe, slots, layer=2)
        found = self.run(jaxkv.gather_mla, cache, tables, cu_seq_lens, layer=2, total=130)
        assert_same_bits(found[0], kv_c)
        assert_same_bits(found[1], k_pe)
        assert oracle.PLAIN["bf16"] == found[0].dtype


class ReadChecks(Suite):
    """Checks of `read_mla`, `read_kv` and `read_indexer_k`."""

    def read(self, cache, slots, layer, **keywords):
        """The operation for the cache's entry; parts as a tuple, [T, ...]."""
        operations = {
            jaxkv.MLAEntry: jaxkv.read_mla,
            jaxkv.KVEntry: jaxkv.read_kv,
            jaxkv.IndexerEntry: jaxkv.read_indexer_k,
        }
        found = self.run(operations[type(cache.layout.entry)], cache, slots, layer=layer, **keywords)
        return found if isinstance(found, tuple) else (found,)

    def check(self, scene, layout, layer, count=40):
        """Reads `count` tokens in any order, some of them twice, among slots outside the cache."""
        entry, rng, requests = scene.entry, np.random.default_rng(0), range(len(scene.lengths))
        used = np.concatenate([scene.slots(request) for request in requests])
        chosen, outside = rng.integers(used.size, size=count), [-1, -(2**31), layout.num_slots, 2**31 - 1]
        order = rng.permutation(count + len(outside))
        slots = on_device(np.concatenate([used[chosen], outside])[order], jnp.int32)
        dtype = entry.dtype if entry.label in oracle.PLAIN else jnp.float32
        keywords = {"dtype": dtype, **scene.scale_arguments()}
        found = self.read(scene.cache(layout, layer), slots, layer, **keywords)
        twin = self.read(scene.twin(layout), slots, 0, **keywords)
        parts = zip(*(scene.parts(request) for request in requests), strict=True)
        for part, packed, values in zip(found, twin, parts, strict=True):
            right = np.concatenate(values)[chosen]
            right = np.concatenate([right, np.zeros((len(outside), *right.shape[1:]))])[order]
            assert part.dtype == dtype
            assert_same_bits(part, packed)
            rounded = entry.codec.scaled or entry.codec.in_float32  # by the product with a scale of any value
            assert_close(part, right.reshape(part.shape), roundings=4 if rounded else 0)


class Reads(ReadChecks):
    """The same on every layout."""

    @on_layouts([*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.MIXED_ENTRIES, *scenes.INDEXER_ENTRIES])
    def test_equals_the_packed_cache_and_the_oracle(self, entry, name):
        heads = 1 if entry.one_head else 2
        self.check(scenes.scene(entry, num_heads=heads), layout_of(name, entry, num_heads=heads), 1)

    @apart
    def test_keys_and_values_that_lie_apart(self, entry, name):
        self.check(scenes.scene(entry, num_heads=2), layout_of(name, entry, num_heads=2), 1)

    @pytest.mark.parametrize("block_size", [1, 3, 61])
    @formats([scenes.MLA_ENTRIES[2], scenes.INDEXER_ENTRY])
    def test_odd_block_sizes(self, entry, block_size):
        scene = scenes.scene(entry, block_size=block_size, lengths=(0, 2, 3 * block_size + 1, 2 * block_size))
        self.check(scene, layout_of("BLNHC padded", entry, block_size=block_size), 2)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_converts_to_the_dtype_asked_for(self, dtype):
        scene = scenes.scene(scenes.MLA_ENTRIES[4])
        cache, slots = scene.twin(layout_of("BLNHC", scene.entry)), on_device(scene.slots(3))
        for part, right in zip(self.read(cache, slots, 0, dtype=dtype), scene.parts(3), strict=True):
            assert part.dtype == dtype
            assert_close(part, right[:, 0], roundings=2)

    def test_what_was_written_comes_back(self):
        entry, rng = scenes.MLA_ENTRIES[0], np.random.default_rng(0)
        new = [on_device(rng.standard_normal((130, n)), jnp.bfloat16) for n in entry.sizes]
        cache = jaxkv.KVCache.zeros(layout_of("BLNHC", entry))
        slots = on_device(rng.permutation(cache.layout.num_slots)[:130], jnp.int32)
        cache = self.run(jaxkv.write_mla, cache, *new, slots, layer=2)
        for part, right in zip(self.read(cache, slots, 2), new, strict=True):
            assert_same_bits(part, right)

    @formats([scenes.MLA_ENTRIES[4], scenes.KV_ENTRIES[0], scenes.INDEXER_ENTRY])
    def test_traced_layer_outside_the_cache_reads_zeros(self, entry):
        layout = layout_of("BLNHC", entry, num_heads=1 if entry.one_head else 2)
        cache, slots = to_cache(layout, scenes.garbage(layout, None)), on_device([0, 5, 99])
        for layer in (-1, layout.num_layers, 2**31 - 1):
            for part in self.read(cache, slots, on_device(layer, jnp.int32)):
                assert not np.asarray(part, np.float32).any()

    def test_no_slots(self):
        cache = jaxkv.KVCache.zeros(layout_of("BLNHC", scenes.MLA_ENTRIES[0]))
        kv_c, k_pe = self.read(cache, jnp.zeros(0, jnp.int32), 0)
        assert (kv_c.shape, k_pe.shape) == ((0, 128), (0, 16))

    def test_slots_of_other_integer_types_do_not_wrap_round(self):
        layout = layout_of("BLNHC", scenes.MLA_ENTRIES[0])
        cache = to_cache(layout, scenes.garbage(layout, None))
        wrapped = np.asarray([2**32 + 5, -(2**32) + 5], np.int64)  # 5, had they been cut to 32 bits
        with jax.enable_x64(True):
            for slots in (wrapped, jnp.asarray(wrapped)):
                for part in self.read(cache, slots, 0):
                    assert not np.asarray(part, np.float32).any()


OF_144_BYTES = jaxkv.MLAEntry("fp8_ds_mla", latent=128, rope=6)
"""Bulk copies move multiples of 16 bytes."""


class GatherEntriesChecks(Suite):
    """Checks of `gather_entries`."""

    def check_bytes(self, entry, name, *, block_size=64, lengths=None):
        """Gathers the last two thirds of each request."""
        heads = 1 if entry.one_head else 2
        scene = scenes.scene(entry, num_heads=heads, block_size=block_size, lengths=lengths)
        cache = scene.cache(layout_of(name, entry, num_heads=heads, block_size=block_size), 1)
        lengths, starts = scene.lengths, [length // 3 for length in scene.lengths]
        cu_seq_lens = np.cumsum([0, *(length - start for length, start in zip(lengths, starts, strict=True))])
        total = int(cu_seq_lens[-1]) + 7
        found = self.run(
            jaxkv.gather_entries,
            cache,
            on_device(scene.tables),
            on_device(cu_seq_lens, jnp.int32),
            layer=1,
            total=total,
            seq_starts=on_device(starts, jnp.int32),
        )
        right = np.zeros((total, heads, entry.nbytes), np.uint8)
        for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            position = np.arange(start, length)
            block = scene.tables[request, position // scene.block_size]
            rows = scene.entries[block, :, position % scene.block_size]
            right[cu_seq_lens[request] : cu_seq_lens[request + 1]] = rows
        assert_same_bits(found, right.reshape(found.shape))


class GatherEntries(GatherEntriesChecks):
    """The same on every layout."""

    @on_layouts([OF_144_BYTES, scenes.KV_ENTRIES[0], scenes.INDEXER_ENTRY])
    def test_returns_the_bytes(self, entry, name):
        self.check_bytes(entry, name)

    @formats([*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.INDEXER_ENTRIES])
    def test_bytes_of_every_format(self, entry):
        self.check_bytes(entry, "BLNHC")

    def test_bytes_outside_the_table_or_the_cache_are_zero(self):
        entry = OF_144_BYTES
        tables = on_device([[-1, 3], [scenes.BLOCKS, 2**31 - 1]], jnp.int32)
        cache = to_cache(layout := layout_of("BLNHC", entry, block_size=16), scenes.garbage(layout, None))
        cu_seq_lens = on_device([0, 16, 70], jnp.int32)
        for layer in (0, jnp.int32(-1), jnp.int32(layout.num_layers)):
            found = self.run(jaxkv.gather_entries, cache, tables, cu_seq_lens, layer=layer, total=80)
            assert not np.asarray(found).any()
