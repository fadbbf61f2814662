"""Operations inside JAX's transformations, under its strictness settings, and at odd edges."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import scenes
from support.compare import assert_same_bits

SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, jaxkv
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
tables, lengths = jnp.asarray(rng.permutation(8).reshape(4, 2), jnp.int32), jnp.asarray([8, 0, 3, 5])

def check(function, buffer, *arrays):
    sharded = jax.shard_map(function, mesh=mesh, in_specs=(P(), *[P("x")] * len(arrays)), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(sharded)(buffer, *arrays), function(buffer, *arrays))

entry = jaxkv.MLAEntry("f32", latent=32, rope=8)
layout = jaxkv.CacheLayout(num_layers=2, num_blocks=8, block_size=4, entry=entry)
buffer = jnp.asarray(rng.standard_normal(layout.size), jnp.float32)
q = [jnp.asarray(rng.standard_normal((4, 3, n)), jnp.float32) for n in entry.sizes]
decode = lambda buffer, q_latent, q_pe, tables, lengths: jaxkv.decode_mla(
    q_latent, q_pe, jaxkv.KVCache(buffer, layout), tables, lengths, layer=1, scale=0.1)
check(decode, buffer, *q, tables, lengths)

keyed = jaxkv.CacheLayout(num_layers=2, num_blocks=8, block_size=4, entry=jaxkv.IndexerEntry())
keys = jnp.asarray(rng.integers(0, 60, keyed.size), jnp.uint8)
q, weights = jnp.asarray(rng.standard_normal((4, 1, 2, 128)), jnp.float32), jnp.ones((4, 1, 2))
logits = lambda keys, q, weights, tables, lengths: jaxkv.indexer_logits(
    q, weights, jaxkv.KVCache(keys, keyed), tables, lengths, layer=1, max_len=8)
check(logits, keys, q, weights, tables, lengths)
"""


def test_shard_map_over_the_batch():
    subprocess.run([sys.executable, "-c", SHARDED], check=True, timeout=300)


@pytest.mark.parametrize(
    "entry", [*scenes.MLA_ENTRIES, scenes.KV_ENTRIES[3], scenes.INDEXER_ENTRY], ids=lambda entry: entry.format
)
def test_no_tokens_are_written_in_any_format(entry):
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=3, block_size=4, entry=entry)
    before = scenes.garbage(layout, np.random.default_rng(0), "random")
    cache, slots = scenes.to_cache(layout, before), jnp.zeros(0, jnp.int32)
    parts = [jnp.zeros((0, n)) for n in entry.sizes]
    if isinstance(entry, jaxkv.MLAEntry):
        scale = {"kv_scale": 1.0} if entry.format == "fp8" else {}
        cache = jaxkv.write_mla(cache, *parts, slots, layer=0, **scale)
    elif isinstance(entry, jaxkv.KVEntry):
        cache = jaxkv.write_kv(cache, *(part[:, None] for part in parts), slots, layer=0, k_scale=1.0, v_scale=1.0)
    else:
        cache = jaxkv.write_indexer_k(cache, *parts, slots, layer=0)
    assert_same_bits(scenes.to_bytes(cache), before)


def test_strict_programs_may_call():
    entry = jaxkv.MLAEntry("fp8_ds_mla", latent=128, rope=16)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=3, block_size=4, entry=entry)

    def call():
        cache = jaxkv.KVCache.zeros(layout)
        cache = jaxkv.write_mla(cache, jnp.ones((2, 128)), jnp.ones((2, 16)), jnp.asarray([4, 5]), layer=1)
        q = jnp.ones((1, 2, 128)), jnp.ones((1, 2, 16))
        return jaxkv.decode_mla(*q, cache, jnp.asarray([[1]]), jnp.asarray([2]), layer=1, scale=0.1)

    expected = call()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert_same_bits(call(), expected)


def test_equal_zeros_keep_their_order():
    logits = jnp.asarray([[-0.0, 0.0, -0.0, 0.0]])
    assert_same_bits(jaxkv.select_topk(logits, 4), np.asarray([[0, 1, 2, 3]], np.int32))


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e39, 1e-50])
def test_numbers_that_float32_cannot_hold_are_refused(bad):
    entry = jaxkv.MLAEntry("fp8", latent=8, rope=4)
    cache = jaxkv.KVCache.zeros(jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=4, entry=entry))
    with pytest.raises(ValueError, match="`kv_scale`"):
        jaxkv.write_mla(cache, jnp.ones((1, 8)), jnp.ones((1, 4)), jnp.asarray([0]), layer=0, kv_scale=bad)
    q = jnp.ones((1, 2, 8)), jnp.ones((1, 2, 4))
    requests = jnp.asarray([[0]]), jnp.asarray([1])
    with pytest.raises(ValueError, match="`logit_cap`"):
        jaxkv.decode_mla(*q, cache, *requests, layer=0, scale=1.0, kv_scale=1.0, logit_cap=bad)
