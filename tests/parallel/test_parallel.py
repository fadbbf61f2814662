"""`jaxkv.parallel`: shares against plain Python, wrong calls, two processes."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import parallel
from jaxkv.parallel import context
from support.compare import assert_same_bits
from support.jobs import job

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_two_processes():
    with job(lambda address, number: [str(TESTS / "two_processes.py"), address, str(number)]) as processes:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "equal" in output.splitlines(), output


def shards_of(shards, block_size=4):
    """A layout of a shard's cache."""
    entry = jaxkv.MLAEntry("bf16", latent=8, rope=4)
    return jaxkv.CacheLayout(num_layers=1, num_blocks=80, block_size=block_size, entry=entry, shards=shards)


@pytest.mark.parametrize("interleave", [1, 3, 16, 64])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_shares_are_those_of_plain_python(num_shards, interleave):
    block_size, lengths = 4, np.asarray([[0, 1, 2, 15, 16], [17, 48, 100, 131, -3]], np.int32)
    positions = np.asarray([[*range(-2, 140)]] * 2, np.int32)
    tables = np.random.default_rng(0).permutation(80).reshape(2, 40).astype(np.int32)
    shards = jaxkv.TokenShards(num_shards, interleave)
    for shard in range(num_shards):
        owned = [i for i in range(140) if i // interleave % num_shards == shard]
        right = [[sum(i < length for i in owned) for length in row] for row in lengths]
        assert_same_bits(context.local_lengths(lengths, shards=shards, shard=shard), np.asarray(right, np.int32))
        local = {position: index for index, position in enumerate(owned)}
        right = [
            [
                row[local[i] // block_size] * block_size + local[i] % block_size if i in local else -1
                for i in positions[0]
            ]
            for row in tables
        ]
        found = context.local_slots(tables, positions, layout=shards_of(shards, block_size), shard=shard)
        assert_same_bits(found, np.asarray(right, np.int32))


def test_a_share_that_outgrows_the_table_has_no_slots():
    share = dict(layout=shards_of(jaxkv.TokenShards(2)), shard=1)
    found = context.local_slots(jnp.asarray([[5]]), jnp.asarray([[1, 7, 8, 9]]), **share)
    assert_same_bits(found, np.asarray([[20, 23, -1, -1]], np.int32))


def test_strict_programs_may_share():
    def call(shard):
        shards = jaxkv.TokenShards(3, 2)
        slots = context.local_slots(jnp.asarray([[5, 6]]), jnp.asarray([[1, 7]]), layout=shards_of(shards), shard=shard)
        return context.local_lengths(jnp.asarray([5, 9]), shards=shards, shard=shard), slots

    expected = call(1)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for found, right in zip(jax.jit(call)(1), expected, strict=True):
            assert_same_bits(found, right)


def mesh_of_one():
    return jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])


def inside(call):
    """Runs `call` in a `shard_map` over one device."""
    return jax.jit(jax.shard_map(call, mesh=mesh_of_one(), in_specs=(), out_specs=P()))()


MLA = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=4, entry=jaxkv.MLAEntry("bf16", latent=8, rope=4))
GQA = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=4, entry=jaxkv.KVEntry("bf16", head_dim=8))
ONE, TWO = jaxkv.TokenShards(), jaxkv.TokenShards(2)
TABLES, SEQ_LENS = jnp.asarray([[0, 1], [2, 3]]), jnp.asarray([3, 4])


def decode_mla(
    *, q_latent=(2, 3, 2, 8), q_pe=(2, 3, 2, 4), axis="x", tables=TABLES, lengths=SEQ_LENS, shards=ONE, **keywords
):
    q = jnp.zeros(q_latent, jnp.bfloat16), jnp.zeros(q_pe, jnp.bfloat16)
    cache = jaxkv.KVCache.zeros(replace(MLA, shards=shards))
    return context.decode_mla(*q, cache, tables, lengths, axis=axis, **{"layer": 0, "scale": 0.1, **keywords})


