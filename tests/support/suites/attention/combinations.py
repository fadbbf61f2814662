"""All combinations of the options that decide which tokens a query token attends to, and with which weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.masks import Chunked
from support import scenes
from support.arrays import on_device
from support.cases import each_value
from support.suites.attention.decode_kv import DecodeKVChecks
from support.suites.attention.decode_mla import DecodeMLAChecks, queries
from support.suites.attention.masks import every_third
from support.suites.base import check_ragged, layout_of

RAGGED = (0, 3, 7, 1, 65, 70)
"""Query tokens of each request; the first has no tokens, and others have more query tokens than tokens."""
AXES = {
    "window": [(3, 2), None, (64, 64), 20, (127, -1), (-1, 127), (-1, 2), (0, 0)],
    "tokens": [5, 1, 70, RAGGED, 2],
    "causal": [False, True],
    "mask": [Chunked(48), "tree", None, every_third],
    "sinks": [True, False],
    "logit_cap": [2.0, None],
}
"""The values of each argument; `tokens` are query tokens per request.  Another option of attention is another axis."""


def is_call(window, tokens, causal, mask, *others):
    """Whether the operations accept the combination: windows that are a number, and trees, need a causal mask."""
    return causal or not (isinstance(window, int) or mask == "tree")


def random_tree(tokens):
    """Which new tokens each query token sees, [B, Q, Q] or, of ragged ones, [T, J]."""
    shape = (sum(RAGGED) + 3, max(RAGGED)) if tokens is RAGGED else (len(RAGGED), tokens, tokens)
    return np.random.default_rng(5).random(shape) < 0.4


class Combinations:
    """One of the operations with all combinations of `AXES`, compared with float64."""

    @each_value(tuple(AXES), *AXES.values(), default=0, valid=is_call)
    def test_options(self, window, tokens, causal, mask, sinks, logit_cap):
        entry = self.entry()
        heads = 1 if entry.one_head else 2
        scene = scenes.scene(entry, num_heads=heads)
        cache = scene.cache(layout_of("BLNHC", entry, num_heads=heads), 1)
        options = {"window": window, "causal": causal, "logit_cap": logit_cap}
        options["sinks"] = jnp.linspace(-2.0, 3.0, 6) if sinks else None
        if mask == "tree":
            options["tree_mask"] = random_tree(tokens)
        else:
            options["mask"] = mask
        if tokens is not RAGGED:
            self.check(self.drawn(entry, len(scene.lengths), tokens), cache, scene, 1, **options)
            return
        edges = np.cumsum([0, *RAGGED])
        q = jax.tree.map(lambda x: x[0], self.drawn(entry, 1, edges[-1] + 3))  # with three tokens of no request
        found = self.decode(q, cache, scene, 1, cu_q_lens=on_device(edges), **options)
        if mask == "tree":
            options["tree_mask"] = [options["tree_mask"][a:b] for a, b in itertools.pairwise(edges)]
        rows = jax.tree.map(lambda x: [x[a:b] for a, b in itertools.pairwise(edges)], q)
        check_ragged(found, self.truth(rows, scene, **options), edges, 64 if found[0].dtype == jnp.float32 else 4)


class MLACombinations(Combinations, DecodeMLAChecks):
    """`decode_mla`."""

    def drawn(self, entry, batch, tokens):
        """Queries of six heads."""
        return queries(entry, batch, tokens, 6)


class KVCombinations(Combinations, DecodeKVChecks):
    """`decode_kv`."""

    def drawn(self, entry, batch, tokens):
        """Queries of six heads."""
        return self.query(entry, batch, tokens, 6)
