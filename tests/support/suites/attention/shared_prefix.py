"""Attention to prefixes that requests share: what requests would see that had these tokens before their own."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import oracle, scenes
from support.arrays import as_float64, on_device
from support.cases import each_value, further, slow
from support.compare import assert_same_bits
from support.suites.attention.decode_kv import OPTIONS, DecodeKVChecks, options_of
from support.suites.attention.decode_mla import DecodeMLAChecks, queries
from support.suites.base import Suite, check_ragged, layout_of

PREFIXES, OWN = (130, 64, 0), (7, 0, 64, 3, 65)
"""Lengths of prefixes and of the own tokens of requests."""
OF = 0, 2, 0, -1, 1
"""The prefix of each request, if there are several."""
TOKENS = "ragged", 3, 1, "one, without an axis"
"""Query tokens per request."""
Q_LENS = 2, 1, 0, 5, 3
"""Those of ragged batches, which also have two tokens of no request."""
HEADS = 4
LAYER, SCALE = 1, 0.2


class SharedPrefixChecks(Suite):
    """Calls with prefixes, and what they are in float64."""

    def operation(self):
        """The operation."""
        raise NotImplementedError

    def drawn(self, rows):
        """Queries [rows, Hq, ...], a list of arrays."""
        raise NotImplementedError

    def keys_and_values(self, scene, request):
        """Keys and values [S, H, ...] in float64."""
        raise NotImplementedError

    def scene(self):
        """The prefixes, then the requests, and their cache."""
        entry, heads = self.entry(), self.kv_heads
        scene = scenes.scene(entry, num_heads=heads, lengths=(*PREFIXES, *OWN))
        return scene, scene.cache(layout_of("BLNHC", entry, num_heads=heads), LAYER)

    def attend(self, scene, cache, q, several, **keywords):
        """out and lse."""
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        count = len(PREFIXES)
        prefix = {"prefix_tables": tables[0], "prefix_lens": lengths[0]}
        if several:
            prefix = {"prefix_tables": tables[:count], "prefix_lens": lengths[:count], "prefix_of": on_device(OF)}
        requests, options = (tables[count:], lengths[count:]), {"scale": SCALE, "return_lse": True}
        return self.run(self.operation(), *q, cache, *requests, layer=LAYER, **options, **prefix, **keywords)

    def truth(self, scene, q, several, causal, **keywords):
        """out and lse in float64 of each request, whose queries are `q` [Q, Hq, ...]."""
        found = []
        for request, (rows, prefix) in enumerate(zip(q, OF if several else [0] * len(OWN), strict=True)):
            own = self.keys_and_values(scene, len(PREFIXES) + request)
            seen = oracle.seen_by_last(OWN[request], len(rows), causal=causal)
            if prefix >= 0:
                shared = self.keys_and_values(scene, prefix)
                own = [np.concatenate(pair) for pair in zip(shared, own, strict=True)]
                seen = np.concatenate([np.ones((len(rows), PREFIXES[prefix]), bool), seen], axis=1)
            found.append(oracle.attention(rows, *own, SCALE, seen=seen, **keywords))
        return tuple(zip(*found, strict=True))

    @each_value(("tokens", "several", "options", "causal"), TOKENS, [True, False], OPTIONS, [True, False], default=1)
    def test_is_attention_to_all_tokens(self, tokens, several, options, causal):
        scene, cache = self.scene()
        keywords = {"causal": causal, **options_of(options, HEADS)}
        count = tokens if isinstance(tokens, int) else 1
        edges = np.cumsum([0, *Q_LENS]) if tokens == "ragged" else np.arange(len(OWN) + 1) * count
        q = self.drawn(edges[-1] + 2 if tokens == "ragged" else edges[-1])
        if tokens == "ragged":
            given, keywords["cu_q_lens"] = q, on_device(edges)
        else:
            axes = (len(OWN), count) if isinstance(tokens, int) else (len(OWN),)
            given = [x.reshape(*axes, *x.shape[1:]) for x in q]
        found = self.attend(scene, cache, given, several, **keywords)
        keywords.pop("cu_q_lens", None)
        wide = np.concatenate([as_float64(x) for x in q], axis=-1)
        right = self.truth(scene, [wide[a:b] for a, b in itertools.pairwise(edges)], several, **keywords)
        assert found[0].dtype == q[0].dtype
        out, lse = (np.asarray(x).reshape(len(wide), HEADS, *x.shape[given[0].ndim - 1 :]) for x in found)
        check_ragged((jnp.asarray(out), lse), right, edges, 64 if out.dtype == np.float32 else 6)

    @pytest.mark.parametrize("ragged", [slow(False), further(True)])
    def test_a_plan_changes_no_bits(self, ragged):
        scene, cache = self.scene()
        q, tables, lengths = self.drawn(10), on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        count, edges = len(PREFIXES), on_device([0, 2, 2, 4, 9, 10])
        made = {"q_len": 2} if not ragged else {"cu_q_lens": edges, "total": 10}
        q, keywords = (q, {"cu_q_lens": edges}) if ragged else ([x.reshape(5, 2, *x.shape[1:]) for x in q], {})
        for several in (False, True):
            shared = {"prefix_tables": tables[:count], "prefix_lens": lengths[:count], "prefix_of": on_device(OF)}
            shared = shared if several else {"prefix_tables": tables[0], "prefix_lens": lengths[0]}
            options = {"num_heads": HEADS, "dtype": q[0].dtype, **made, **shared}
            plan = self.run(jaxkv.plan_decode, cache, tables[count:], lengths[count:], **options)
            planned = self.attend(scene, cache, q, several, plan=plan, **keywords)
            for x, expected in zip(planned, self.attend(scene, cache, q, several, **keywords), strict=True):
                assert_same_bits(x, expected)

    @pytest.mark.ci
    def test_a_prefix_without_tokens_changes_no_bits(self):
        scene, cache = self.scene()
        tables, lengths = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
        requests, q = (tables[len(PREFIXES) :], lengths[len(PREFIXES) :]), self.drawn(len(OWN))
        options = {"layer": LAYER, "scale": SCALE, "return_lse": True}
        right = self.run(self.operation(), *q, cache, *requests, **options)
        nothing = {"prefix_tables": tables[0], "prefix_lens": 0}, {"prefix_tables": -1 - tables[0], "prefix_lens": 130}
        several = {"prefix_tables": tables[:3], "prefix_lens": lengths[:3]}
        of = (np.full(len(OWN), x, np.int32) for x in (-1, 3, 2**31 - 1))
        for prefix in (*nothing, *({**several, "prefix_of": x} for x in of)):
            found = self.run(self.operation(), *q, cache, *requests, **options, **prefix)
            for x, expected in zip(found, right, strict=True):
                assert_same_bits(x, expected)


class KVSharedPrefixes(SharedPrefixChecks, DecodeKVChecks):
    """`decode_kv(..., prefix_tables=)`."""

    kv_heads = 2

    def operation(self):
        return jaxkv.decode_kv

    def drawn(self, rows):
        return [self.query(self.entry(), 1, int(rows), HEADS)[0]]

    def keys_and_values(self, scene, request):
        return scene.parts(request)


class MLASharedPrefixes(SharedPrefixChecks, DecodeMLAChecks):
    """`decode_mla(..., prefix_tables=)`."""

    kv_heads = 1

    def operation(self):
        return jaxkv.decode_mla

    def drawn(self, rows):
        return [x[0] for x in queries(self.entry(), 1, int(rows), HEADS)]

    def keys_and_values(self, scene, request):
        return oracle.keys_and_values(scene.entry, *scene.parts(request))