def decode_kv(**keywords):
    q, cache = jnp.zeros((2, 2, 8), jnp.bfloat16), jaxkv.KVCache.zeros(GQA)
    return context.decode_kv(q, cache, TABLES, SEQ_LENS, axis="x", layer=0, scale=0.1, **keywords)


def plan_decode(*, shards=ONE, **keywords):
    cache = jaxkv.KVCache.zeros(replace(GQA, shards=shards))
    return context.plan_decode(cache, TABLES, SEQ_LENS, axis="x", num_heads=2, **keywords).schedule


def packed(**options):
    groups = {"latent": jaxkv.Group(1, MLA.entry, **options)}
    return jaxkv.PackedLayout(num_blocks=4, block_size=4, groups=groups, shards=TWO)


def decode_mla_sparse(**keywords):
    q = jnp.zeros((2, 1, 2, 8)), jnp.zeros((2, 1, 2, 4))
    slots, options = jnp.zeros((2, 1, 3), jnp.int32), {"axis": "x", "layer": 0, "scale": 0.1, **keywords}
    return context.decode_mla_sparse(*q, jaxkv.KVCache.zeros(MLA), slots, **options)


def index(operation, *args, weights=(2, 1, 2), shards=ONE, **options):
    sizes = dict(num_layers=1, num_blocks=4, block_size=4, shards=shards)
    layout = jaxkv.CacheLayout(**sizes, entry=jaxkv.IndexerEntry("bf16", head_dim=8))
    q, cache = (jnp.zeros((2, 1, 2, 8), jnp.bfloat16), jnp.zeros(weights)), jaxkv.KVCache.zeros(layout)
    return operation(*q, cache, TABLES, SEQ_LENS, *args, **{"axis": "x", "layer": 0, "max_len": 8, **options})


def indexer_logits(**changes):
    return index(context.indexer_logits, **changes)


def select_slots(**changes):
    return index(context.select_slots, 2, **changes)


def select_topk(k=2, axis="x", shards=ONE, dtype="float32"):
    return context.select_topk(jnp.zeros((2, 8), dtype), k, axis=axis, shards=shards)


def merge(out=(2, 3, 8), lse=(2, 3), dtype="float32", axis="x"):
    return context.merge_states(jnp.zeros(out), jnp.zeros(lse, dtype), axis=axis)


LENGTHS_OF = partial(context.local_lengths, SEQ_LENS, shards=TWO)

