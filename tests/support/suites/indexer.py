"""The indexer: logits over split pages, exact selection."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import to_cache
from jaxkv_kernels.addressing import slots_for
from jaxkv_kernels.scores import CHUNK_TOKENS
from support import scenes
from support.arrays import as_float64, on_device
from support.cases import further, on_layouts, slow
from support.compare import assert_close, assert_same_bits
from support.suites.base import CLAMPED, OUTSIDE, Suite, dtype_of, formats, full_tables, layout_of


class IndexerChecks(Suite):
    """What the tests of `indexer_logits` and `select_topk` are made of."""

    e4m3_roundings = 128
    """Of float32, in the logits of e4m3 queries: products of such narrow values are exact, and only the sums round."""

    def logits(self, q, weights, cache, scene, layer, max_len, **keywords):
        """float32 [B, Q, max_len]."""
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        options = {"layer": layer, "max_len": max_len, **keywords}
        return self.run(jaxkv.indexer_logits, q, weights, cache, tables, lengths, **options)

    def arguments(self, scene, tokens, dtype, heads=4):
        """q [B, Q, Hi, D], weights [B, Q, Hi]."""
        rng = np.random.default_rng(13)
        shape = (len(scene.lengths), tokens, heads)
        q = on_device(rng.standard_normal((*shape, scene.entry.head_dim))).astype(dtype)
        return q, on_device(rng.standard_normal(shape), jnp.float32)

    def truth(self, q, weights, scene, max_len, ends=None):
        """The formula in float64; query tokens see the tokens before `ends` [B, Q], by default up to their own."""
        q, weights = (as_float64(x) for x in (q, weights))
        found = np.full((*q.shape[:2], max_len), -np.inf)
        if ends is None:
            ends = np.asarray(scene.lengths)[:, None] - q.shape[1] + 1 + np.arange(q.shape[1])
        for b, length in enumerate(scene.lengths):
            k = scene.parts(b)[0][:, 0]
            for t in range(q.shape[1]):
                end = min(max(ends[b, t], 0), length, max_len)
                scores = np.maximum(q[b, t] @ k[:end].T, 0)
                found[b, t, :end] = weights[b, t] @ scores
        return found

    def check(self, q, weights, scene, layout, layer, max_len):
        """The formula holds, and on the packed cache the bits are the same."""
        found = self.logits(q, weights, scene.cache(layout, layer), scene, layer, max_len)
        roundings = self.e4m3_roundings if q.dtype == jnp.float8_e4m3fn else 128
        assert_close(found, self.truth(q, weights, scene, max_len), roundings=roundings, what="logits")
        assert_same_bits(found, self.logits(q, weights, scene.twin(layout), scene, 0, max_len))

    def check_select_slots(self, entry, dtype, *, tokens, chunk, k=30):
        """The slots are those of single calls of the operations, for chunks of up to `chunk` query tokens."""
        scene = scenes.scene(entry)
        cache = scene.cache(layout_of("BLNHC", entry), 1)
        q, weights = self.arguments(scene, tokens, dtype)
        logits = self.logits(q, weights, cache, scene, 1, 200)
        tables = on_device(scene.tables)
        positions = self.run(jaxkv.select_topk, logits, k)
        right = jaxkv.positions_to_slots(positions, tables, cache)
        found = jaxkv.select_slots(
            q, weights, cache, tables, on_device(scene.lengths, jnp.int32), k, layer=1, max_len=200,
            logits_bytes=chunk * 4 * len(scene.lengths) * max(200, weights.shape[2] * CHUNK_TOKENS),
            implementation=self.implementation,
        )  # fmt: skip
        assert_same_bits(found, right)

    def check_topk(self, logits, k):
        """The positions are those of a stable sort."""
        found = self.run(jaxkv.select_topk, on_device(logits), k)
        assert found.dtype == jnp.int32
        order = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")[..., :k]
        order = np.where(np.take_along_axis(logits, order, -1) == -np.inf, -1, order)
        order = np.pad(order, [(0, 0)] * (logits.ndim - 1) + [(0, k - order.shape[-1])], constant_values=-1)
        assert_same_bits(found, order.astype(np.int32))

    def check_topk_of_short_rows(self, k):
        """The same for three rows of 30 logits: random ones, ties, zeros of both signs between -inf."""
        rng = np.random.default_rng(0)
        logits = np.stack([rng.standard_normal(30), rng.integers(0, 3, 30), rng.choice([0.0, -0.0, -np.inf], 30)])
        self.check_topk(logits.astype(np.float32), k)


class Indexer(IndexerChecks):
    """`indexer_logits`, `select_topk`."""

    @pytest.mark.parametrize("dtype", ["bfloat16", *(slow(name) for name in ("float32", "float8_e4m3fn"))])
    @on_layouts([scenes.INDEXER_ENTRIES[0], scenes.INDEXER_ENTRY])
    def test_equals_the_packed_cache_and_the_oracle(self, name, dtype, entry):
        scene = scenes.scene(entry)
        layout = layout_of(name, entry)
        self.check(*self.arguments(scene, 2, dtype), scene, layout, 1, 200)

    @pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
    @formats([scenes.INDEXER_ENTRIES[0], scenes.INDEXER_ENTRY, scenes.INDEXER_ENTRIES[-1]])
    def test_dtypes_of_queries(self, dtype, entry):
        scene = scenes.scene(entry)
        self.check(*self.arguments(scene, 2, dtype), scene, layout_of("BLNHC padded", entry), 1, 200)

    @pytest.mark.parametrize(("tokens", "chunk"), [(21, 8), further(21, 1), further(90, 40), further(16, 8), (3, 3)])
    @formats([scenes.INDEXER_ENTRIES[0], scenes.INDEXER_ENTRY])
    def test_select_slots(self, entry, tokens, chunk):
        self.check_select_slots(entry, "bfloat16", tokens=tokens, chunk=chunk)

    @formats(scenes.INDEXER_ENTRIES[1:3])
    def test_keys_and_queries_of_more_digits(self, entry):
        scene = scenes.scene(entry)
        layout = layout_of("packed, uint8", entry)
        q, weights = self.arguments(scene, 2, dtype_of(entry))
        found = self.logits(q, weights, scene.cache(layout, 1), scene, 1, 200)
        assert_close(found, self.truth(q, weights, scene, 200), roundings=128, what="logits")

    @pytest.mark.parametrize("max_len", [1, 64, 100, 1000])
    def test_lengths_of_the_result(self, max_len):
        entry = scenes.INDEXER_ENTRY
        scene = scenes.scene(entry, block_size=16, lengths=(700, 3, 0, 90), num_blocks=60)
        layout = layout_of("BLNHC", entry, block_size=16, num_blocks=60)
        q, weights = self.arguments(scene, 1, "float32")
        found = self.logits(q, weights, scene.cache(layout, 2), scene, 2, max_len)
        assert_close(found, self.truth(q, weights, scene, max_len), roundings=128)

    @pytest.mark.parametrize("block_size", [1, 3, 61])
    def test_odd_block_sizes(self, block_size):
        entry = scenes.INDEXER_ENTRY
        scene = scenes.scene(entry, block_size=block_size)
        layout = layout_of("BLNHC padded", entry, block_size=block_size)
        q, weights = self.arguments(scene, 1, "float32")
        found = self.logits(q, weights, scene.cache(layout, 0), scene, 0, 200)
        assert_close(found, self.truth(q, weights, scene, 200), roundings=128)

    @pytest.mark.parametrize("size", [16, slow(64)])
    def test_blocks_outside_the_cache_are_not_seen(self, size):
        entry = scenes.INDEXER_ENTRY
        scene = scenes.scene(entry, block_size=size, lengths=(3 * size, size, 2 * size))
        tables = scene.tables.copy()
        tables[0, 1], tables[1, 0], tables[2, 0] = scenes.BLOCKS, -7, 2**31 - 1
        q, weights = self.arguments(scene, 1, "bfloat16")
        right = self.truth(q, weights, scene, 4 * size)
        for request, lost in ((0, slice(size, 2 * size)), (1, slice(0, size)), (2, slice(0, size))):
            right[request, :, lost] = -np.inf
        cache = scene.cache(layout_of("BLNHC", entry, block_size=size), 0)
        found = self.logits(q, weights, cache, replace(scene, tables=tables), 0, 4 * size)
        assert_close(found, right, roundings=128)

    @pytest.mark.ci
    @formats([scenes.INDEXER_ENTRY, scenes.INDEXER_ENTRIES[0]])
    def test_lengths_per_query_token(self, entry):
        full = full_tables(entry)
        cache, (q, weights) = full.cache(layout_of("BLNHC", entry), 1), self.arguments(full, 3, "bfloat16")
        ends = np.asarray([[5, 128, 0], [129, 2**31 - 1, 1], [-1, -(2**31), 64], [65, 63, 100]], np.int32)
        tables = on_device(full.tables)
        found = self.run(jaxkv.indexer_logits, q, weights, cache, tables, on_device(ends), layer=1, max_len=100)
        assert_close(found, self.truth(q, weights, full, 100, ends.astype(np.int64)), roundings=128)

    @pytest.mark.parametrize(
        "entry", [scenes.INDEXER_ENTRY, further(scenes.INDEXER_ENTRIES[0])], ids=lambda entry: entry.format
    )
    def test_ragged_query_tokens(self, entry):
        scene = scenes.scene(entry)
        cache, edges = scene.cache(layout_of("BLNHC", entry), 1), np.cumsum([0, 0, 1, 7, 0, 65, 3])
        (q,), (weights,) = self.arguments(replace(scene, lengths=(0,)), edges[-1] + 2, "bfloat16")
        found = self.logits(q, weights, cache, scene, 1, 200, cu_q_lens=on_device(edges))
        assert found.shape == (len(q), 200)
        for b, (first, last) in enumerate(itertools.pairwise(edges)):
            if first < last:
                one = replace(scene, lengths=scene.lengths[b : b + 1], tables=scene.tables[b : b + 1])
                right = self.truth(q[None, first:last], weights[None, first:last], one, 200)
                assert_close(found[None, first:last], right, roundings=128)
        assert (np.asarray(found[edges[-1] :]) == -np.inf).all()

    @pytest.mark.parametrize("max_len", [100, 200])
    def test_lengths_outside_the_table_are_clamped_to_it(self, max_len):
        entry = scenes.INDEXER_ENTRY
        full = full_tables(entry)
        inside, outside = (replace(full, lengths=lengths) for lengths in (CLAMPED, OUTSIDE))
        cache, (q, weights) = full.cache(layout_of("BLNHC", entry), 1), self.arguments(full, 3, "bfloat16")
        right = self.logits(q, weights, cache, inside, 1, max_len)
        assert_close(right, self.truth(q, weights, inside, max_len), roundings=128)
        assert_same_bits(self.logits(q, weights, cache, outside, 1, max_len), right)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_every_e4m3_value(self, dtype):
        layout = layout_of("BLNHC", scenes.INDEXER_ENTRY, num_blocks=4)
        codes, size = np.setdiff1d(np.arange(256), [0x7F, 0xFF]), layout.entry.head_dim
        keys = np.zeros((256, layout.entry.nbytes), np.uint8)
        keys[codes, codes % size] = codes  # in every place of a word
        keys[:, size:] = np.float32([1]).view(np.uint8)
        buffer = scenes.garbage(layout, np.random.default_rng(0))
        scenes.place(layout, buffer, 1, keys.reshape(4, 1, 64, -1))
        # relu(v) - relu(-v) = v.
        q = jnp.stack([jnp.ones(size), -jnp.ones(size)])[None, None].astype(dtype)
        found = self.run(
            jaxkv.indexer_logits, q, on_device([[[1.0, -1.0]]]), to_cache(layout, buffer),
            jnp.arange(4)[None], on_device([256]), layer=1, max_len=256,
        )  # fmt: skip
        values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert np.array_equal(found[0, 0, codes], values[codes])

    def test_traced_layer_outside_the_cache_is_empty(self):
        entry = scenes.INDEXER_ENTRY
        scene = scenes.scene(entry)
        q, weights = self.arguments(scene, 1, "bfloat16")
        found = self.logits(q, weights, scene.cache(layout_of("BLNHC", entry), 1), scene, jnp.int32(3), 100)
        assert (np.asarray(found) == -np.inf).all()

    @pytest.mark.parametrize("k", [1, 7, 64, 300])
    @pytest.mark.parametrize("kind", ["random", "ties", "constant", "last bits"])
    def test_select_topk_is_exact(self, k, kind):
        rng = np.random.default_rng(0)
        logits = {
            "random": rng.standard_normal((4, 3, 250)),
            "ties": rng.integers(0, 4, (4, 3, 250)),
            "constant": np.ones((4, 3, 250)),
            "last bits": 1 + rng.integers(0, 1024, (4, 3, 250)) * 2.0**-23,
        }[kind].astype(np.float32)
        for row, valid in enumerate((250, 64, 3, 0)):
            logits[row, :, valid:] = -np.inf
        self.check_topk(logits, k)

    @pytest.mark.parametrize("k", [7, further(64)])
    def test_select_topk_of_the_first_logits_of_each_row(self, k):
        rng = np.random.default_rng(0)
        logits = rng.integers(0, 9, (4, 3, 50)).astype(np.float32)
        lengths = np.asarray([[0, 1, 50], [51, 49, -1], [7, 2**31 - 1, -(2**31)], [30, 20, 6]], np.int32)
        cut = np.where(np.arange(50) < lengths[..., None], logits, -np.inf).astype(np.float32)
        right = self.run(jaxkv.select_topk, on_device(cut), k)
        logits[np.arange(50) >= lengths[..., None]] = np.nan
        assert_same_bits(self.run(jaxkv.select_topk, on_device(logits), k, lengths=on_device(lengths)), right)

    @pytest.mark.parametrize(("k", "block_size"), [(40, 16), further(7, 3)])
    def test_select_topk_returns_slots(self, k, block_size):
        rng = np.random.default_rng(0)
        logits = rng.integers(0, 9, (3, 2, 50)).astype(np.float32)
        logits[1, :, 20:] = -np.inf
        tables = rng.permutation(60).reshape(3, 20)[:, : 40 // block_size].astype(np.int32)  # shorter than the rows
        tables[2, 0] = -1
        tables[0, 0] = 2**31 - 1
        positions = self.run(jaxkv.select_topk, on_device(logits), k)
        right = slots_for(on_device(tables), positions, block_size=block_size)
        options = {"block_tables": on_device(tables), "block_size": block_size}
        assert_same_bits(self.run(jaxkv.select_topk, on_device(logits), k, **options), right)

    @pytest.mark.parametrize("k", [1, 3, 6, 9])
    def test_select_topk_ranks_nan_first(self, k):
        logits = np.asarray([1, np.nan, np.inf, -np.inf, -np.nan, 2, np.nan], np.float32)
        logits.view(np.uint32)[6] = 0x7F800001  # a NaN of other bits
        order = [1, 4, 6, 2, 5, 0, -1, -1, -1]
        found = self.run(jaxkv.select_topk, on_device(logits), k)
        assert_same_bits(found, np.asarray(order[:k], np.int32))

    @pytest.mark.parametrize("k", [1, 3, 30])
    def test_select_topk_orders_subnormal_logits(self, k):
        rng = np.random.default_rng(0)
        smallest = float(np.finfo(np.float32).smallest_subnormal)
        logits = np.stack([
            rng.permutation(30) * smallest,
            rng.integers(-(2**23) + 1, 2**23, 30) * smallest,
            rng.choice([0.0, -0.0, smallest, -smallest, 1e-39, 1.0], 30),
        ])  # fmt: skip
        self.check_topk(logits.astype(np.float32), k)

    @pytest.mark.parametrize("length", [8193, 20000, 70000])
    def test_select_topk_of_long_rows(self, length):
        rng = np.random.default_rng(0)
        logits = np.stack(
            [
                rng.standard_normal(length),
                rng.integers(-2, 3, length),
                np.where(rng.random(length) < 0.5, 0.0, -0.0),
                rng.integers(-(2**23) + 1, 2**23, length) * 2.0**-149,
            ]
        )
        logits = logits.astype(np.float32)
        logits[0, rng.random(length) < 0.9] = -np.inf
        self.check_topk(logits, 2048)

    def test_the_whole_path_attends_to_the_best_positions(self):
        entry, main = scenes.INDEXER_ENTRY, scenes.MLA_ENTRIES[4]
        groups = {"main": jaxkv.Group(2, main), "indexer": jaxkv.Group(2, entry)}
        packed = jaxkv.PackedLayout(num_blocks=8, block_size=64, groups=groups)
        rng = np.random.default_rng(0)
        tables, length, k = on_device([[5, 0, 3]], jnp.int32), 150, 16
        slots = jaxkv.slots_for(tables, jnp.arange(length)[None], packed["main"])[0]
        latent, rope, key = (
            on_device(rng.standard_normal((length, n)), ml_dtypes.bfloat16) for n in (*main.sizes, *entry.sizes)
        )
        cache = self.run(jaxkv.write_mla, jaxkv.KVCache.zeros(packed["main"]), latent, rope, slots, layer=1)
        cache = self.run(jaxkv.write_indexer_k, cache.view(packed["indexer"]), key, slots, layer=1)
        q = on_device(rng.standard_normal((1, 1, 2, 128)), jnp.float32)
        logits = self.run(
            jaxkv.indexer_logits, q, jnp.ones((1, 1, 2)), cache, tables, on_device([length]), layer=1, max_len=192
        )
        positions = self.run(jaxkv.select_topk, logits, k)
        chosen = jaxkv.positions_to_slots(positions, tables, cache)
        assert np.array_equal(np.sort(chosen[0, 0]), np.sort(slots[np.argsort(-logits[0, 0])[:k]]))
        q_latent, q_pe = (on_device(rng.standard_normal((1, 1, 4, n)), jnp.float32) for n in main.sizes)
        out = self.run(jaxkv.decode_mla_sparse, q_latent, q_pe, cache.view(packed["main"]), chosen, layer=1, scale=0.1)
        assert np.isfinite(np.asarray(out)).all()
