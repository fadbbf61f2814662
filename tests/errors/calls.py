"""Good calls of every operation, of which the tests change an argument."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jaxkv

SIZES = dict(num_layers=3, num_blocks=6, block_size=4)


class Arrays(NamedTuple):
    """Arguments of good calls, and caches of every kind."""

    mla: jaxkv.KVCache
    mla_fp8: jaxkv.KVCache
    kv: jaxkv.KVCache
    kv_fp8: jaxkv.KVCache
    indexer: jaxkv.KVCache
    states: jaxkv.KVCache
    delta: jaxkv.KVCache
    kv_c: jax.Array
    k_pe: jax.Array
    k: jax.Array
    v: jax.Array
    key: jax.Array
    slots: jax.Array
    q_latent: jax.Array
    q_pe: jax.Array
    q: jax.Array
    q_indexer: jax.Array
    weights: jax.Array
    tables: jax.Array
    lengths: jax.Array
    cu_seq_lens: jax.Array
    chosen: jax.Array
    logits: jax.Array
    outs: jax.Array
    lses: jax.Array
    ids: jax.Array
    x: jax.Array
    experts: jax.Array
    shares: jax.Array
    conv: jax.Array
    ssm: jax.Array
    gate: jax.Array
    down: jax.Array


def zeros(entry, **sizes):
    return jaxkv.KVCache.zeros(jaxkv.CacheLayout(**SIZES, entry=entry, **sizes))


@cache
def arrays():
    """The same for all tests, which leave them as they are."""
    return Arrays(
        mla=zeros(jaxkv.MLAEntry("bf16", latent=8, rope=4)),
        mla_fp8=zeros(jaxkv.MLAEntry("fp8", latent=8, rope=4)),
        kv=zeros(jaxkv.KVEntry("bf16", head_dim=8, value_dim=4), num_heads=2),
        kv_fp8=zeros(jaxkv.KVEntry("fp8", head_dim=8, value_dim=4), num_heads=2),
        indexer=zeros(jaxkv.IndexerEntry(head_dim=16)),
        states=zeros(jaxkv.StateEntry({"conv": ((2, 3), "float32"), "ssm": ((4,), "bfloat16")})),
        delta=zeros(jaxkv.StateEntry({"conv": ((2, 10), "float32"), "delta": ((2, 2, 3), "bfloat16")})),
        kv_c=jnp.ones((5, 8)),
        k_pe=jnp.ones((5, 4)),
        k=jnp.ones((5, 2, 8)),
        v=jnp.ones((5, 2, 4)),
        key=jnp.ones((5, 16)),
        slots=jnp.arange(5),
        q_latent=jnp.ones((2, 3, 8)),
        q_pe=jnp.ones((2, 3, 4)),
        q=jnp.ones((2, 6, 8)),
        q_indexer=jnp.ones((2, 1, 7, 16)),
        weights=jnp.ones((2, 1, 7)),
        tables=jnp.arange(6).reshape(2, 3),
        lengths=jnp.asarray([9, 4]),
        cu_seq_lens=jnp.asarray([0, 9, 13]),
        chosen=jnp.arange(10).reshape(2, 1, 5),
        logits=jnp.ones((2, 20)),
        outs=jnp.ones((2, 3, 4)),
        lses=jnp.ones((2, 3)),
        ids=jnp.arange(2),
        x=jnp.ones((5, 8)),
        experts=jnp.arange(10).reshape(5, 2) % 3,
        shares=jnp.ones((5, 2)),
        conv=jnp.ones((5, 2, 3)),
        ssm=jnp.ones((5, 4)),
        gate=jnp.ones((3, 4, 8)),
        down=jnp.ones((3, 8, 4)),
    )


def call(operation, given, changes):
    """The operation with the arguments of a good call, some of them changed."""
    unknown = set(changes) - set(given)
    positional = {name: changes.get(name, value) for name, value in given.items()}
    return operation(**positional, **{name: changes[name] for name in unknown})


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def write_mla(a, **changes):
    return call(jaxkv.write_mla, dict(cache=a.mla, kv_c=a.kv_c, k_pe=a.k_pe, slot_mapping=a.slots, layer=0), changes)


def write_kv(a, **changes):
    return call(jaxkv.write_kv, dict(cache=a.kv, k=a.k, v=a.v, slot_mapping=a.slots, layer=0), changes)


def write_indexer_k(a, **changes):
    return call(jaxkv.write_indexer_k, dict(cache=a.indexer, k=a.key, slot_mapping=a.slots, layer=0), changes)


def write_entries(a, **changes):
    given = dict(cache=a.mla, entries=jnp.zeros((5, 24), jnp.uint8), slot_mapping=a.slots, layer=0)
    return call(jaxkv.write_entries, given, changes)


def write_state(a, **changes):
    given = dict(cache=a.states, states={"conv": a.conv, "ssm": a.ssm}, slots=a.slots, layer=0)
    return call(jaxkv.write_state, given, changes)


def read_state(a, **changes):
    return call(jaxkv.read_state, dict(cache=a.states, slots=a.slots, layer=0), changes)


def decode_delta_rule(a, **changes):
    given = dict(x=ones(5, 10), decay=ones(5, 2, 1), rate=ones(5, 2), conv_weight=ones(10, 3), cache=a.delta)
    return call(jaxkv.decode_delta_rule, dict(**given, read_slots=a.slots, write_slots=a.slots, layer=0), changes)


def decode_mla(a, **changes):
    given = dict(q_latent=a.q_latent, q_pe=a.q_pe, cache=a.mla, block_tables=a.tables, seq_lens=a.lengths)
    return call(jaxkv.decode_mla, dict(**given, layer=0, scale=0.1), changes)


def decode_kv(a, **changes):
    given = dict(q=a.q, cache=a.kv, block_tables=a.tables, seq_lens=a.lengths, layer=0, scale=0.1)
    return call(jaxkv.decode_kv, given, changes)


def shared(a, **changes):
    """`decode_mla` with a prefix of all requests."""
    return decode_mla(a, **{"prefix_tables": a.tables[0], "prefix_lens": a.lengths[0], **changes})


def shared_by_some(a, **changes):
    """`decode_kv` with several prefixes."""
    return decode_kv(a, **{"prefix_tables": a.tables, "prefix_lens": a.lengths, "prefix_of": a.ids, **changes})


def prefill_mla(a, **changes):
    given = dict(q_nope=ones(2, 5, 3, 6), q_pe=ones(2, 5, 3, 4), w_uk=ones(3, 6, 8), w_uv=ones(3, 7, 8))
    given |= dict(cache=a.mla, block_tables=a.tables, seq_lens=a.lengths)
    return call(jaxkv.prefill_mla, dict(**given, layer=0, scale=0.1), changes)


def prefill_kv(a, **changes):
    given = dict(q=jnp.tile(a.q[:, None], (1, 5, 1, 1)), cache=a.kv, block_tables=a.tables, seq_lens=a.lengths)
    return call(jaxkv.prefill_kv, dict(**given, layer=0, scale=0.1), changes)


def decode_mla_sparse_of_two(a, **changes):
    extra = call(jaxkv.ExtraCache, dict(cache=a.mla, slots=a.chosen, layer=0), changes)
    return decode_mla_sparse(a, extra=extra)


def decode_mla_sparse(a, **changes):
    given = dict(q_latent=a.q_latent[:, None], q_pe=a.q_pe[:, None], cache=a.mla, slots=a.chosen, layer=0, scale=0.1)
    return call(jaxkv.decode_mla_sparse, given, changes)


def indexer_logits(a, **changes):
    given = dict(q=a.q_indexer, weights=a.weights, cache=a.indexer, block_tables=a.tables, seq_lens=a.lengths)
    return call(jaxkv.indexer_logits, dict(**given, layer=0, max_len=12), changes)


def select_slots(a, **changes):
    given = dict(q=a.q_indexer, weights=a.weights, cache=a.indexer, block_tables=a.tables, seq_lens=a.lengths)
    return call(jaxkv.select_slots, dict(**given, k=4, layer=0, max_len=12), changes)


def gather(operation, stored):
    def run(a, **changes):
        given = dict(cache=getattr(a, stored), block_tables=a.tables, cu_seq_lens=a.cu_seq_lens, layer=0, total=13)
        return call(operation, given, changes)

    return run


gather_mla = gather(jaxkv.gather_mla, "mla")
gather_kv = gather(jaxkv.gather_kv, "kv")
gather_indexer_k = gather(jaxkv.gather_indexer_k, "indexer")
gather_entries = gather(jaxkv.gather_entries, "mla")


def read(operation, stored):
    return lambda a, **changes: call(operation, dict(cache=getattr(a, stored), slots=a.slots, layer=0), changes)


read_mla = read(jaxkv.read_mla, "mla")
read_kv = read(jaxkv.read_kv, "kv")
read_indexer_k = read(jaxkv.read_indexer_k, "indexer")


def select_topk(a, **changes):
    return call(jaxkv.select_topk, dict(logits=a.logits, k=4), changes)


def positions_to_slots(a, **changes):
    return call(jaxkv.positions_to_slots, dict(positions=a.chosen, block_tables=a.tables, cache=a.mla), changes)


def block_tables_from_csr(a, **changes):
    given = dict(indptr=a.tables[0], indices=a.slots, last_page_len=a.lengths)  # one block each
    return call(jaxkv.block_tables_from_csr, dict(**given, block_size=16, max_blocks=3), changes)


def swizzle_scales(a, **changes):
    return call(jaxkv.swizzle_scales, dict(scales=jnp.zeros((2, 3, 8, 4), jnp.uint8)), changes)


def merge_states(a, **changes):
    return call(jaxkv.merge_states, dict(outs=a.outs, lses=a.lses), changes)


def select_experts(a, **changes):
    return call(jaxkv.select_experts, dict(logits=a.logits, per_token=4), changes)


def grouped_swiglu(a, **changes):
    given = dict(x=a.x, experts=a.experts, weights=a.shares, gate=a.gate, up=a.gate, down=a.down)
    return call(jaxkv.grouped_swiglu, given, changes)


def scaled_linear(a, **changes):
    return call(jaxkv.scaled_linear, dict(x=a.x, weight=jaxkv.TileScaled.of(a.gate[0])), changes)


def copy_blocks(a, **changes):
    return call(jaxkv.copy_blocks, dict(cache=a.mla, src=a.ids, dst=a.ids), changes)


def read_blocks(a, **changes):
    return call(jaxkv.read_blocks, dict(cache=a.mla, blocks=a.ids), changes)


def write_blocks(a, **changes):
    rows = jnp.zeros((2, 144), jnp.bfloat16)
    return call(jaxkv.write_blocks, dict(cache=a.mla, blocks=a.ids, data=rows), changes)


OF_ONE_CACHE = {
    "write_mla": (write_mla, "mla", "MLAEntry"),
    "write_kv": (write_kv, "kv", "KVEntry"),
    "write_indexer_k": (write_indexer_k, "indexer", "IndexerEntry"),
    "write_state": (write_state, "states", "StateEntry"),
    "read_state": (read_state, "states", "StateEntry"),
    "decode_delta_rule": (decode_delta_rule, "delta", "StateEntry"),
    "decode_mla": (decode_mla, "mla", "MLAEntry"),
    "decode_kv": (decode_kv, "kv", "KVEntry"),
    "prefill_kv": (prefill_kv, "kv", "KVEntry"),
    "prefill_mla": (prefill_mla, "mla", "MLAEntry"),
    "decode_mla_sparse": (decode_mla_sparse, "mla", "MLAEntry"),
    "indexer_logits": (indexer_logits, "indexer", "IndexerEntry"),
    "select_slots": (select_slots, "indexer", "IndexerEntry"),
    "gather_mla": (gather_mla, "mla", "MLAEntry"),
    "gather_kv": (gather_kv, "kv", "KVEntry"),
    "gather_indexer_k": (gather_indexer_k, "indexer", "IndexerEntry"),
    "read_mla": (read_mla, "mla", "MLAEntry"),
    "read_kv": (read_kv, "kv", "KVEntry"),
    "read_indexer_k": (read_indexer_k, "indexer", "IndexerEntry"),
}
OF_ANY_CACHE = {
    "copy_blocks": (copy_blocks, "mla", "Entry"),
    "read_blocks": (read_blocks, "mla", "Entry"),
    "write_blocks": (write_blocks, "mla", "Entry"),
    "write_entries": (write_entries, "mla", "Entry"),
    "gather_entries": (gather_entries, "mla", "Entry"),
}
OF_NO_CACHE = {
    "select_topk": select_topk,
    "positions_to_slots": positions_to_slots,
    "block_tables_from_csr": block_tables_from_csr,
    "swizzle_scales": swizzle_scales,
    "merge_states": merge_states,
    "select_experts": select_experts,
    "grouped_swiglu": grouped_swiglu,
    "scaled_linear": scaled_linear,
}
OPERATIONS = {name: case[0] for name, case in {**OF_ONE_CACHE, **OF_ANY_CACHE}.items()} | OF_NO_CACHE
PLAIN_JAX = "positions_to_slots", "block_tables_from_csr", "swizzle_scales"
DISPATCHED = [name for name in OPERATIONS if name not in PLAIN_JAX]
OF_BATCHES = {
    "decode_mla": decode_mla,
    "decode_kv": decode_kv,
    "prefill_kv": prefill_kv,
    "prefill_mla": prefill_mla,
    "indexer_logits": indexer_logits,
    "select_slots": select_slots,
}
OF_RUNS = {
    "gather_mla": gather_mla,
    "gather_kv": gather_kv,
    "gather_indexer_k": gather_indexer_k,
    "gather_entries": gather_entries,
}

every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def check(wrong, fragments):
    """The call raises ValueError, as it stands and while it is traced with all arrays unknown."""
    modes = {"eager": lambda a: wrong(a), "traced": lambda a: jax.eval_shape(wrong, a)}
    for mode, run in modes.items():
        with pytest.raises(ValueError, match="`") as caught:
            run(arrays())
        assert type(caught.value) is ValueError, mode
        for fragment in fragments:
            assert fragment in str(caught.value), mode


def cases(tables):
    """Parametrises `wrong` and `fragments` with the rows (name, wrong, fragments) of tables by name."""
    rows = {f"{table}: {row[0]}": row[1:] for table, rows in tables.items() for row in rows}
    assert len(rows) == sum(map(len, tables.values())), "two rows of a table have the same name"
    return pytest.mark.parametrize(("wrong", "fragments"), rows.values(), ids=rows)