WRONG = {
    "no such axis": (lambda: decode_mla(axis="y"), ["`axis`", "'y'", "shard_map"]),
    "no such axis to merge over": (lambda: merge(axis="y"), ["`axis`", "'y'", "shard_map"]),
    "queries of other tokens": (lambda: decode_mla(q_pe=(2, 2, 2, 4)), ["`q_pe`", "(2, 2, 2, 4)", "3", "`q_latent`"]),
    "queries of rank 5": (lambda: decode_mla(q_latent=(1, 2, 3, 2, 8)), ["`q_latent`", "5 axes", "[B, Q, Hq"]),
    "wide queries": (lambda: decode_mla(q_latent=(2, 3, 2, 9)), ["`q_latent`", "9", "8"]),
    "a table of other requests": (lambda: decode_mla(tables=TABLES[:1]), ["`block_tables`", "(1, 2)", "2, M"]),
    "lengths of other requests": (lambda: decode_mla(lengths=SEQ_LENS[:1]), ["`seq_lens`", "(1,)", "[2]"]),
    "float lengths": (lambda: decode_mla(lengths=SEQ_LENS * 1.0), ["`seq_lens`", "float32", "int32"]),
    "no such layer": (lambda: decode_mla(layer=1), ["`layer`", "1", "0 to 0"]),
    "a cache of other shards": (
        lambda: decode_mla(shards=TWO),
        ["`axis`", "'x'", "1 devices", "num_shards=2", "shards="],
    ),
    "a plan of other shards": (lambda: plan_decode(shards=TWO), ["`axis`", "'x'", "1 devices", "num_shards=2"]),
    "logits of other shards": (lambda: indexer_logits(shards=TWO), ["`axis`", "'x'", "1 devices", "num_shards=2"]),
    "slots of other shards": (lambda: select_slots(shards=TWO), ["`axis`", "'x'", "1 devices", "num_shards=2"]),
    "the best of other shards": (lambda: select_topk(shards=TWO), ["`axis`", "'x'", "1 devices", "num_shards=2"]),
    "the best of no shards": (lambda: select_topk(shards=None), ["`shards`", "None", "TokenShards"]),
    "no interleave": (lambda: jaxkv.TokenShards(2, 0), ["`interleave`", "0", "positive"]),
    "a fraction of a shard": (lambda: jaxkv.TokenShards(1.5), ["`num_shards`", "1.5", "positive"]),
    "shards in a layout": (lambda: replace(MLA, shards=2).size, ["`shards`", "2", "TokenShards"]),
    "a view of other shards": (
        lambda: jaxkv.KVCache.zeros(MLA).view(replace(MLA, shards=TWO)).buffer,
        ["`layout`", "num_shards=2", "num_shards=1"],
    ),
    "shards of a window": (lambda: packed(window=3).fingerprint, ["`shards`", "num_shards=2", "no window"]),
    "shards of a rate": (lambda: packed(rate=2).fingerprint, ["`shards`", "num_shards=2", "one entry per token"]),
    "shards of a table": (lambda: packed(table="a").fingerprint, ["`shards`", "num_shards=2", "without a name"]),
    "slots of no layout": (
        lambda: context.local_slots(TABLES, TABLES, layout=ONE, shard=0),
        ["`layout`", "TokenShards", "CacheLayout"],
    ),
    "a plan of other tokens": (lambda: decode_kv(plan=plan_of_two()), ["`plan`", "2 plans", "expected 1", "`q_len`"]),
    "a window of nothing": (lambda: decode_kv(window=0), ["`window`", "0", "positive"]),
    "a plan without the window": (lambda: decode_kv(window=2, plan=plan_of_two()), ["`plan`", "this `window`"]),
    "a plan of no tokens": (lambda: plan_decode(q_len=0), ["`q_len`", "0", "positive"]),
    "no mask": (lambda: decode_mla(causal=False), ["`causal`", "False", "expected None", "under a causal mask"]),
    "ragged queries": (lambda: decode_kv(cu_q_lens=SEQ_LENS), ["`cu_q_lens`", "expected None"]),
    "sinks of other heads": (lambda: decode_mla(sinks=jnp.zeros(3)), ["`sinks`", "(3,)", "2"]),
    "sinks": (lambda: decode_mla_sparse(sinks=jnp.zeros(2)), ["`sinks`", "expected None", "every device"]),
    "slots over no axis": (lambda: decode_mla_sparse(axis="y"), ["`axis`", "'y'", "shard_map"]),
    "weights of other queries": (lambda: indexer_logits(weights=(2, 2, 2)), ["`weights`", "(2, 2, 2)", "`q`"]),
    "logits over no axis": (lambda: indexer_logits(axis="y"), ["`axis`", "'y'", "shard_map"]),
    "the best over no axis": (lambda: select_topk(axis="y"), ["`axis`", "'y'", "shard_map"]),
    "the best 0": (lambda: select_topk(k=0), ["`k`", "0", "positive"]),
    "slots of no bytes": (lambda: select_slots(logits_bytes=0), ["`logits_bytes`", "0", "positive"]),
    "slots of other weights": (lambda: select_slots(weights=(2, 2, 2)), ["`weights`", "(2, 2, 2)", "`q`"]),
    "the best slots over no axis": (lambda: select_slots(axis="y"), ["`axis`", "'y'", "shard_map"]),
    "the best of bf16": (lambda: select_topk(dtype="bfloat16"), ["`logits`", "bfloat16", "float32"]),
    "lse of other queries": (lambda: merge(lse=(2, 4)), ["`lse`", "(2, 4)", "2, 3"]),
    "bf16 lse": (lambda: merge(dtype="bfloat16"), ["`lse`", "bfloat16", "float32"]),
    "a shard too many": (lambda: LENGTHS_OF(shard=2), ["`shard`", "2", "0 to 1"]),
    "a negative shard": (lambda: LENGTHS_OF(shard=-1), ["`shard`", "-1", "0 to 1"]),
    "a shard of a name": (lambda: LENGTHS_OF(shard="x"), ["`shard`", "'x'", "int32"]),
    "a float shard": (lambda: LENGTHS_OF(shard=jnp.ones(())), ["`shard`", "float32", "int32"]),
    "no shards": (lambda: jaxkv.TokenShards(0), ["`num_shards`", "0", "positive"]),
    "a traced interleave": (
        lambda: jaxkv.TokenShards(2, jax.lax.axis_index("x")),
        ["`interleave`", "positive int", "static"],
    ),
    "a length that is no array": (
        lambda: context.local_lengths(5, shard=0, shards=TWO),
        ["`seq_lens`", "int", "array"],
    ),
    "float positions": (
        lambda: context.local_slots(TABLES, TABLES * 1.0, layout=MLA, shard=0),
        ["`positions`", "float32", "int32"],
    ),
    "positions of other requests": (
        lambda: context.local_slots(TABLES, TABLES[:1], layout=MLA, shard=0),
        ["`positions`", "(1, 2)", "`block_tables`"],
    ),
    "caches of other shards": (
        lambda: parallel.zeros(replace(MLA, shards=TWO), mesh_of_one(), "x").buffer,
        ["`layout`", "num_shards=2", "last axes", "{'x': 1}"],
    ),
    "caches over no axis": (lambda: parallel.zeros(MLA, mesh_of_one(), "y").buffer, ["`axis`", "'y'", "x"]),
}


