"""Attention to keys and values: MHA and GQA, windows, scales per head."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import oracle, scenes
from support.arrays import as_float64, on_device
from support.cases import apart, each_format, each_value, further, on_layouts
from support.compare import assert_close, assert_same_bits
from support.suites.base import (
    CLAMPED,
    OUTSIDE,
    UNUSED_SUMS,
    Suite,
    check_ragged,
    dtype_of,
    full_tables,
    layout_of,
    with_unused_requests,
    without_signs,
)

SCALE = 0.3

BOTH_SIDES = (64, 64), (3, 2), (127, -1), (-1, 127), (-1, 2), (0, 0)
"""Windows (left, right)."""
TOKENS = 70, 5, 2, 1
"""Query tokens per request."""
OPTIONS = None, "sinks", "logit_cap"

every_format = pytest.mark.parametrize("form", each_format(jaxkv.KVEntry.formats))


def options_of(name, heads):
    """The option of attention of that name, of `OPTIONS`."""
    values = {"sinks": jnp.linspace(-2.0, 3.0, heads), "logit_cap": 2.0}
    return {} if name is None else {name: values[name]}


class DecodeKVChecks(Suite):
    """Compares results of `decode_kv` with the oracle."""

    head_dim, value_dim = 16, 8
    exact = "f32"
    """The format of the tests that are not about formats."""

    def entry(self, name=None):
        """An entry of that format, in the sizes that the implementation takes."""
        return scenes.entry_of(jaxkv.KVEntry, name or self.exact, self.head_dim, self.value_dim)

    def query(self, entry, batch, tokens, heads, dtype=None):
        """q [B, Q, Hq, D]."""
        rng = np.random.default_rng(11)
        return on_device(rng.standard_normal((batch, tokens, heads, entry.head_dim)), dtype or dtype_of(entry))

    def decode(self, q, cache, scene, layer, **keywords):
        """out and lse."""
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        keywords = {"scale": SCALE, "return_lse": True, **scene.scale_arguments(), **keywords}
        return self.run(jaxkv.decode_kv, q, cache, tables, lengths, layer=layer, **keywords)

    def truth(self, q, scene, scale=SCALE, *, causal=True, window=None, mask=None, tree_mask=None, **keywords):
        """out and lse in float64, of each request, for queries [B, Q, ...] or a list of B arrays [Q, ...]."""
        found = []
        for request, length in enumerate(scene.lengths):
            tree = None if tree_mask is None else np.asarray(tree_mask[request])
            wide = as_float64(q[request])
            seen = oracle.seen_by_last(length, len(wide), window, causal=causal, mask=mask, tree=tree)
            found.append(oracle.attention(wide, *scene.parts(request), scale, seen=seen, **keywords))
        return tuple(zip(*found, strict=True))

    def check(self, q, cache, scene, layer, scale=SCALE, **keywords):
        """Compares with float64; returns the result."""
        out, lse = self.decode(q, cache, scene, layer, scale=scale, **keywords)
        right_out, right_lse = (np.stack(x) for x in self.truth(q, scene, scale, **keywords))
        dtype = str(q.dtype)
        assert_close(out, right_out, dtype=dtype, roundings=64 if dtype == "float32" else 4, magnitude=1, what="out")
        assert_close(lse, right_lse, dtype="float32", roundings=64, magnitude=4, what="lse")
        return out, lse

    def check_layout(self, name, entry, **sizes):
        """Compares with float64 and, bit for bit, with a packed cache."""
        scene = scenes.scene(entry, num_heads=2, **sizes)
        layout = layout_of(name, entry, num_heads=2)
        q = self.query(entry, len(scene.lengths), 2, 6)
        found = self.check(q, scene.cache(layout, 1), scene, 1)
        for a, b in zip(found, self.decode(q, scene.twin(layout), scene, 0), strict=True):
            assert_same_bits(a, b)

    def check_low_scores(self, layout, heads, **sizes):
        """Keys count however low their finite scores are, and a query without keys is one none the less."""
        entry = self.entry()
        scene = without_signs(scenes.scene(entry, num_heads=2, **sizes))
        q = -abs(self.query(entry, len(scene.lengths), 2, heads))
        for scale in (1e31, 1e35):  # scores of some -1e32 and -1e36
            self.check(q, scene.cache(layout_of(layout, entry, num_heads=2), 1), scene, 1, scale=scale)


class DecodeKV(DecodeKVChecks):
    """`decode_kv`."""

    @on_layouts(scenes.KV_ENTRIES)
    def test_equals_the_packed_cache_and_the_oracle(self, entry, name):
        self.check_layout(name, self.entry(entry.format))

    @apart
    def test_keys_and_values_that_lie_apart(self, entry, name):
        value_dim = self.head_dim if entry.head_dim == entry.value_dim else self.value_dim
        self.check_layout(name, scenes.entry_of(jaxkv.KVEntry, entry.format, self.head_dim, value_dim))

    @pytest.mark.parametrize(("heads", "query_heads"), [(4, 4), (4, 32), (1, 5)])
    def test_mha_gqa_mqa(self, heads, query_heads):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=heads)
        layout = layout_of("BHLNC", entry, num_heads=heads)
        self.check(self.query(entry, len(scene.lengths), 1, query_heads), scene.cache(layout, 2), scene, 2)

    @pytest.mark.parametrize("tokens", [4, 70])
    def test_several_query_tokens_are_causal_at_the_end(self, tokens):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        layout = layout_of("LBHNC", entry, num_heads=2)
        self.check(self.query(entry, len(scene.lengths), tokens, 6), scene.cache(layout, 2), scene, 2)

    @pytest.mark.parametrize("form", ["f32", "f16", "bf16", "fp8"])
    def test_queries_of_e4m3_lose_nothing(self, form):
        entry = self.entry(form)
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        q = self.query(entry, len(scene.lengths), 2, 6).astype("float8_e4m3fn")
        converted = q.astype(dtype_of(entry))
        for a, b in zip(self.decode(q, cache, scene, 1), self.check(converted, cache, scene, 1), strict=True):
            assert_same_bits(a, b)
        out = self.decode(q[:, 0], cache, scene, 1, return_lse=False)
        assert (out.shape, out.dtype) == ((*q[:, 0].shape[:-1], entry.value_dim), converted.dtype)

    @pytest.mark.parametrize("q_scale", [further(0.3), np.linspace(0.1, 0.7, 6, dtype=np.float32)])
    def test_scales_of_e4m3_queries(self, q_scale):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        q = self.query(entry, len(scene.lengths), 2, 6).astype("float8_e4m3fn")
        found = self.decode(q, cache, scene, 1, q_scale=q_scale)
        right = self.truth(oracle.without_scale(q, q_scale, dtype_of(entry)), scene)
        assert_close(found[0], np.stack(right[0]), roundings=64 if self.exact == "f32" else 4, magnitude=1)
        assert_close(found[1], np.stack(right[1]), roundings=64, magnitude=4)

    @pytest.mark.ci
    def test_one_scale_for_the_queries_of_all_heads_is_the_same_scale_for_each(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache, q = scene.twin(layout_of("BLNHC", entry, num_heads=2)), self.query(entry, len(scene.lengths), 2, 6)
        found = [
            self.decode(q.astype("float8_e4m3fn"), cache, scene, 0, q_scale=scale) for scale in (0.3, np.full(6, 0.3))
        ]
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("sizes", [(512, 512), (320, 64)])
    def test_large_heads(self, sizes):
        entry = jaxkv.KVEntry(self.exact, *sizes)
        scene = scenes.scene(entry, num_heads=2)
        q = self.query(entry, len(scene.lengths), 2, 6)
        # Scores of so many products are as large as those of smaller heads with this scale.
        scale = SCALE / 4
        self.check(q, scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), scene, 1, scale, window=70)

    def test_without_a_token_axis(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.twin(layout_of("BLNHC", entry, num_heads=2))
        q = self.query(entry, len(scene.lengths), 1, 4)
        with_axis = self.decode(q, cache, scene, 0)
        for a, b in zip(with_axis, self.decode(q[:, 0], cache, scene, 0), strict=True):
            assert_same_bits(a[:, 0], b)
        assert_same_bits(self.decode(q, cache, scene, 0, return_lse=False), with_axis[0])

    @pytest.mark.parametrize("window", [None, 20])
    def test_blocks_outside_the_cache_are_masked(self, window):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2, block_size=16, lengths=(48, 16, 32))
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2, block_size=16), 0)
        q = self.query(entry, 3, 1, 4)
        tables = scene.tables.copy()
        tables[0, 1], tables[1, 0], tables[2, 0] = scenes.BLOCKS, -7, 2**31 - 1
        out, lse = self.decode(q, cache, replace(scene, tables=tables), 0, window=window)
        wide = as_float64(q)
        for request, kept in enumerate((np.r_[0:16, 32:48], np.r_[0:0], np.r_[16:32])):
            if window is not None:
                kept = kept[kept >= scene.lengths[request] - window]
            k, v = (part[kept] for part in scene.parts(request))
            right_out, right_lse = oracle.attention(wide[request], k, v, SCALE)
            assert_close(out[request], right_out, roundings=64 if self.exact == "f32" else 4, magnitude=1)
            assert_close(lse[request], right_lse, roundings=64, magnitude=4)

    @pytest.mark.parametrize("window", [None, 70])
    def test_lengths_outside_the_table_are_clamped_to_it(self, window):
        entry = self.entry()
        full = full_tables(entry, num_heads=2)
        inside, outside = (replace(full, lengths=lengths) for lengths in (CLAMPED, OUTSIDE))
        cache, q = full.cache(layout_of("BLNHC", entry, num_heads=2), 1), self.query(entry, 4, 3, 4)
        tables, lengths = on_device(full.tables), on_device(OUTSIDE, jnp.int32)
        plan = self.run(jaxkv.plan_decode, cache, tables, lengths, num_heads=4, q_len=3, window=window)
        right = self.check(q, cache, inside, 1, window=window)
        for a, b in zip(self.decode(q, cache, outside, 1, window=window, plan=plan), right, strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_keys_that_a_query_does_not_see_do_not_matter(self, value):
        entry = self.entry()
        scene, keys = scenes.scene(entry, num_heads=2, lengths=(130, 70)), slice(None, entry.head_dim)
        broken = scene.holding(value, 0, 129, keys).holding(value, 0, 27, keys)  # what only the last, the first sees
        q, layout = self.query(entry, 2, 3, 4), layout_of("BLNHC", entry, num_heads=2)
        right = self.decode(q, scene.cache(layout, 1), scene, 1, window=101)
        for x, clean in zip(self.decode(q, broken.cache(layout, 1), broken, 1, window=101), right, strict=True):
            assert_same_bits(x[0, 1], clean[0, 1])
            assert_same_bits(x[1], clean[1])
            assert not np.isfinite(np.asarray(x[0, ::2], np.float32)).all()

    def test_traced_layer_outside_the_cache_is_empty(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        out, lse = self.decode(self.query(entry, 6, 1, 2), cache, scene, jnp.int32(3))
        assert not np.asarray(out).any()
        assert (np.asarray(lse) == -np.inf).all()

    @each_value(("window", "tokens"), [1, 63, 64, 1000, 2**31 - 1, 2**40], [1, 3])
    def test_window(self, window, tokens):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        layout = layout_of("BLNHC", entry, num_heads=2)
        q = self.query(entry, len(scene.lengths), tokens, 2)
        self.check(q, scene.cache(layout, 0), scene, 0, window=window)

    @pytest.mark.parametrize("window", [None, 50])
    def test_sinks(self, window):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        q, cache = self.query(entry, len(scene.lengths), 2, 6), scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        sinks = on_device([-1e30, 0.5, 3.0, -2.0, 0.0, 8.0])
        _, lse = self.check(q, cache, scene, 1, sinks=sinks, window=window)
        assert_same_bits(lse, self.decode(q, cache, scene, 1, window=window)[1])

    def test_without_a_causal_mask(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        q = self.query(entry, len(scene.lengths), 3, 6)
        self.check(q, scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), scene, 1, causal=False)

    @pytest.mark.parametrize(("window", "causal"), [(None, True), (50, True), (None, False)])
    def test_ragged_query_tokens(self, window, causal):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        edges = np.cumsum([0, 0, 1, 7, 1, 65, 3])
        q = self.query(entry, 1, edges[-1] + 3, 6)[0]  # with three tokens of no request
        keywords = {"window": window, "causal": causal}
        found = self.decode(q, cache, scene, 1, cu_q_lens=on_device(edges), **keywords)
        rows = [q[a:b] for a, b in itertools.pairwise(edges)]
        check_ragged(found, self.truth(rows, scene, **keywords), edges, 64 if q.dtype == jnp.float32 else 4)

    def test_unused_requests_may_hold_anything(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2, lengths=(130, 70, 64))
        cache, unused = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), with_unused_requests(scene)
        q, edges = self.query(entry, 1, 11, 4)[0], np.asarray([0, 2, 3, 8])

        def found(tail):
            return self.decode(q, cache, unused, 1, cu_q_lens=on_device([*edges, *tail]))

        right = found((8, 8))
        rows = [q[a:b] for a, b in itertools.pairwise(edges)]
        check_ragged(right, self.truth(rows, scene), edges, 64 if q.dtype == jnp.float32 else 4)
        for tail in UNUSED_SUMS:
            for x, expected in zip(found(tail), right, strict=True):
                assert_same_bits(x, expected)

    def test_query_tokens_past_the_last_row_are_left_out(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2, lengths=(130, 70, 64))
        cache, q = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), self.query(entry, 1, 9, 4)[0]
        found = self.decode(q[:5], cache, scene, 1, cu_q_lens=on_device([0, 2, 6, 9]))
        right = self.truth([q[:2], q[2:6], q[6:]], scene)
        for x, (first, second, _) in zip(found, right, strict=True):
            expected = np.concatenate([first, second[:3]])
            assert_close(x, expected, roundings=64 if q.dtype == jnp.float32 else 4, magnitude=4)

    def test_what_is_before_the_windows_of_ragged_queries_does_not_matter(self):
        entry, keys = self.entry(), slice(None)
        scene = scenes.scene(entry, num_heads=2, lengths=(130, 70, 64))
        broken = scene
        for request, first in enumerate((130 - 2 - 20, 70 - 1 - 20, 64 - 5 - 20)):  # lengths, tokens and the window
            for position in range(first - 6, first + 1):
                broken = broken.holding(np.nan, request, position, keys)
        layout = layout_of("BLNHC", entry, num_heads=2)
        q, sums = self.query(entry, 1, 8, 4)[0], on_device([0, 2, 3, 8])
        right = self.decode(q, scene.cache(layout, 1), scene, 1, window=20, cu_q_lens=sums)
        for a, b in zip(
            self.decode(q, broken.cache(layout, 1), broken, 1, window=20, cu_q_lens=sums), right, strict=True
        ):
            assert_same_bits(a, b)

    def test_window_over_long_requests_with_poison_before_it(self):
        entry = self.entry()
        scene = scenes.scene(entry, block_size=16, lengths=(1500, 1300), num_blocks=180)
        slots = scene.slots(0)[: 1500 - 40]
        entries = scene.entries.copy()
        entries[slots // 16, :, slots % 16] = 0xFF  # NaN in entries that have left the window
        scene = replace(scene, entries=entries)
        layout = layout_of("BLNHC", entry, block_size=16, num_blocks=180)
        q = self.query(entry, 2, 1, 2)
        _, lse = self.decode(q, scene.cache(layout, 0), scene, 0, window=40)
        assert np.isfinite(np.asarray(lse)).all()

    @pytest.mark.parametrize("window", [None, 70, 2**31])
    def test_a_plan_of_the_step_changes_no_bits(self, window):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        q = self.query(entry, len(scene.lengths), 2, 8)
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        plan = self.run(jaxkv.plan_decode, cache, tables, lengths, num_heads=8, q_len=2, window=window)
        planned = self.decode(q, cache, scene, 1, window=window, plan=plan)
        for a, b in zip(planned, self.decode(q, cache, scene, 1, window=window), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("cap", [1.5, 50.0, 1e4, 2.0**126])
    def test_logit_cap(self, cap):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        layout = layout_of("LHBNC", entry, num_heads=2)
        self.check(self.query(entry, len(scene.lengths), 1, 4), scene.cache(layout, 1), scene, 1, logit_cap=cap)

    def test_keys_of_very_low_scores_count(self):
        self.check_low_scores("BLNHC", 6)

    @pytest.mark.parametrize("block_size", [1, 3, 16, 61])
    def test_odd_block_sizes(self, block_size):
        entry = self.entry("bf16")
        scene = scenes.scene(entry, num_heads=2, block_size=block_size)
        layout = layout_of("BLHNC", entry, num_heads=2, block_size=block_size)
        self.check(self.query(entry, len(scene.lengths), 1, 4), scene.cache(layout, 1), scene, 1)

    def test_one_scale_for_all_heads_is_the_same_scale_for_each(self):
        entry = self.entry("fp8")
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.twin(layout_of("BLNHC", entry, num_heads=2))
        q = self.query(entry, len(scene.lengths), 1, 4)
        one = self.decode(q, cache, scene, 0, k_scale=0.02, v_scale=0.03)
        each = self.decode(q, cache, scene, 0, k_scale=jnp.full(2, 0.02), v_scale=jnp.full(2, 0.03))
        for a, b in zip(one, each, strict=True):
            assert_same_bits(a, b)


class KVWindowsOfBothSides(DecodeKVChecks):
    """`decode_kv(..., window=(left, right))`."""

    @each_value(("window", "tokens", "options"), BOTH_SIDES, TOKENS, OPTIONS, default=4)
    def test_without_a_causal_mask(self, window, tokens, options):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        q = self.query(entry, len(scene.lengths), tokens, 6)
        self.check(q, cache, scene, 1, window=window, causal=False, **options_of(options, 6))

    @each_value(("window", "options"), BOTH_SIDES, OPTIONS, default=2)
    def test_ragged_query_tokens(self, window, options):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        edges = np.cumsum([0, 0, 3, 7, 1, 65, 70])  # also more tokens than a request has
        q = self.query(entry, 1, edges[-1] + 3, 6)[0]  # with three tokens of no request
        keywords = {"window": window, "causal": False, **options_of(options, 6)}
        sums, requests = on_device(edges), (on_device(scene.tables), on_device(scene.lengths, jnp.int32))
        found = self.decode(q, cache, scene, 1, cu_q_lens=sums, **keywords)
        rows = [q[a:b] for a, b in itertools.pairwise(edges)]
        check_ragged(found, self.truth(rows, scene, **keywords), edges, 64 if q.dtype == jnp.float32 else 4)
        ragged = {"window": window, "causal": False, "cu_q_lens": sums, "total": len(q)}
        plan = self.run(jaxkv.plan_decode, cache, *requests, num_heads=6, dtype=q.dtype, **ragged)
        planned = self.decode(q, cache, scene, 1, cu_q_lens=sums, plan=plan, **keywords)
        for a, b in zip(planned, found, strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize(
        ("window", "same"), [((63, -1), 64), ((49, 7), 50), further((-1, 3), None), further((0, 0), 1)]
    )
    def test_with_a_causal_mask_they_are_those_of_one_side(self, window, same):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        q = self.query(entry, len(scene.lengths), 3, 6)
        right = self.check(q, cache, scene, 1, window=same)
        for a, b in zip(self.decode(q, cache, scene, 1, window=window), right, strict=True):
            assert_same_bits(a, b)

    def test_limits_of_any_size(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        q = self.query(entry, len(scene.lengths), 3, 6)
        for window in (2**40, 1), (1, 2**40), (2**31 - 2, 2**31 - 2), (2**31, 2**31):
            self.check(q, cache, scene, 1, window=window, causal=False)
        edges = np.arange(len(scene.lengths) + 1) * 3
        for window in (2**31 - 2, 1), (1, 2**31 - 2), (1, 2**31 - 1), (2**40, 2**40):
            keywords = {"window": window, "causal": False}
            found = self.decode(q.reshape(-1, *q.shape[2:]), cache, scene, 1, cu_q_lens=on_device(edges), **keywords)
            check_ragged(found, self.truth(q, scene, **keywords), edges, 64 if q.dtype == jnp.float32 else 4)

    @pytest.mark.parametrize("ragged", [further(False), True])
    def test_tokens_that_no_query_token_sees_do_not_matter(self, ragged):
        entry = self.entry()
        scene, layout = scenes.scene(entry, num_heads=2, lengths=(130, 70)), layout_of("BLNHC", entry, num_heads=2)
        q, keywords = self.query(entry, 2, 4, 4), {"window": (20, 1), "causal": False}
        if ragged:
            q, keywords["cu_q_lens"] = q.reshape(8, *q.shape[2:])[1:], on_device([0, 3, 7])
        right = self.decode(q, scene.cache(layout, 1), scene, 1, **keywords)
        broken = scene.holding(np.nan, 0, 106 if ragged else 105).holding(np.nan, 1, 45)  # just before the windows
        for a, b in zip(self.decode(q, broken.cache(layout, 1), broken, 1, **keywords), right, strict=True):
            assert_same_bits(a, b)

    def test_plans_are_for_one_window(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache, q = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), self.query(entry, len(scene.lengths), 3, 6)
        requests = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        plan = self.run(jaxkv.plan_decode, cache, *requests, num_heads=6, q_len=3, window=(20, 1), causal=False)
        right = self.decode(q, cache, scene, 1, window=(20, 1), causal=False)
        planned = self.decode(q, cache, scene, 1, window=(20, 1), causal=False, plan=plan)
        for a, b in zip(planned, right, strict=True):
            assert_same_bits(a, b)
        with pytest.raises(ValueError, match=r"`plan` was made for .*ahead=1.*: expected one for .*ahead=0"):
            self.decode(q, cache, scene, 1, window=(20, 1), plan=plan)


class UnseenByKV(DecodeKVChecks):
    """What `decode_kv` promises where values are no product with a weight of 0 for queries that do not see them."""

    @every_format
    def test_a_query_depends_on_nothing_that_it_does_not_see(self, form):
        entry = self.entry(form)
        scene, layout = scenes.scene(entry, num_heads=2, lengths=(130, 3)), layout_of("BLNHC", entry, num_heads=2)
        q = self.query(entry, 2, 3, 4)
        right = self.decode(q, scene.cache(layout, 1), scene, 1, window=101)
        nan = 0xFF if entry.dtype == jnp.uint8 else np.nan
        broken = scene.holding(nan, 0, 129).holding(nan, 0, 27)  # what only the last, the first sees
        for a, b in zip(self.decode(q, broken.cache(layout, 1), broken, 1, window=101), right, strict=True):
            assert_same_bits(a[0, 1], b[0, 1])
            assert_same_bits(a[1], b[1])
            assert np.isnan(np.asarray(a[0, ::2], np.float32)).all()

    def test_tokens_outside_a_window_of_both_sides_do_not_matter(self):
        entry = self.entry()
        scene, layout = scenes.scene(entry, num_heads=2, lengths=(130, 70)), layout_of("BLNHC", entry, num_heads=2)
        q, keywords = self.query(entry, 2, 4, 4), {"window": (20, 1), "causal": False}
        right = self.decode(q, scene.cache(layout, 1), scene, 1, **keywords)
        # Of tokens 126 to 129: no window includes 105, only the first one's 106, and the last two's 129.
        broken = scene.holding(np.nan, 0, 105).holding(np.nan, 0, 106).holding(np.nan, 0, 129)
        for a, b in zip(self.decode(q, broken.cache(layout, 1), broken, 1, **keywords), right, strict=True):
            assert_same_bits(a[0, 1], b[0, 1])
            assert_same_bits(a[1], b[1])
            assert np.isnan(np.asarray(a[0, [0, 2, 3]], np.float32)).all()

    def test_infinite_values_are_those_of_their_column(self):
        entry = self.entry()
        scene, layout = scenes.scene(entry, num_heads=2, lengths=(130, 3)), layout_of("BLNHC", entry, num_heads=2)
        q = self.query(entry, 2, 3, 4)
        right, right_lse = (np.array(x) for x in self.decode(q, scene.cache(layout, 1), scene, 1))
        for position, column, value in ((128, 0, np.inf), (129, 0, -np.inf), (129, 1, -np.inf), (5, 2, np.nan)):
            scene = scene.holding(value, 0, position, entry.head_dim + column)
        right[0, 1, :, 0], right[0, 2, :, 0], right[0, 2, :, 1], right[0, :, :, 2] = np.inf, np.nan, -np.inf, np.nan
        out, lse = self.decode(q, scene.cache(layout, 1), scene, 1)
        assert_close(out, right, roundings=0)
        assert_same_bits(lse, right_lse)
