"""The indexer of `jaxkv.parallel.context` on several devices, and on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.parallel import context
from parallel.batches import LAYER, MLA, batch, divided, poisoned, run
from support.compare import assert_same_bits
from support.many_devices import mesh_of, on_several_devices

pytestmark = on_several_devices


def indexer_call(tokens):
    """Random keys on three devices, random queries of 4 requests, and their tables."""
    mesh, entry = mesh_of(3), jaxkv.IndexerEntry("bf16", head_dim=16)
    rng, layout = np.random.default_rng(0), divided(entry, 3, 5)
    random = jnp.asarray(rng.standard_normal(3 * layout.size), entry.dtype)
    cache = jaxkv.KVCache(jax.device_put(random, poisoned(layout, mesh).buffer.sharding), layout)
    return cache, jnp.asarray(rng.standard_normal((4, tokens, 2, 16)), entry.dtype), batch(MLA[0]).tables[:4, :2]


def test_lengths_past_the_tables_are_clamped_by_the_indexer():
    mesh, (cache, q, tables) = mesh_of(3), indexer_call(3)

    def score(cache, q, tables, lengths):
        keywords = dict(axis="x", layer=LAYER, max_len=20)
        return context.indexer_logits(q, jnp.ones(q.shape[:3]), cache, tables, lengths, **keywords)[None]

    found, right = (
        run(score, mesh, (P("x"), P(), P(), P()), P("x"), cache, q, tables, jnp.asarray(lengths, jnp.int32))
        for lengths in ([47, 2**31 - 1, -1, -(2**31)], [46, 46, 0, 0])
    )
    assert_same_bits(found, right)
    assert np.isfinite(right[:, 0, 2]).sum(axis=-1).tolist() == [16, 15, 15]


def test_selected_slots_do_not_depend_on_chunks():
    mesh, (cache, q, tables) = mesh_of(3), indexer_call(19)
    lengths = jnp.asarray([46, 2**31 - 1, 7, 0], jnp.int32)

    def select(logits_bytes):
        def slots(cache, q, tables, lengths):
            keywords = dict(axis="x", layer=LAYER, max_len=20, logits_bytes=logits_bytes)
            return context.select_slots(q, jnp.ones(q.shape[:3]), cache, tables, lengths, 8, **keywords)[None]

        return run(slots, mesh, (P("x"), P(), P(), P()), P("x"), cache, q, tables, lengths)

    whole = select(2**28)
    assert (np.asarray(whole) >= 0).sum(axis=(0, 3)).tolist()[:2] == [[8] * 19] * 2
    assert_same_bits(select(8 * 4 * 4 * 2 * 512), whole)  # of 8 query tokens
    assert_same_bits(select(1), whole)


@pytest.mark.parametrize(("devices", "interleave"), [(2, 1), (3, 4), (8, 2)])
@pytest.mark.parametrize("k", [1, 20, 90])
@pytest.mark.parametrize(
    "special", [(), (np.nan, -np.nan, np.inf, 1e-39, -3e-39)], ids=["numbers", "NaN, inf and subnormal"]
)
def test_the_best_of_all_devices_are_those_of_one(devices, interleave, k, special):
    """Where many are equal, too; rows have fewer than k."""
    mesh, rng = mesh_of(devices), np.random.default_rng(0)
    lengths = np.asarray([0, 1, 19, 21, 64], np.int32)
    tokens = np.arange(64)
    logits = rng.choice(np.asarray([-3, -0.0, 0, 1, 1.5, *special], np.float32), (5, 64))
    logits[tokens >= lengths[:, None]] = -np.inf
    owned = [tokens[tokens // interleave % devices == shard] for shard in range(devices)]
    longest = max(map(len, owned))
    shares = [np.pad(logits[:, own], ((0, 0), (0, longest - len(own))), constant_values=-np.inf) for own in owned]

    def choose(share):
        return context.select_topk(share[0], k, shards=jaxkv.TokenShards(devices, interleave), axis="x")[None]

    found = np.asarray(run(choose, mesh, (P("x"),), P("x"), jnp.asarray(np.stack(shares))))
    for row, right in enumerate(np.asarray(jaxkv.select_topk(jnp.asarray(logits), k))):
        chosen = [
            own[position] for own, share in zip(owned, found, strict=True) for position in share[row] if position >= 0
        ]
        assert sorted(chosen) == sorted(right[right >= 0])