def plan_of_two():
    return context.plan_decode(jaxkv.KVCache.zeros(GQA), TABLES, SEQ_LENS, axis="x", num_heads=2, q_len=2)


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls_are_rejected(call, words):
    with pytest.raises(ValueError, match=r"^`") as refusal:
        inside(call)
    for word in words:
        assert word in str(refusal.value), refusal.value


def test_query_tokens_attend_together_to_whole_blocks():
    """One request for both query tokens, as heads, and then one per query token, of as few columns as suffice."""
    shapes = []
    inside(lambda: shapes.extend(plan.shape for plan in plan_of_two()))
    whole, rest = shapes
    assert (whole.requests, whole.num_heads, whole.columns) == (2, 4, TABLES.shape[1])
    assert (rest.requests, rest.num_heads, rest.columns) == (4, 2, 1)


def test_calls_that_are_not_wrong_pass():
    assert inside(decode_mla).shape == (2, 3, 2, 8)
    assert inside(decode_kv).shape == (2, 2, 8)
    assert inside(decode_mla_sparse).shape == (2, 1, 2, 8)
    assert inside(partial(decode_mla_sparse, return_lse=True))[1].shape == (2, 1, 2)
    assert inside(lambda: jax.lax.pmax(indexer_logits(), "x")).shape == (2, 1, 8)
    assert [x.shape for x in inside(merge)] == [(2, 3, 8), (2, 3)]
    with pytest.raises(ValueError, match="`axis` is 'x'"):
        decode_mla()


def test_caches_in_a_row_are_no_cache_outside():
    two = jaxkv.KVCache(jnp.zeros(2 * MLA.size, jnp.bfloat16), MLA)
    assert parallel.zeros(MLA, mesh_of_one(), "x").buffer.shape == (MLA.size,)
    with pytest.raises(ValueError, match=r"`cache\.buffer`"):
        jaxkv.write_mla(two, jnp.ones((1, 8)), jnp.ones((1, 4)), jnp.asarray([0]), layer=0)
