"""Attention of query tokens that see trees of new tokens, and what masks of positions show."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import masks
from support import scenes
from support.arrays import on_device
from support.cases import each_value, further, slow
from support.compare import assert_same_bits
from support.suites.attention.decode_kv import OPTIONS, DecodeKVChecks, options_of
from support.suites.attention.decode_mla import DecodeMLAChecks, queries, roundings_of
from support.suites.base import check_ragged, layout_of

EDGES = np.cumsum([0, 0, 3, 7, 1, 65, 5])
"""Ragged query tokens of the requests of a scene, of which some have more than tokens."""


def on_some_layouts(entries, first=pytest.param):
    """Parametrises `entry` and `name`.  Entries are reached as without masks, so that most pairs are slow."""
    some = {("bf16", "LBNHC"): first, ("bf16", "gaps, offset"): further, ("fp8", "packed, bfloat16"): further}
    pairs = [(entry, name) for entry in entries for name in scenes.layout_names(entry)]
    cases = [some.get((entry.format, name), slow)(entry, name) for entry, name in pairs]
    return pytest.mark.parametrize(("entry", "name"), cases)


def tree_of(rng, tokens):
    """A random tree of new tokens, bool [tokens, tokens]: each sees itself, its parent, and what that one sees."""
    seen = np.eye(tokens, dtype=bool)
    for token in range(1, tokens):
        parent = rng.integers(-1, token)
        seen[token] |= seen[parent] if parent >= 0 else False
    return seen


def trees(requests, tokens, kind="tree"):
    """bool [B, Q, Q]: trees, or with kind "any" matrices in which tokens also see later ones, or not themselves."""
    rng = np.random.default_rng(5)
    found = [tree_of(rng, tokens) if kind == "tree" else rng.random((tokens, tokens)) < 0.4 for _ in range(requests)]
    return np.stack(found)


class KVMaskChecks(DecodeKVChecks):
    """Compares calls on keys and values with the oracle."""

    def masked(self, tokens, **keywords):
        """Compares calls with `tokens` query tokens per request."""
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        self.check(self.query(entry, len(scene.lengths), tokens, 6), cache, scene, 1, **keywords)

    def masked_ragged(self, *, tree=False, **keywords):
        """Compares ragged calls, with and without a plan."""
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1)
        q, sums = self.query(entry, 1, EDGES[-1] + 3, 6)[0], on_device(EDGES)  # with three tokens of no request
        given, rows = dict(keywords), [q[a:b] for a, b in itertools.pairwise(EDGES)]
        if tree:
            given["tree_mask"] = np.random.default_rng(5).random((len(q), 65)) < 0.4
            keywords["tree_mask"] = [given["tree_mask"][a:b] for a, b in itertools.pairwise(EDGES)]
        found = self.decode(q, cache, scene, 1, cu_q_lens=sums, **given)
        check_ragged(found, self.truth(rows, scene, **keywords), EDGES, roundings_of(q))
        requests = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        planned = {name: given[name] for name in given.keys() & {"window", "causal", "mask", "tree_mask"}}
        planned |= {"num_heads": 6, "dtype": q.dtype, "cu_q_lens": sums, "total": len(q)}
        plan = self.run(jaxkv.plan_decode, cache, *requests, **planned)
        for a, b in zip(self.decode(q, cache, scene, 1, cu_q_lens=sums, plan=plan, **given), found, strict=True):
            assert_same_bits(a, b)


class KVTreeMasks(KVMaskChecks):
    """`decode_kv(..., tree_mask=)`."""

    @each_value(
        ("tokens", "window", "options", "kind"), (5, 70, 2, 1), (None, 20, (3, 1)), OPTIONS, ("tree", "any"), default=1
    )
    def test_combinations(self, tokens, window, options, kind):
        self.masked(tokens, window=window, tree_mask=trees(6, tokens, kind), **options_of(options, 6))

    @each_value(("window", "options"), (None, 20, (3, 1)), OPTIONS, default=0)
    def test_ragged_query_tokens(self, window, options):
        self.masked_ragged(tree=True, window=window, **options_of(options, 6))

    @on_some_layouts(scenes.KV_ENTRIES)
    def test_layouts_and_formats(self, entry, name):
        entry = self.entry(entry.format)
        scene = scenes.scene(entry, num_heads=2)
        layout, q = layout_of(name, entry, num_heads=2), self.query(entry, len(scene.lengths), 5, 6)
        keywords = {"tree_mask": on_device(trees(6, 5))}
        found = self.check(q, scene.cache(layout, 1), scene, 1, **keywords)
        for a, b in zip(found, self.decode(q, scene.twin(layout), scene, 0, **keywords), strict=True):
            assert_same_bits(a, b)

    def test_a_tree_of_one_branch_is_a_causal_mask(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache, q = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), self.query(entry, len(scene.lengths), 5, 6)
        branch = np.broadcast_to(np.tri(5, dtype=bool), (6, 5, 5))
        self.check(q, cache, scene, 1, tree_mask=branch)
        assert (self.truth(q, scene, tree_mask=branch)[1][0] == self.truth(q, scene)[1][0]).all()

    def test_new_tokens_that_a_query_does_not_see_do_not_matter(self):
        entry = self.entry()
        scene, layout = scenes.scene(entry, num_heads=2, lengths=(130, 70)), layout_of("BLNHC", entry, num_heads=2)
        q, tree = self.query(entry, 2, 4, 4), np.stack([np.eye(4, dtype=bool), np.tri(4, dtype=bool)])
        right = self.decode(q, scene.cache(layout, 1), scene, 1, tree_mask=tree)
        broken = scene.holding(np.nan, 0, 127)  # the second new token
        for a, b in zip(self.decode(q, broken.cache(layout, 1), broken, 1, tree_mask=tree), right, strict=True):
            assert_same_bits(a[0, [0, 2, 3]], b[0, [0, 2, 3]])
            assert_same_bits(a[1], b[1])
            assert np.isnan(np.asarray(a[0, 1], np.float32)).all()

    def test_plans_are_for_trees(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache, q = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), self.query(entry, len(scene.lengths), 3, 6)
        requests, tree = (on_device(scene.tables), on_device(scene.lengths, jnp.int32)), trees(6, 3)
        plan = self.run(jaxkv.plan_decode, cache, *requests, num_heads=6, q_len=3, tree_mask=tree, dtype=q.dtype)
        right = self.decode(q, cache, scene, 1, tree_mask=tree)
        for a, b in zip(self.decode(q, cache, scene, 1, tree_mask=tree, plan=plan), right, strict=True):
            assert_same_bits(a, b)
        with pytest.raises(ValueError, match=r"`plan` was made for .*tree=3.*: expected one for .*tree=None"):
            self.decode(q, cache, scene, 1, plan=plan)


class MLATreeMasks(DecodeMLAChecks):
    """`decode_mla(..., tree_mask=)`."""

    @each_value(
        ("tokens", "window", "options", "kind"), (5, 70, 2, 1), (None, 20, (3, 1)), OPTIONS, ("tree", "any"), default=0
    )
    def test_combinations(self, tokens, window, options, kind):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, len(scene.lengths), tokens, self.heads)
        keywords = {"window": window, "tree_mask": trees(6, tokens, kind), **options_of(options, self.heads)}
        self.check(q, cache, scene, 1, **keywords)

    @each_value(("window", "options"), (None, 20, (3, 1)), OPTIONS, default=0)
    def test_ragged_query_tokens(self, window, options):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, 1, EDGES[-1] + 3, self.heads)
        q, tree = [x[0] for x in q], np.random.default_rng(5).random((EDGES[-1] + 3, 65)) < 0.4
        keywords = {"window": window, **options_of(options, self.heads)}
        found = self.decode(q, cache, scene, 1, cu_q_lens=on_device(EDGES), tree_mask=tree, **keywords)
        rows, seen = ([[x[a:b] for a, b in itertools.pairwise(EDGES)] for x in part] for part in (q, [tree]))
        check_ragged(found, self.truth(rows, scene, tree_mask=seen[0], **keywords), EDGES, roundings_of(found[0]))

    @on_some_layouts(scenes.MLA_ENTRIES, first=further)
    def test_layouts_and_formats(self, entry, name):
        entry = self.entry(entry.format)
        scene, layout = scenes.scene(entry), layout_of(name, entry)
        q, keywords = queries(entry, len(scene.lengths), 5, self.heads), {"tree_mask": on_device(trees(6, 5))}
        found = self.check(q, scene.cache(layout, 1), scene, 1, **keywords)
        for a, b in zip(found, self.decode(q, scene.twin(layout), scene, 0, **keywords), strict=True):
            assert_same_bits(a, b)


def every_third(query, key):
    """A mask by which query tokens see no intervals."""
    return (query - key) % 3 == 0


INTERVALS = masks.Chunked(48), masks.Chunked(128), masks.Prefix(3) | masks.Sliding(20, 2), masks.Prefix(70)
MASKS = (*INTERVALS, masks.Chunked(32) & (masks.Prefix(9) | masks.Sliding(-1, 1)), every_third)


class KVMasks(KVMaskChecks):
    """`decode_kv(..., mask=)`."""

    @each_value(("mask", "tokens", "causal"), MASKS, (3, 1, 70), (True, False), default=1)
    def test_combinations(self, mask, tokens, causal):
        self.masked(tokens, mask=mask, causal=causal)

    @each_value(("mask", "window", "options"), MASKS[2:], (20, (9, 1)), ("sinks", "logit_cap"), default=0)
    def test_with_a_window(self, mask, window, options):
        self.masked(3, mask=mask, window=window, causal=isinstance(window, int), **options_of(options, 6))

    @each_value(("mask", "window", "options"), MASKS[2:], (None, (9, 1)), OPTIONS, default=0)
    def test_with_a_tree(self, mask, window, options):
        self.masked(5, mask=mask, window=window, tree_mask=trees(6, 5), **options_of(options, 6))

    @each_value(("mask", "window", "tree"), MASKS[1:], (None, 20), (False, True), default=0)
    def test_ragged_query_tokens(self, mask, window, tree):
        self.masked_ragged(mask=mask, window=window, tree=tree)

    @pytest.mark.parametrize("mask", [INTERVALS[0], further(INTERVALS[2]), further(every_third)])
    def test_tokens_that_no_query_sees_may_hold_anything(self, mask):
        entry = self.entry()
        scene, layout = scenes.scene(entry, num_heads=2, lengths=(230, 70)), layout_of("BLNHC", entry, num_heads=2)
        q, broken = self.query(entry, 2, 2, 4), scene
        for request, length in enumerate(scene.lengths):
            for position in range(length):
                if not np.asarray(mask(length - 2 + np.arange(2), position)).any():
                    broken = broken.holding(np.nan, request, position)
        right = self.decode(q, scene.cache(layout, 1), scene, 1, mask=mask)
        for a, b in zip(self.decode(q, broken.cache(layout, 1), broken, 1, mask=mask), right, strict=True):
            assert_same_bits(a, b)
        assert broken is not scene

    @pytest.mark.ci
    def test_plans_are_for_one_mask(self):
        entry = self.entry()
        scene = scenes.scene(entry, num_heads=2)
        cache, q = scene.cache(layout_of("BLNHC", entry, num_heads=2), 1), self.query(entry, len(scene.lengths), 3, 6)
        requests, keywords = (on_device(scene.tables), on_device(scene.lengths, jnp.int32)), {"mask": INTERVALS[2]}
        plan = self.run(jaxkv.plan_decode, cache, *requests, num_heads=6, q_len=3, dtype=q.dtype, **keywords)
        right = self.decode(q, cache, scene, 1, **keywords)
        for a, b in zip(self.decode(q, cache, scene, 1, plan=plan, **keywords), right, strict=True):
            assert_same_bits(a, b)
        with pytest.raises(ValueError, match=r"`plan` was made for .*Prefix.*: expected one for .*mask=None"):
            self.decode(q, cache, scene, 1, plan=plan)


class MLAMasks(DecodeMLAChecks):
    """`decode_mla(..., mask=)`."""

    @each_value(("mask", "tokens", "options"), MASKS, (3, 1), OPTIONS, default=0)
    def test_combinations(self, mask, tokens, options):
        entry = self.entry()
        scene = scenes.scene(entry)
        cache, q = scene.cache(layout_of("BLNHC", entry), 1), queries(entry, len(scene.lengths), tokens, self.heads)
        self.check(q, cache, scene, 1, mask=mask, causal=tokens > 1, **options_of(options, self.heads))
