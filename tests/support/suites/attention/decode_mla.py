"""Dense MLA decode: bit-identical to the packed cache, equal to the oracle up to rounding, with NaN in unused slots."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import oracle, scenes
from support.arrays import as_float64, on_device
from support.cases import each_format, each_value, further, on_layouts
from support.compare import EPSILON, assert_close, assert_same_bits
from support.suites.attention.decode_kv import BOTH_SIDES, OPTIONS, TOKENS, options_of
from support.suites.base import (
    CLAMPED,
    OUTSIDE,
    Suite,
    check_ragged,
    dtype_of,
    full_tables,
    layout_of,
    without_signs,
)

SCALE = 0.11

every_format = pytest.mark.parametrize("form", each_format(jaxkv.MLAEntry.formats))


def queries(entry, batch, tokens, heads, dtype=None, seed=7):
    """q_latent, q_pe [B, Q, Hq, n_i]."""
    rng = np.random.default_rng(seed)
    dtype = dtype or dtype_of(entry)
    return [on_device(rng.standard_normal((batch, tokens, heads, n)), dtype) for n in entry.sizes]


def roundings_of(out):
    """Scores round to float32 only; P and V round to the queries' dtype, and so does the result."""
    return 64 if out.dtype == jnp.float32 else 4


def assert_batch_invariant(lengths, heads, form="bf16"):
    """Requests of the given lengths have the same bits alone as together, by a batch-invariant plan."""
    entry, blocks = jaxkv.MLAEntry(form), sum(-(-length // 64) for length in lengths) + 4
    scene = scenes.scene(entry, lengths=lengths, num_blocks=blocks)
    cache = scene.cache(layout_of("BLNHC", entry, num_blocks=blocks), 1)
    q = queries(entry, len(lengths), 1, heads)
    tables, lengths = on_device(scene.tables), on_device(lengths, jnp.int32)

    def decode(rows):
        rows = on_device(rows)
        plan = jaxkv.plan_decode(cache, tables[rows], lengths[rows], num_heads=heads, batch_invariant=True)
        args = (*(x[rows] for x in q), cache, tables[rows], lengths[rows])
        return jaxkv.decode_mla(*args, layer=1, scale=0.11, return_lse=True, plan=plan, **scene.scale_arguments())

    together = decode(range(len(lengths))[::-1])
    for row in range(len(lengths)):
        for alone, reversed_ in zip(decode([row]), together, strict=True):
            assert_same_bits(alone[0], reversed_[-1 - row])


class DecodeMLAChecks(Suite):
    """Compares results of `decode_mla` with the oracle."""

    latent, rope = 128, 16
    exact = "f32"
    """The format of the tests that are not about formats."""
    tokens = 2
    heads = 3

    def entry(self, name=None):
        """An entry of that format, in sizes that the implementation supports."""
        return scenes.entry_of(jaxkv.MLAEntry, name or self.exact, self.latent, self.rope)

    def decode(self, q, cache, scene, layer, **keywords):
        """out and lse."""
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        keywords = {"scale": SCALE, "return_lse": True, **scene.scale_arguments(), **keywords}
        return self.run(jaxkv.decode_mla, *q, cache, tables, lengths, layer=layer, **keywords)

    def truth(self, q, scene, scale=SCALE, *, causal=True, window=None, mask=None, tree_mask=None, **keywords):
        """out and lse in float64; `q` holds arrays [B, Q, ...], or lists of B arrays [Q, ...]."""
        q_latent, q_pe = ([as_float64(x) for x in part] for part in q)
        found = []
        for request, length in enumerate(scene.lengths):
            tree = None if tree_mask is None else np.asarray(tree_mask[request])
            latent, rope = scene.parts(request)
            seen = oracle.seen_by_last(length, len(q_latent[request]), window, causal=causal, mask=mask, tree=tree)
            joined = np.concatenate([q_latent[request], q_pe[request]], axis=-1)
            keys_and_values = oracle.keys_and_values(scene.entry, latent, rope)
            found.append(oracle.attention(joined, *keys_and_values, scale, seen=seen, **keywords))
        return tuple(zip(*found, strict=True))

    def check(self, q, cache, scene, layer, **keywords):
        """Compares with the truth; returns the result."""
        out, lse = self.decode(q, cache, scene, layer, **keywords)
        right_out, right_lse = (np.stack(x) for x in self.truth(q, scene, **keywords))
        assert out.dtype == q[0].dtype
        assert_close(out, right_out, roundings=roundings_of(out), magnitude=1, what="out")
        assert_close(lse, right_lse, dtype="float32", roundings=64, magnitude=4, what="lse")
        return out, lse

    def check_low_scores(self, layout, heads, *, tokens=2, **sizes):
        """Keys count however low their finite scores are, and a query without keys is one none the less."""
        entry = self.entry()
        scene = without_signs(scenes.scene(entry, **sizes))
        q = [-abs(x) for x in queries(entry, len(scene.lengths), tokens, heads)]
        for scale in (1e30, 1e34):  # scores of some -1e32 and -1e36
            self.check(q, scene.cache(layout_of(layout, entry), 1), scene, 1, scale=scale)


class DecodeMLA(DecodeMLAChecks):
    """`decode_mla`."""

    @on_layouts(scenes.MLA_ENTRIES)
    def test_equals_the_packed_cache_and_the_oracle(self, entry, name):
        entry = self.entry(entry.format)
        scene = scenes.scene(entry)
        layout = layout_of(name, entry)
        q = queries(entry, len(scene.lengths), self.tokens, self.heads)
        out, lse = self.check(q, scene.cache(layout, 1), scene, 1)
        packed_out, packed_lse = self.decode(q, scene.twin(layout), scene, 0)
        assert_same_bits(out, packed_out)
        assert_same_bits(lse, packed_lse)

    @every_format
    def test_random_bytes_round_about(self, form):
        entry = self.entry(form)
        quiet, noisy = scenes.scene(entry), scenes.scene(entry, kind="random")
        layout = layout_of("BLNHC", entry)
        q = queries(entry, len(quiet.lengths), 1, 16)
        for a, b in zip(
            self.decode(q, quiet.cache(layout, 1), quiet, 1),
            self.decode(q, noisy.cache(layout, 1), noisy, 1),
            strict=True,
        ):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("block_size", [1, 3, 16, 61])
    def test_odd_block_sizes(self, block_size):
        entry = self.entry()
        scene = scenes.scene(entry, block_size=block_size)
        layout = layout_of("packed, uint8", entry, block_size=block_size)
        self.check(queries(entry, len(scene.lengths), self.tokens, self.heads), scene.cache(layout, 1), scene, 1)

    @pytest.mark.parametrize("q_scale", [None, further(0.3), further(np.linspace(0.1, 0.7, 3, dtype=np.float32))])
    def test_queries_of_e4m3(self, q_scale):
        entry = self.entry("fp8")
        scene = scenes.scene(entry)
        cache = scene.cache(layout_of("BLNHC", entry), 1)
        q = queries(entry, len(scene.lengths), 2, 3, "float8_e4m3fn")
        out, lse = self.decode(q, cache, scene, 1, q_scale=q_scale)
        right = self.truth(
            [oracle.without_scale(x, 1 if q_scale is None else q_scale, dtype_of(entry)) for x in q], scene
        )
        assert out.dtype == dtype_of(entry)
        assert_close(out, np.stack(right[0]), roundings=4, magnitude=1)
        assert_close(lse, np.stack(right[1]), roundings=64, magnitude=4)

    @pytest.mark.parametrize("heads", [1, 9, 128])
    def test_head_counts(self, heads):
        entry = self.entry("bf16")
        scene = scenes.scene(entry)
        self.check(queries(entry, len(scene.lengths), 1, heads), scene.cache(layout_of("BLNHC", entry), 0), scene, 0)

    @pytest.mark.parametrize("tokens", [1, 4, 70])
    def test_several_query_tokens_are_causal_at_the_end(self, tokens):
        entry = self.entry()
        scene = scenes.scene(entry)
        self.check(queries(entry, len(scene.lengths), tokens, 2), scene.cache(layout_of("BLNHC", entry), 2), scene, 2)

    def test_without_a_token_axis(self):
        entry = self.entry("bf16")
        scene = scenes.scene(entry)
        cache = scene.twin(layout_of("BLNHC", entry))
        q = queries(entry, len(scene.lengths), 1, 4)
        with_axis = self.decode(q, cache, scene, 0)
        without = self.decode([x[:, 0] for x in q], cache, scene, 0)
        for a, b in zip(with_axis, without, strict=True):
            assert_same_bits(a[:, 0], b)
        assert_same_bits(self.decode(q, cache, scene, 0, return_lse=False), with_axis[0])

    def test_a_plan_of_the_step_changes_no_bits(self):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, len(scene.lengths), 2, 16)
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        plan = self.run(jaxkv.plan_decode, cache, tables, lengths, num_heads=16, q_len=2)
        for a, b in zip(self.decode(q, cache, scene, 1, plan=plan), self.decode(q, cache, scene, 1), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("cap", [2.0, 50.0, 1e4, 2.0**126])
    def test_logit_cap(self, cap):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache = scene.cache(layout_of("LBNHC", entry), 1)
        self.check(queries(entry, len(scene.lengths), 2, 3), cache, scene, 1, logit_cap=cap)

    @each_value(("window", "tokens"), [1, 63, 64, 1000, 2**40], [1, 3])
    def test_window(self, window, tokens):
        entry = self.entry()
        scene = scenes.scene(entry)
        q = queries(entry, len(scene.lengths), tokens, self.heads)
        self.check(q, scene.cache(layout_of("BLNHC", entry), 0), scene, 0, window=window)

    def test_latents_without_a_rotary_part(self):
        entry = replace(self.entry(), rope=0)
        scene = scenes.scene(entry)
        q = queries(entry, len(scene.lengths), self.tokens, self.heads)
        self.check(q, scene.cache(layout_of("BLNHC", entry), 1), scene, 1)

    def test_sinks(self):
        entry = self.entry()
        scene = scenes.scene(entry)
        q, sinks = queries(entry, len(scene.lengths), 2, 3), on_device([-1e30, 0.5, 3.0])
        _, lse = self.check(q, scene.cache(layout_of("BLNHC", entry), 1), scene, 1, sinks=sinks)
        assert_same_bits(lse, self.decode(q, scene.cache(layout_of("BLNHC", entry), 1), scene, 1)[1])

    def test_without_a_causal_mask(self):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, len(scene.lengths), 4, self.heads)
        self.check(q, cache, scene, 1, causal=False, sinks=jnp.arange(self.heads, dtype=jnp.float32))

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("counts", [(0, 1, 7, 1, 65, 3), (1, 1, 1, 1, 0, 1)])
    def test_ragged_query_tokens(self, counts, causal):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, edges = scene.cache(layout_of("BLNHC", entry), 1), np.cumsum([0, *counts])
        q = [x[0] for x in queries(entry, 1, edges[-1] + 3, self.heads)]  # with three tokens of no request
        keywords = {"cu_q_lens": on_device(edges), "causal": causal}
        found = self.decode(q, cache, scene, 1, **keywords)
        rows = [[x[a:b] for a, b in itertools.pairwise(edges)] for x in q]
        check_ragged(found, self.truth(rows, scene, causal=causal), edges, roundings_of(found[0]))
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        plan = self.run(
            jaxkv.plan_decode,
            cache,
            tables,
            lengths,
            num_heads=self.heads,
            total=len(q[0]),
            dtype=q[0].dtype,
            **keywords,
        )
        for a, b in zip(self.decode(q, cache, scene, 1, plan=plan, **keywords), found, strict=True):
            assert_same_bits(a, b)

    def test_keys_of_very_low_scores_count(self):
        self.check_low_scores("BLNHC", self.heads)

    def test_queries_of_float32_on_quantised_entries(self):
        for entry in (self.entry("fp8"), self.entry("fp8_ds_mla")):
            scene = scenes.scene(entry)
            cache = scene.cache(layout_of("BLNHC", entry), 1)
            self.check(queries(entry, len(scene.lengths), 1, 3, jnp.float32), cache, scene, 1)

    def test_quantised_entries_of_odd_sizes(self):
        entry = jaxkv.MLAEntry("fp8", latent=77, rope=14)  # 91 bytes: of any two tokens, one begins at an odd address
        scene = scenes.scene(entry)
        layout = jaxkv.CacheLayout(num_layers=3, num_blocks=scenes.BLOCKS, block_size=64, entry=entry)
        self.check(queries(entry, len(scene.lengths), self.tokens, self.heads), scene.cache(layout, 1), scene, 1)

    @pytest.mark.parametrize("power", [-60, 60])
    @pytest.mark.parametrize("form", ["bf16", "fp8", "fp8_ds_mla"])
    def test_queries_of_any_magnitude(self, form, power):
        entry = self.entry(form)
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, len(scene.lengths), 1, 3)
        moved = [x * jnp.asarray(2.0**power, x.dtype) for x in q]
        for a, b in zip(
            self.decode(q, cache, scene, 1), self.decode(moved, cache, scene, 1, scale=SCALE * 2.0**-power), strict=True
        ):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("form", ["fp8", "fp8_ds_mla"])
    def test_a_nan_in_a_quantised_entry_is_seen(self, form):
        entry = self.entry(form)
        whole = scenes.scene(entry)
        request = int(np.argmax(whole.lengths))
        block = whole.tables[request, 0]
        for byte in (0x7F, 0xFF):
            entries = whole.entries.copy()
            entries[block, 0, 1, 2] = byte
            broken, layout = replace(whole, entries=entries), layout_of("BLNHC", entry)
            q = queries(entry, len(whole.lengths), 1, 3)
            before, _ = self.decode(q, whole.cache(layout, 1), whole, 1)
            after, lse = self.decode(q, broken.cache(layout, 1), broken, 1)
            others = np.arange(len(whole.lengths)) != request
            assert np.isnan(np.asarray(after[request], np.float32)).all()
            assert np.isnan(np.asarray(lse[request])).all()
            assert_same_bits(after[others], before[others])

    def test_scales_of_both_signs_that_are_not_powers_of_two(self):
        """Products of values and scales may be rounded to bf16, which scores show, and with them lse."""
        entry, rng = jaxkv.MLAEntry("fp8_ds_mla"), np.random.default_rng(5)
        scene = scenes.scene(entry, lengths=(70, 3))
        for request, signs in enumerate(((-1, 1), (-1,))):
            for position in range(scene.lengths[request]):
                scales = 1.37 * rng.choice(signs, 4) * 2.0 ** rng.integers(-11, -8, 4)
                scene = scene.holding(scales.astype(np.float32).view(np.uint8), request, position, slice(512, 528))
        q = queries(entry, 2, 1, 16)
        out, lse = self.decode(q, scene.cache(layout_of("BLNHC", entry), 1), scene, 1)
        right_out, right_lse = (np.stack(x) for x in self.truth(q, scene))
        assert_close(out, right_out, roundings=4, magnitude=1)
        assert_close(lse, right_lse, dtype="bfloat16", roundings=1, magnitude=1)

    def test_many_small_weights_add_up_on_quantised_entries(self):
        entry, tokens, power = self.entry("fp8"), 2500, 25.5
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=40, block_size=64, entry=entry)
        # The first token outweighs every other one by 2**power, and has no value where they have 448.
        latent = np.zeros((tokens, entry.latent), np.float32)
        latent[0, 0], latent[1:, 1] = 16, 448
        cache = jaxkv.write_mla(
            jaxkv.KVCache.zeros(layout), jnp.asarray(latent), jnp.zeros((tokens, entry.rope)), jnp.arange(tokens),
            layer=0, kv_scale=1.0, implementation="xla",
        )  # fmt: skip
        q = jnp.zeros((1, 1, 16, entry.latent), jnp.bfloat16).at[..., 0].set(1)
        out = self.run(
            jaxkv.decode_mla, q, jnp.zeros((1, 1, 16, entry.rope), jnp.bfloat16), cache, jnp.arange(40)[None],
            on_device([tokens]), layer=0, kv_scale=1.0, scale=power * np.log(2) / 16,
        )  # fmt: skip
        rest = (tokens - 1) * 2.0**-power
        # All weights but one are the same number: their rounding, and that of the result, do not average out.
        expected = 448 * rest / (1 + rest)
        np.testing.assert_allclose(np.asarray(out[..., 1], np.float32), expected, rtol=4 * EPSILON["bfloat16"])

    def test_lengths_far_apart_in_one_batch(self):
        entry = self.entry()
        scene = scenes.scene(entry, block_size=16, lengths=(1, 0, 2500, 3, 17), num_blocks=170)
        layout = layout_of("BLNHC", entry, block_size=16, num_blocks=170)
        self.check(queries(entry, 5, 1, 2), scene.cache(layout, 0), scene, 0)

    def test_large_scores(self):
        entry = self.entry()
        scene = scenes.scene(entry)
        q = [x * 300 for x in queries(entry, len(scene.lengths), 1, 3)]
        out, lse = self.decode(q, scene.twin(layout_of("BLNHC", entry)), scene, 0)
        assert np.isfinite(np.asarray(out)).all()
        # Float32 scores of 3e3 carry errors of 3e-4, which float32 results show.
        right_out, right_lse = (np.stack(x) for x in self.truth(q, scene))
        assert_close(out, right_out, roundings=2**14 if out.dtype == jnp.float32 else 4, magnitude=1)
        assert_close(lse, right_lse, roundings=64)

    def test_blocks_outside_the_cache_are_masked(self):
        entry = self.entry()
        scene = scenes.scene(entry, block_size=16, lengths=(48, 16, 32))
        layout = layout_of("BLNHC", entry, block_size=16)
        cache = scene.cache(layout, 0)
        q = queries(entry, 3, 1, 2)
        tables = scene.tables.copy()
        tables[0, 1], tables[1, 0], tables[2, 0] = scenes.BLOCKS, -7, 2**31 - 1
        out, lse = self.run(
            jaxkv.decode_mla, *q, cache, on_device(tables), on_device(scene.lengths), layer=0, scale=SCALE,
            return_lse=True,
        )  # fmt: skip
        keep = [np.r_[0:16, 32:48], np.r_[0:0], np.r_[16:32]]
        for request, kept in enumerate(keep):
            latent, rope = (part[kept] for part in scene.parts(request))
            joined = np.concatenate([np.asarray(x[request]) for x in q], axis=-1)
            right = oracle.attention(joined, *oracle.keys_and_values(entry, latent, rope), SCALE)
            assert_close(out[request], right[0], roundings=roundings_of(out), magnitude=1)
            assert_close(lse[request], right[1], roundings=64, magnitude=4)

    def test_lengths_outside_the_table_are_clamped_to_it(self):
        entry = self.entry()
        inside, outside = (replace(full_tables(entry), lengths=lengths) for lengths in (CLAMPED, OUTSIDE))
        cache, q = full_tables(entry).cache(layout_of("BLNHC", entry), 1), queries(entry, 4, 3, self.heads)
        tables, lengths = on_device(outside.tables), on_device(OUTSIDE, jnp.int32)
        plan = self.run(jaxkv.plan_decode, cache, tables, lengths, num_heads=self.heads, q_len=3)
        right = self.check(q, cache, inside, 1)
        for a, b in zip(self.decode(q, cache, outside, 1, plan=plan), right, strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_keys_that_a_query_does_not_see_do_not_matter(self, value):
        entry = self.entry()
        scene, ropes = scenes.scene(entry, lengths=(130, 70)), slice(entry.latent, None)
        q = queries(entry, 2, 3, self.heads)
        broken = scene.holding(value, 0, 129, ropes)
        found = self.decode(q, broken.cache(layout_of("BLNHC", entry), 1), broken, 1)
        for x, right, magnitude in zip(found, self.truth(q, scene), (1, 4), strict=True):
            roundings = roundings_of(x) if magnitude == 1 else 64
            for seen in (x[0, :2], right[0][:2]), (x[1], right[1]):
                assert_close(*seen, roundings=roundings, magnitude=magnitude)
            assert not np.isfinite(np.asarray(x[0, 2], np.float32)).all()

    def test_traced_layer_outside_the_cache_is_empty(self):
        entry = self.entry("bf16")
        scene = scenes.scene(entry)
        cache = scene.cache(layout_of("BLNHC", entry), 1)
        out, lse = self.decode(queries(entry, 6, 1, 2), cache, scene, jnp.int32(3))
        assert not np.asarray(out).any()
        assert (np.asarray(lse) == -np.inf).all()

    def test_halves_merged_are_the_whole(self):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache = scene.cache(layout_of("BLNHC", entry), 1)
        q = queries(entry, len(scene.lengths), 1, 3)
        lengths = np.asarray(scene.lengths)
        first = np.minimum(lengths // 64 // 2 * 64 + 64, lengths)  # a block boundary, or all of it
        shifted = np.stack([np.roll(row, -(cut // 64)) for row, cut in zip(scene.tables, first, strict=True)])
        parts = [
            self.run(
                jaxkv.decode_mla, *q, cache, on_device(tables), on_device(n), layer=1, scale=SCALE, return_lse=True
            )
            for tables, n in ((scene.tables, first), (shifted, lengths - first))
        ]
        out, lse = jaxkv.merge_states(*zip(*parts, strict=True))
        right_out, right_lse = (np.stack(x) for x in self.truth(q, scene))
        assert_close(out, right_out, roundings=roundings_of(out), magnitude=1)
        assert_close(lse, right_lse, roundings=64, magnitude=4)

    def test_real_dimensions(self):
        for entry in (jaxkv.MLAEntry("bf16"), jaxkv.MLAEntry("fp8_ds_mla")):
            scene = scenes.scene(entry)
            layout = layout_of("BLNHC", entry)
            assert layout.entry.nbytes == {"bf16": 1152, "fp8_ds_mla": 656}[entry.format]
            q = queries(entry, len(scene.lengths), 1, 16)
            out, _ = self.decode(q, scene.cache(layout, 2), scene, 2)
            right, _ = self.truth(q, scene)
            assert_close(out, right, roundings=4, magnitude=1)


class MLAWindowsOfBothSides(DecodeMLAChecks):
    """`decode_mla(..., window=(left, right))`."""

    @each_value(("window", "tokens", "options"), BOTH_SIDES, TOKENS, OPTIONS, default=2)
    def test_without_a_causal_mask(self, window, tokens, options):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, len(scene.lengths), tokens, self.heads)
        self.check(q, cache, scene, 1, window=window, causal=False, **options_of(options, self.heads))

    @each_value(("window", "options"), BOTH_SIDES, OPTIONS, default=1)
    def test_ragged_query_tokens(self, window, options):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, edges = scene.cache(layout_of("BLNHC", entry), 1), np.cumsum([0, 0, 3, 7, 1, 65, 70])
        q = [x[0] for x in queries(entry, 1, edges[-1] + 3, self.heads)]  # with three tokens of no request
        keywords = {"window": window, "causal": False, **options_of(options, self.heads)}
        found = self.decode(q, cache, scene, 1, cu_q_lens=on_device(edges), **keywords)
        rows = [[x[a:b] for a, b in itertools.pairwise(edges)] for x in q]
        check_ragged(found, self.truth(rows, scene, **keywords), edges, roundings_of(found[0]))

    def test_without_a_token_axis(self):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, len(scene.lengths), 1, self.heads)
        right = self.check(q, cache, scene, 1, window=20)
        found = self.decode([x[:, 0] for x in q], cache, scene, 1, window=(19, 5), causal=False)
        for a, b in zip(found, right, strict=True):
            assert_same_bits(a, b[:, 0])


class UnseenByMLA(DecodeMLAChecks):
    """What `decode_mla` promises where values are no product with a weight of 0 for queries that do not see them."""

    @every_format
    def test_a_query_depends_on_nothing_that_it_does_not_see(self, form):
        entry, layout = self.entry(form), layout_of("BLNHC", self.entry(form))
        scene, q = scenes.scene(entry, lengths=(130, 3)), queries(entry, 2, 3, self.heads)
        right = self.decode(q, scene.cache(layout, 1), scene, 1)
        nan = 0xFF if entry.dtype == jnp.uint8 else np.nan
        broken = scene.holding(nan, 0, 128).holding(nan, 1, 2)
        for a, b in zip(self.decode(q, broken.cache(layout, 1), broken, 1), right, strict=True):
            assert_same_bits(a[0, :1], b[0, :1])
            assert_same_bits(a[1, :2], b[1, :2])
            assert np.isnan(np.asarray(a[0, 1:], np.float32)).all()
            assert np.isnan(np.asarray(a[1, 2:], np.float32)).all()
