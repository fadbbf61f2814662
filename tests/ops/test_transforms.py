"""Operations inside JAX's transformations, under its strictness settings, and at odd edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.testing.buffers import entry_bytes, to_bytes, to_cache
from support import scenes
from support.compare import assert_same_bits
from support.many_devices import mesh_of, on_several_devices


@on_several_devices
def test_shard_map_over_the_batch():
    mesh = mesh_of(2, axis_type=AxisType.Auto)
    rng = np.random.default_rng(0)
    tables, lengths = jnp.asarray(rng.permutation(8).reshape(4, 2), jnp.int32), jnp.asarray([8, 0, 3, 5])

    def check(function, buffer, *arrays):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=(P(), *[P("x")] * len(arrays)), out_specs=P("x"))
        assert_same_bits(jax.jit(sharded)(buffer, *arrays), function(buffer, *arrays))

    sizes = dict(num_layers=2, num_blocks=8, block_size=4)
    layout = jaxkv.CacheLayout(**sizes, entry=jaxkv.MLAEntry("f32", latent=32, rope=8))
    buffer = jnp.asarray(rng.standard_normal(layout.size), jnp.float32)
    q = [jnp.asarray(rng.standard_normal((4, 3, n)), jnp.float32) for n in layout.entry.sizes]

    def decode(buffer, q_latent, q_pe, tables, lengths):
        cache = jaxkv.KVCache(buffer, layout)
        return jaxkv.decode_mla(q_latent, q_pe, cache, tables, lengths, layer=1, scale=0.1)

    check(decode, buffer, *q, tables, lengths)

    keyed = jaxkv.CacheLayout(**sizes, entry=jaxkv.IndexerEntry())
    keys = jnp.asarray(rng.integers(0, 60, keyed.size), jnp.uint8)
    q, weights = jnp.asarray(rng.standard_normal((4, 1, 2, 128)), jnp.float32), jnp.ones((4, 1, 2))

    def score(keys, q, weights, tables, lengths):
        return jaxkv.indexer_logits(q, weights, jaxkv.KVCache(keys, keyed), tables, lengths, layer=1, max_len=8)

    check(score, keys, q, weights, tables, lengths)


@pytest.mark.parametrize(
    "entry", [*scenes.MLA_ENTRIES, scenes.KV_ENTRIES[3], scenes.INDEXER_ENTRY], ids=lambda entry: entry.format
)
def test_no_tokens_are_written_in_any_format(entry):
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=3, block_size=4, entry=entry)
    before = scenes.garbage(layout, np.random.default_rng(0), "random")
    cache, slots = to_cache(layout, before), jnp.zeros(0, jnp.int32)
    parts = [jnp.zeros((0, n)) for n in entry.sizes]
    if isinstance(entry, jaxkv.MLAEntry):
        scale = {"kv_scale": 1.0} if entry.codec.scaled else {}
        cache = jaxkv.write_mla(cache, *parts, slots, layer=0, **scale)
    elif isinstance(entry, jaxkv.KVEntry):
        cache = jaxkv.write_kv(cache, *(part[:, None] for part in parts), slots, layer=0, k_scale=1.0, v_scale=1.0)
    else:
        cache = jaxkv.write_indexer_k(cache, *parts, slots, layer=0)
    assert_same_bits(to_bytes(cache), before)


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


@pytest.mark.parametrize("causal", [True, False])
def test_strict_programs_may_attend_to_ragged_batches(causal):
    entry = jaxkv.KVEntry("f32", head_dim=8)
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=3, block_size=4, num_heads=2, entry=entry)
    requests = jnp.asarray([[1], [2]]), jnp.asarray([2, 3])
    ragged = {"cu_q_lens": jnp.asarray([0, 1, 3]), "causal": causal}

    def call():
        cache = jaxkv.KVCache.zeros(layout)
        plan = jaxkv.plan_decode(cache, *requests, num_heads=4, total=3, **ragged)
        q = jnp.arange(96.0).reshape(3, 4, 8)
        return jaxkv.decode_kv(q, cache, *requests, layer=0, scale=0.1, plan=plan, **ragged)

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


def assert_same_derivatives(derive, call, *primals, clean, poisoned):
    """`call` of each of the two, and what `derive` makes of it: poison that has no part in results has none here."""
    found, right = (derive(lambda *args, x=x: call(x, *args), *primals) for x in (poisoned, clean))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.isfinite(other).all()
        assert_same_bits(one, other)


def gradients(call, *primals):
    return jax.grad(lambda *args: sum(x.astype(jnp.float32).sum() for x in call(*args)), range(len(primals)))(*primals)


def tangents(call, *primals):
    return jax.jvp(call, primals, tuple(jnp.ones_like(x) for x in primals))[1]


MLA = jaxkv.MLAEntry("f32", latent=16, rope=8)


def entries(layout, good):
    """A buffer of entries, and the same with NaN in all slots but the `good`."""
    rng = np.random.default_rng(0)
    buffer = rng.standard_normal(layout.size).astype(np.float32)
    bad = np.ones((layout.num_blocks, 1, layout.block_size), bool)
    bad[np.asarray(good) // layout.block_size, :, np.asarray(good) % layout.block_size] = False
    poisoned = buffer.copy()
    (view,) = entry_bytes(layout, poisoned.view(np.uint8))
    view[0, bad] = 0xFF
    return jnp.asarray(buffer), jnp.asarray(poisoned)


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, "counts"])
def test_gradients_of_sparse_decodes_know_nothing_of_masked_slots(bad):
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=4, entry=MLA)
    chosen, counts = [[[9, 5, 0, 3]]], [[2]]
    if bad != "counts":
        chosen, counts = [[[bad, 9, bad, 5]]], [[4]]
    buffer, poisoned = entries(layout, [5, 9])
    rng = np.random.default_rng(1)
    q = [jnp.asarray(rng.standard_normal((1, 1, 2, n)), jnp.float32) for n in MLA.sizes]

    def decode(mask, q_latent, q_pe, buffer, scale, sinks):
        return jaxkv.decode_mla_sparse(
            q_latent, q_pe, jaxkv.KVCache(jnp.where(mask, jnp.nan, buffer), layout), jnp.asarray(chosen),
            counts=jnp.asarray(counts), sinks=sinks, layer=0, scale=scale, return_lse=True, implementation="xla",
        )  # fmt: skip

    clean, bad = jnp.zeros(layout.size, bool), jnp.isnan(poisoned)
    primals = (*q, buffer, jnp.float32(0.3), jnp.asarray([0.5, -jnp.inf]))
    assert_same_derivatives(gradients, decode, *primals, clean=clean, poisoned=bad)


@pytest.mark.parametrize("empty", [-np.inf, np.inf, np.nan])
def test_gradients_of_merges_know_nothing_of_empty_parts(empty):
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 5, 4)).astype(np.float32), rng.standard_normal((3, 5)).astype(np.float32)
    lses[1, :4] = lses[2, 3] = empty
    lses[:, 4] = empty

    def merge(mask, outs, lses):
        out, lse = jaxkv.merge_states(jnp.where(mask[..., None], jnp.nan, outs), lses, implementation="xla")
        return out, lse[:4]  # the last has no keys: -inf

    clean, bad = jnp.zeros(lses.shape, bool), jnp.asarray(~(lses < np.inf) | (lses == -np.inf))
    primals = jnp.asarray(outs), jnp.asarray(lses)
    assert_same_derivatives(gradients, merge, *primals, clean=clean, poisoned=bad)


def test_gradients_of_gathers_know_nothing_of_rows_without_a_token():
    entry = jaxkv.MLAEntry("fp8", latent=16, rope=8)
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=4, entry=entry)
    clean = np.full(layout.size, 0x38, np.uint8)
    poisoned = clean.copy()
    (view,) = entry_bytes(layout, poisoned)
    view[0, :1] = 0xFF  # what rows without a token would read

    def gather(buffer, scale):
        return jaxkv.gather_mla(
            jaxkv.KVCache(buffer, layout), jnp.asarray([[2, 99]]), jnp.asarray([0, 6]),
            layer=0, total=8, kv_scale=scale, dtype=jnp.float32, implementation="xla",
        )  # fmt: skip

    clean, poisoned = jnp.asarray(clean), jnp.asarray(poisoned)
    assert_same_derivatives(gradients, gather, jnp.float32(0.5), clean=clean, poisoned=poisoned)


def test_forward_mode_knows_nothing_of_what_a_query_does_not_see():
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=4, entry=MLA)
    tables, lengths = jnp.asarray([[3, 1]]), jnp.asarray([6])
    q = [jnp.ones((1, 2, 2, n)) for n in MLA.sizes]

    def decode(buffer, q_latent, q_pe, scale):
        out, lse = jaxkv.decode_mla(
            q_latent, q_pe, jaxkv.KVCache(buffer, layout), tables, lengths,
            layer=0, scale=scale, return_lse=True, implementation="xla",
        )  # fmt: skip
        return out[:, 0], lse[:, 0]  # the first query, which sees 5 of the 6 tokens

    clean, poisoned = entries(layout, [12, 13, 14, 15, 4])
    assert_same_derivatives(tangents, decode, *q, jnp.float32(0.3), clean=clean, poisoned=poisoned)
