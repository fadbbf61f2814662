"""Keys and values with a scale per token and head: attended to, written, gathered and read."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing import assert_caches_equal
from jaxkv.testing.buffers import to_cache
from support import oracle, scenes
from support.arrays import as_float64, on_device
from support.cases import further
from support.compare import assert_close, assert_same_bits
from support.suites.attention.decode_kv import SCALE, DecodeKVChecks
from support.suites.base import layout_of
from support.suites.writes import new_tokens

HEADS = 2
FORMS = ["fp8", further("fp8_e5m2"), further("nvfp4")]


class TokenScales(DecodeKVChecks):
    """Operations with `k_scale` and `v_scale` [num_blocks, block_size, H]."""

    def pages(self, scene, seed=0):
        """Scales [num_blocks, block_size, H] of the tokens of the requests, and NaN elsewhere."""
        rng, shape = np.random.default_rng(seed), (scenes.BLOCKS * scene.block_size, HEADS)
        scales = np.full(shape, np.nan, np.float32)
        for request in range(len(scene.lengths)):
            slots = scene.slots(request)
            scales[slots] = rng.uniform(0.01, 0.1, (len(slots), HEADS))
        return scales.reshape(scenes.BLOCKS, scene.block_size, HEADS)

    def parts(self, scene, request, scales):
        """Keys and values of a request, float64 [S, H, n_i], with scales of any form."""
        slots = scene.slots(request)
        rows = scene.entries[slots // scene.block_size, :, slots % scene.block_size]
        spread = [np.asarray(s, np.float64) for s in scales]
        spread = [s.reshape(-1, HEADS)[slots] if s.ndim == 3 else np.broadcast_to(s, HEADS) for s in spread]
        return oracle.decode(scene.entry, rows, [s[..., None] for s in spread])

    def scales(self, scene, which):
        """k_scale and v_scale: those of `which` per token, the others per head and per tensor."""
        return self.pages(scene, 1) if "k" in which else np.float32([0.02, 0.05]), (
            self.pages(scene, 2) if "v" in which else np.float32(0.03)
        )

    @pytest.mark.parametrize("which", ["kv", further("k"), further("v")])
    @pytest.mark.parametrize("form", FORMS)
    def test_attention(self, form, which):
        entry = self.entry(form)
        scene, layout = scenes.scene(entry, num_heads=HEADS), layout_of("BLNHC", entry, num_heads=HEADS)
        q, scales = self.query(entry, len(scene.lengths), 3, 4), self.scales(scene, which)
        given = dict(zip(("k_scale", "v_scale"), map(jnp.asarray, scales), strict=True))
        found = self.decode(q, scene.cache(layout, 1), scene, 1, window=70, **given)
        for request, length in enumerate(scene.lengths):
            wide = as_float64(q[request])
            seen = oracle.seen_by_last(length, 3, 70)
            right = oracle.attention(wide, *self.parts(scene, request, scales), SCALE, seen=seen)
            assert_close(found[0][request], right[0], roundings=4, magnitude=1)
            assert_close(found[1][request], right[1], roundings=64, magnitude=4)

    @pytest.mark.ci
    @pytest.mark.parametrize("name", ["LHBNC", "packed, uint8", "gaps, offset"])
    def test_layouts_and_prefill(self, name):
        entry = self.entry("fp8")
        scene, layout = scenes.scene(entry, num_heads=HEADS), layout_of(name, entry, num_heads=HEADS)
        q = self.query(entry, len(scene.lengths), 3, 4, "float32")
        given = dict(zip(("k_scale", "v_scale"), map(jnp.asarray, self.scales(scene, "kv")), strict=True))
        found = self.decode(q, scene.cache(layout, 1), scene, 1, window=70, **given)
        for a, b in zip(found, self.decode(q, scene.twin(layout), scene, 0, window=70, **given), strict=True):
            assert_same_bits(a, b)
        requests = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        options = {"layer": 1, "scale": SCALE, "window": 70, **given}
        prefilled = self.run(jaxkv.prefill_kv, q, scene.cache(layout, 1), *requests, **options)
        assert_close(prefilled, np.asarray(found[0], np.float64), roundings=64, magnitude=1)

    @pytest.mark.ci
    @pytest.mark.parametrize("name", ["packed, bfloat16", "gaps, offset"])
    @pytest.mark.parametrize("form", FORMS)
    def test_writes_and_reads(self, form, name):
        entry, heads = self.entry(form), HEADS
        layout = layout_of(name, entry, num_heads=heads)
        rng = np.random.default_rng(0)
        slots = rng.permutation(layout.num_slots)[:20].astype(np.int32)
        scales = np.full((2, layout.num_slots, heads), np.nan, np.float32)
        scales[:, slots] = rng.uniform(0.01, 0.1, (2, 20, heads))
        pages = scales.reshape(2, layout.num_blocks, layout.block_size, heads)
        given = dict(zip(("k_scale", "v_scale"), map(jnp.asarray, pages), strict=True))
        new, before = new_tokens(entry, heads, 20), scenes.garbage(layout, None)
        skipped = on_device(np.r_[slots[:10], -1, slots[10:], layout.num_slots])
        padded = [jnp.insert(x, on_device([10, 20]), 1, axis=0) for x in new]
        cache = self.run(jaxkv.write_kv, to_cache(layout, before), *padded, skipped, layer=1, **given)
        encoded = oracle.encode(entry, new, scales[:, slots, :, None])
        expected = scenes.fetch(layout, before, 1)
        expected[slots // layout.block_size, :, slots % layout.block_size] = encoded
        scenes.place(layout, before, 1, expected)
        assert_caches_equal(cache, to_cache(layout, before), padding=True)

        right = oracle.decode(entry, encoded, scales[:, slots, :, None].astype(np.float64))
        found = self.run(jaxkv.read_kv, cache, on_device(slots), layer=1, dtype="float32", **given)
        table, token = slots[:, None] // layout.block_size, slots % layout.block_size
        runs = on_device(table), jnp.arange(21, dtype=jnp.int32)
        options = {"layer": 1, "total": 22, "seq_starts": on_device(token), "dtype": "float32", **given}
        gathered = self.run(jaxkv.gather_kv, cache, *runs, **options)
        for x, y, part in zip(found, gathered, right, strict=True):
            assert_close(x, part, roundings=2)
            assert_same_bits(y[:20], x)
            assert not np.asarray(y[20:]).any()
