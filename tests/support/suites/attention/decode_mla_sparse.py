"""Sparse MLA decode: selected slots, counts of slots, sinks, and rows that see no key."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import oracle, scenes
from support.arrays import as_float64, on_device
from support.cases import further, on_layouts
from support.compare import assert_close, assert_same_bits
from support.suites.attention.decode_mla import SCALE, queries
from support.suites.base import Suite, dtype_of, layout_of

LENGTHS = (190, 64, 1)


class DecodeMLASparseChecks(Suite):
    """Compares results of `decode_mla_sparse` with the oracle."""

    latent, rope = 128, 16
    exact = "f32"
    """The format of the tests that are not about formats."""

    def entry(self, name=None):
        """Entries of a format, of sizes that the implementation supports."""
        return scenes.entry_of(jaxkv.MLAEntry, name or self.exact, self.latent, self.rope)

    def choose(self, scene, tokens, k, rng):
        """Slots [B, Q, K] of random tokens, some entries negative or past the cache."""
        slots = np.full((len(scene.lengths), tokens, k), -1, np.int32)
        for request, length in enumerate(scene.lengths):
            for token in range(tokens):
                count = min(length, k * 3 // 4)
                places = rng.permutation(k)[:count]
                slots[request, token, places] = rng.permutation(scene.slots(request))[:count]
                holes = slots[request, token] < 0
                slots[request, token, holes] = rng.choice([-1, -(2**31), 2**31 - 1, scenes.BLOCKS * 64], holes.sum())
        return slots

    def decode(self, q, cache, slots, layer, scene, **keywords):
        """out and lse."""
        keywords = {"scale": SCALE, "return_lse": True, **scene.scale_arguments(), **keywords}
        return self.run(jaxkv.decode_mla_sparse, *q, cache, on_device(slots), layer=layer, **keywords)

    def check(self, q, cache, slots, layer, scene, counts=None, sinks=None, magnitude=1, **keywords):
        """Compares with float64; returns the result."""
        given = {"counts": counts, "sinks": sinks, **keywords}
        out, lse = self.decode(q, cache, slots, layer, scene, **given)
        self.compare(q, (out, lse), self.truth(q, slots, scene, **given), magnitude)
        return out, lse

    def compare(self, q, found, right, magnitude=1):
        """Compares out and lse with those in float64; `magnitude` is the root mean square of the values."""
        (out, lse), (right_out, right_lse), dtype = found, right, str(q[0].dtype)
        roundings = 64 if dtype == "float32" else 4
        assert_close(out, right_out, dtype=dtype, roundings=roundings, magnitude=magnitude, what="out")
        assert_close(lse, right_lse, dtype="float32", roundings=64, magnitude=4, what="lse")

    def truth(self, q, slots, scene, counts=None, sinks=None, extra=None, **keywords):
        """out and lse in float64; `extra` is the scene, slots and counts of a second cache."""
        wide = np.concatenate([as_float64(x) for x in q], axis=-1)
        sources, found = [(scene, slots, counts), *([] if extra is None else [extra])], []
        for b, t in np.ndindex(*slots.shape[:2]):
            parts = [self.chosen(*source, b, t) for source in sources]
            k, v = (np.concatenate(x) for x in zip(*parts, strict=True))
            found.append(oracle.attention(wide[b, t][None], k, v, SCALE, sinks=sinks, **keywords))
        return tuple(np.stack(x).reshape(*slots.shape[:2], *x[0].shape[1:]) for x in zip(*found, strict=True))

    def chosen(self, scene, slots, counts, b, t):
        """Keys and values of the live slots of a query token in one cache."""
        slots = slots[b, t] if counts is None else slots[b, t, : counts[b, t]]
        slots = slots[(slots >= 0) & (slots < scene.entries.shape[0] * scene.block_size)]
        rows = scene.entries[slots // scene.block_size, :, slots % scene.block_size]
        return oracle.keys_and_values(scene.entry, *oracle.decode(scene.entry, rows, scene.oracle_scales))


class DecodeMLASparse(DecodeMLASparseChecks):
    """`decode_mla_sparse`."""

    @on_layouts(scenes.MLA_ENTRIES)
    def test_equals_the_packed_cache_and_the_oracle(self, entry, name):
        entry = self.entry(entry.format)
        scene = scenes.scene(entry, lengths=LENGTHS)
        layout = layout_of(name, entry)
        q = queries(entry, 3, 2, 3)
        slots = self.choose(scene, 2, 32, np.random.default_rng(0))
        found = self.check(q, scene.cache(layout, 1), slots, 1, scene)
        for a, b in zip(found, self.decode(q, scene.twin(layout), slots, 0, scene), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("k", [1, 100, 700])
    def test_numbers_of_slots(self, k):
        entry = self.entry()
        scene = scenes.scene(entry, lengths=(640, 70))
        slots = self.choose(scene, 1, k, np.random.default_rng(k))
        self.check(queries(entry, 2, 1, 2), scene.cache(layout_of("BLNHC", entry), 1), slots, 1, scene)

    def test_counts_and_sinks(self):
        entry = self.entry()
        scene = scenes.scene(entry, lengths=LENGTHS)
        cache = scene.cache(layout_of("BLNHC", entry), 0)
        slots = self.choose(scene, 2, 32, np.random.default_rng(1))
        counts = np.asarray([[32, 5], [0, 31], [1, 100]], np.int32)
        sinks = np.asarray([0.5, -np.inf, np.inf, 3.0], np.float32)
        out, lse = self.check(queries(entry, 3, 2, 4), cache, slots, 0, scene, counts=counts, sinks=sinks)
        assert not np.asarray(out)[:, :, 2].any()  # an infinite sink takes everything
        assert (np.asarray(lse)[1, 0] == -np.inf).all()

    def test_counts_outside_the_slots_are_clamped(self):
        entry = self.entry()
        scene = scenes.scene(entry, lengths=LENGTHS)
        cache, q = scene.cache(layout_of("BLNHC", entry), 0), queries(entry, 3, 2, 4)
        slots = jnp.asarray(self.choose(scene, 2, 32, np.random.default_rng(1)))
        outside = on_device([[33, 5], [-1, 2**31 - 1], [-(2**31), 32]])
        found, right = (
            self.decode(q, cache, slots, 0, scene, counts=counts) for counts in (outside, jnp.clip(outside, 0, 32))
        )
        for x, expected in zip(found, right, strict=True):
            assert_same_bits(x, expected)

    @pytest.mark.parametrize("q_scale", [further(0.3), further(np.linspace(0.1, 0.7, 3, dtype=np.float32))])
    def test_queries_of_e4m3(self, q_scale):
        entry = self.entry("fp8")
        scene = scenes.scene(entry, lengths=LENGTHS)
        slots = self.choose(scene, 2, 32, np.random.default_rng(0))
        q = queries(entry, 3, 2, 3, "float8_e4m3fn")
        found = self.decode(q, scene.cache(layout_of("BLNHC", entry), 1), slots, 1, scene, q_scale=q_scale)
        wide = [oracle.without_scale(x, q_scale, dtype_of(entry)) for x in q]
        self.compare([x.astype(dtype_of(entry)) for x in q], found, self.truth(wide, slots, scene))

    def test_no_live_slot_at_all(self):
        entry = self.entry("fp8_ds_mla")
        scene = scenes.scene(entry, lengths=LENGTHS)
        cache = scene.cache(layout_of("BLNHC", entry), 0)
        slots = np.full((3, 1, 8), -1, np.int32)
        out, lse = self.check(queries(entry, 3, 1, 2), cache, slots, 0, scene)
        assert not np.asarray(out).any()
        assert (np.asarray(lse) == -np.inf).all()

    def test_logit_cap(self):
        entry = self.entry()
        scene = scenes.scene(entry, lengths=LENGTHS)
        slots = self.choose(scene, 1, 32, np.random.default_rng(2))
        cache = scene.cache(layout_of("BLNHC", entry), 0)
        self.check(queries(entry, 3, 1, 2), cache, slots, 0, scene, logit_cap=2.0)

    def test_all_slots_is_dense(self):
        entry = self.entry()
        scene = scenes.scene(entry, lengths=(130, 65))
        cache = scene.cache(layout_of("BLNHC", entry), 1)
        q = queries(entry, 2, 1, 3)
        tables, lengths = on_device(scene.tables), on_device(scene.lengths)
        positions = jnp.broadcast_to(
            jnp.where(jnp.arange(140) < lengths[:, None], jnp.arange(140), -1)[:, None], (2, 1, 140)
        )
        slots = jaxkv.positions_to_slots(positions, tables, cache)
        out, lse = self.decode(q, cache, slots, 1, scene)
        dense = self.run(jaxkv.decode_mla, *q, cache, tables, lengths, layer=1, scale=SCALE, return_lse=True)
        assert_close(out, dense[0], roundings=64)
        assert_close(lse, dense[1], roundings=64)


class MaxLogits(DecodeMLASparseChecks):
    """The largest logits of `decode_mla_sparse`."""

    def largest(self, q, slots, scene, counts=None, extra=None, cap=None):
        """The largest score of each query token and head in float64, -inf without keys."""
        wide = np.concatenate([as_float64(x) for x in q], axis=-1)
        found = np.full(wide.shape[:-1], -np.inf)
        for b, t in np.ndindex(*slots.shape[:2]):
            sources = [(scene, slots, counts), *([] if extra is None else [extra])]
            keys = np.concatenate([self.chosen(*source, b, t)[0][:, 0] for source in sources])
            if len(keys):
                scores = (wide[b, t] @ keys.T * SCALE).max(axis=-1)
                found[b, t] = scores if cap is None else cap * np.tanh(scores / cap)
        return found

    @pytest.mark.parametrize("name", ["packed, bfloat16", *map(further, ("BLNHC", "LBHNC padded", "gaps, offset"))])
    @pytest.mark.parametrize("form", ["bf16", further("fp8"), further("fp8_ds_mla")])
    def test_equal_those_of_the_oracle(self, form, name):
        entry = self.entry(form)
        scene, layout = scenes.scene(entry, lengths=LENGTHS), layout_of(name, entry)
        q, slots = queries(entry, 3, 2, 3), self.choose(scene, 2, 32, np.random.default_rng(0))
        found = self.decode(q, scene.cache(layout, 1), slots, 1, scene, return_max_logits=True)
        assert_close(found[2], self.largest(q, slots, scene), roundings=64, magnitude=4)
        for a, b in zip(
            found, self.decode(q, scene.twin(layout), slots, 0, scene, return_max_logits=True), strict=True
        ):
            assert_same_bits(a, b)

    @pytest.mark.ci
    def test_leave_the_other_results_as_they_are(self):
        entry = self.entry()
        scene = scenes.scene(entry, lengths=LENGTHS)
        cache, q = scene.cache(layout_of("BLNHC", entry), 0), queries(entry, 3, 2, 3)
        slots = self.choose(scene, 2, 600, np.random.default_rng(1))
        counts = np.asarray([[600, 5], [0, 31], [1, 100]], np.int32)
        options = {"counts": counts, "sinks": np.asarray([0.5, -1.0, 9.0], np.float32), "logit_cap": 2.0}
        out, lse, largest = self.decode(q, cache, slots, 0, scene, return_max_logits=True, **options)
        assert_close(largest, self.largest(q, slots, scene, counts, cap=2.0), roundings=64, magnitude=4)
        assert (np.asarray(largest)[1, 0] == -np.inf).all()
        for a, b in zip((out, lse), self.decode(q, cache, slots, 0, scene, **options), strict=True):
            assert_same_bits(a, b)
        alone = self.decode(q, cache, slots, 0, scene, return_max_logits=True, return_lse=False, **options)
        for a, b in zip(alone, (out, largest), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.ci
    def test_of_two_caches(self):
        entry = self.entry()
        scene, other = scenes.scene(entry, lengths=LENGTHS), scenes.scene(entry, lengths=(70, 3, 0), seed=1)
        cache, second = (one.cache(layout_of("BLNHC", entry), 1) for one in (scene, other))
        q, rng = queries(entry, 3, 2, 3), np.random.default_rng(2)
        slots, more = self.choose(scene, 2, 32, rng), self.choose(other, 2, 40, rng)
        extra = jaxkv.ExtraCache(second, on_device(more), 1)
        *_, largest = self.decode(q, cache, slots, 1, scene, extra=extra, return_max_logits=True)
        assert_close(largest, self.largest(q, slots, scene, extra=(other, more, None)), roundings=64, magnitude=4)
