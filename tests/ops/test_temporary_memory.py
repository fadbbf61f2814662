"""The temporary memory of operations on XLA does not grow with the keys of all requests together."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.xla import paged
from support import scenes, suites
from support.compare import assert_same_bits
from support.suites.attention.decode_mla_sparse import DecodeMLASparseChecks

REQUESTS, TOKENS = 64, 64 * 533
"""Query tokens of all prompts together."""


def described(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def cache_of(entry, heads=1):
    """The layout, and a description of its buffer."""
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=1024, block_size=64, num_heads=heads, entry=entry)
    return layout, described(layout.dtype, layout.size)


def kv_call(*, ragged: bool, **options):
    layout, buffer = cache_of(jaxkv.KVEntry("bf16", head_dim=128), 8)

    def call(q, buffer, tables, lengths, sums):
        cache, keywords = jaxkv.KVCache(buffer, layout), {"cu_q_lens": sums} if ragged else {}
        return jaxkv.decode_kv(q, cache, tables, lengths, layer=0, scale=0.1, **keywords, **options)

    return call, (described("bfloat16", TOKENS, 32, 128),), buffer, REQUESTS if ragged else TOKENS


def mla_call():
    layout, buffer = cache_of(jaxkv.MLAEntry("bf16"))

    def call(q_latent, q_pe, buffer, tables, lengths, sums):
        cache = jaxkv.KVCache(buffer, layout)
        return jaxkv.decode_mla(q_latent, q_pe, cache, tables, lengths, layer=0, scale=0.1, cu_q_lens=sums)

    return call, tuple(described("bfloat16", TOKENS, 16, size) for size in (512, 64)), buffer, REQUESTS


def sparse_call():
    layout, buffer = cache_of(jaxkv.MLAEntry("bf16"))

    def call(q_latent, q_pe, buffer, tables, lengths, sums):
        del lengths, sums
        cache, slots = jaxkv.KVCache(buffer, layout), jnp.repeat(tables, 128, axis=1)[:, None]
        return jaxkv.decode_mla_sparse(q_latent[:, None], q_pe[:, None], cache, slots, layer=0, scale=0.1)

    return call, tuple(described("bfloat16", TOKENS, 16, size) for size in (512, 64)), buffer, TOKENS


def indexer_call():
    layout, buffer = cache_of(jaxkv.IndexerEntry())

    def call(q, weights, buffer, tables, lengths, sums):
        del sums
        cache = jaxkv.KVCache(buffer, layout)
        q, weights = q[:, None], weights[:, None]
        return jaxkv.indexer_logits(q, weights, cache, tables, lengths, layer=0, max_len=1024)

    queries = described("bfloat16", TOKENS, 64, 128), described("float32", TOKENS, 64)
    return call, queries, buffer, TOKENS


CALLS = {
    "ragged heads": lambda: kv_call(ragged=True),
    "ragged heads with a window": lambda: kv_call(ragged=True, window=100),
    "a request per token": lambda: kv_call(ragged=False),
    "ragged latents": mla_call,
    "slots": sparse_call,
    "indexer": indexer_call,
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_bounded_by_a_multiple_of_queries_and_results(name):
    """Twice as much, and the bound for the requests that are computed together."""
    call, queries, buffer, requests = CALLS[name]()
    index = described("int32", requests, 16), described("int32", requests), described("int32", requests + 1)
    program = jax.jit(call, keep_unused=True).lower(*queries, buffer, *index).compile()
    memory = program.memory_analysis()
    query_bytes = sum(math.prod(q.shape) * q.dtype.itemsize for q in queries)
    used, most = memory.temp_size_in_bytes, query_bytes + memory.output_size_in_bytes
    assert most > 2**28
    assert used <= 2 * most + paged.PART_BYTES, (used, most)


@pytest.mark.parametrize(("requests", "together"), [(7, 3), (7, 7), (7, 9), (6, 3), (7, 1), (1, 1)])
def test_parts_together_are_the_whole(requests, together, monkeypatch):
    monkeypatch.setattr(paged, "PART_BYTES", 10 * together + 9)
    x, y = jnp.arange(requests * 2).reshape(requests, 2), jnp.arange(requests)
    seen = []

    def function(x, y):
        seen.append(len(y))
        return x * y[:, None], y + 1

    found = jax.jit(lambda *args: paged.in_parts(function, *args, bytes_per_request=10))(x, y)
    assert max(seen) <= together
    for part, right in zip(found, (x * y[:, None], y + 1), strict=True):
        assert_same_bits(part, right)


LENGTHS = (130, 3, 0, 70, 64, 65, 1)
"""As no other test has as many requests, its calls are traced here."""


@pytest.mark.usefixtures("_alone")
class TestParts:
    """Each request is computed alone; results are as true, and have the same bits on each layout."""

    @pytest.fixture
    def _alone(self, monkeypatch):
        monkeypatch.setattr(paged, "PART_BYTES", 1)

    def suite(self, checks):
        found = checks()
        found.implementation = "xla"
        return found

    @pytest.mark.parametrize("name", ["LBNHC", "BLNHC padded"])
    def test_heads(self, name):
        self.suite(suites.DecodeKVChecks).check_layout(name, jaxkv.KVEntry("f32", 16, 8), lengths=LENGTHS)

    def test_latents(self):
        entry, suite = jaxkv.MLAEntry("f32", latent=128, rope=16), self.suite(suites.DecodeMLAChecks)
        scene = scenes.scene(entry, lengths=LENGTHS)
        layout, q = suites.layout_of("BLNHC padded", entry), suites.queries(entry, len(LENGTHS), 2, 3)
        found = suite.check(q, scene.cache(layout, 1), scene, 1)
        for x, expected in zip(found, suite.decode(q, scene.twin(layout), scene, 0), strict=True):
            assert_same_bits(x, expected)

    def test_slots(self):
        entry, suite = jaxkv.MLAEntry("f32", latent=128, rope=16), self.suite(DecodeMLASparseChecks)
        scene = scenes.scene(entry, lengths=LENGTHS)
        layout, q = suites.layout_of("BLNHC padded", entry), suites.queries(entry, len(LENGTHS), 2, 3)
        slots = suite.choose(scene, 2, 20, np.random.default_rng(0))
        found = suite.check(q, scene.cache(layout, 1), slots, 1, scene)
        for x, expected in zip(found, suite.decode(q, scene.twin(layout), slots, 0, scene), strict=True):
            assert_same_bits(x, expected)

    def test_indexer(self):
        entry, suite = scenes.INDEXER_ENTRY, self.suite(suites.IndexerChecks)
        scene = scenes.scene(entry, lengths=LENGTHS)
        suite.check(*suite.arguments(scene, 2, "float32"), scene, suites.layout_of("BLNHC padded", entry), 1, 200)
