"""Wrong calls, as a stranger makes them: each a ValueError that names the argument, what it is and what is expected."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.ops import OPERATIONS as DECLARED
from support.compare import assert_same_bits

SIZES = dict(num_layers=3, num_blocks=6, block_size=4)


class Arrays(NamedTuple):
    """Arguments of good calls, and caches of every kind."""

    mla: jaxkv.KVCache
    mla_fp8: jaxkv.KVCache
    kv: jaxkv.KVCache
    kv_fp8: jaxkv.KVCache
    indexer: jaxkv.KVCache
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


def cache(entry, **sizes):
    return jaxkv.KVCache.zeros(jaxkv.CacheLayout(**SIZES, entry=entry, **sizes))


def arrays():
    return Arrays(
        mla=cache(jaxkv.MLAEntry("bf16", latent=8, rope=4)),
        mla_fp8=cache(jaxkv.MLAEntry("fp8", latent=8, rope=4)),
        kv=cache(jaxkv.KVEntry("bf16", head_dim=8, value_dim=4), num_heads=2),
        kv_fp8=cache(jaxkv.KVEntry("fp8", head_dim=8, value_dim=4), num_heads=2),
        indexer=cache(jaxkv.IndexerEntry(head_dim=16)),
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
    )


def call(operation, given, changes):
    """The operation with the arguments of a good call, some of them changed."""
    unknown = set(changes) - set(given)
    positional = {name: changes.get(name, value) for name, value in given.items()}
    return operation(**positional, **{name: changes[name] for name in unknown})


def write_mla(a, **changes):
    return call(jaxkv.write_mla, dict(cache=a.mla, kv_c=a.kv_c, k_pe=a.k_pe, slot_mapping=a.slots, layer=0), changes)


def write_kv(a, **changes):
    return call(jaxkv.write_kv, dict(cache=a.kv, k=a.k, v=a.v, slot_mapping=a.slots, layer=0), changes)


def write_indexer_k(a, **changes):
    return call(jaxkv.write_indexer_k, dict(cache=a.indexer, k=a.key, slot_mapping=a.slots, layer=0), changes)


def decode_mla(a, **changes):
    given = dict(q_latent=a.q_latent, q_pe=a.q_pe, cache=a.mla, block_tables=a.tables, seq_lens=a.lengths)
    return call(jaxkv.decode_mla, dict(**given, layer=0, scale=0.1), changes)


def decode_kv(a, **changes):
    given = dict(q=a.q, cache=a.kv, block_tables=a.tables, seq_lens=a.lengths, layer=0, scale=0.1)
    return call(jaxkv.decode_kv, given, changes)


def decode_mla_sparse(a, **changes):
    given = dict(q_latent=a.q_latent[:, None], q_pe=a.q_pe[:, None], cache=a.mla, slots=a.chosen, layer=0, scale=0.1)
    return call(jaxkv.decode_mla_sparse, given, changes)


def indexer_logits(a, **changes):
    given = dict(q=a.q_indexer, weights=a.weights, cache=a.indexer, block_tables=a.tables, seq_lens=a.lengths)
    return call(jaxkv.indexer_logits, dict(**given, layer=0, max_len=12), changes)


def gather(operation, stored):
    def run(a, **changes):
        given = dict(cache=getattr(a, stored), block_tables=a.tables, cu_seq_lens=a.cu_seq_lens, layer=0, total=13)
        return call(operation, given, changes)

    return run


gather_mla = gather(jaxkv.gather_mla, "mla")
gather_kv = gather(jaxkv.gather_kv, "kv")
gather_indexer_k = gather(jaxkv.gather_indexer_k, "indexer")


def select_topk(a, **changes):
    return call(jaxkv.select_topk, dict(logits=a.logits, k=4), changes)


def positions_to_slots(a, **changes):
    return call(jaxkv.positions_to_slots, dict(positions=a.chosen, block_tables=a.tables, block_size=4), changes)


def merge_states(a, **changes):
    return call(jaxkv.merge_states, dict(outs=a.outs, lses=a.lses), changes)


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
    "decode_mla": (decode_mla, "mla", "MLAEntry"),
    "decode_kv": (decode_kv, "kv", "KVEntry"),
    "decode_mla_sparse": (decode_mla_sparse, "mla", "MLAEntry"),
    "indexer_logits": (indexer_logits, "indexer", "IndexerEntry"),
    "gather_mla": (gather_mla, "mla", "MLAEntry"),
    "gather_kv": (gather_kv, "kv", "KVEntry"),
    "gather_indexer_k": (gather_indexer_k, "indexer", "IndexerEntry"),
}
OF_ANY_CACHE = {
    "copy_blocks": (copy_blocks, "mla", "Entry"),
    "read_blocks": (read_blocks, "mla", "Entry"),
    "write_blocks": (write_blocks, "mla", "Entry"),
}
OF_NO_CACHE = {
    "select_topk": select_topk,
    "positions_to_slots": positions_to_slots,
    "merge_states": merge_states,
}
OPERATIONS = {name: case[0] for name, case in {**OF_ONE_CACHE, **OF_ANY_CACHE}.items()} | OF_NO_CACHE
DISPATCHED = [name for name in OPERATIONS if name != "positions_to_slots"]
OF_BATCHES = {"decode_mla": decode_mla, "decode_kv": decode_kv, "indexer_logits": indexer_logits}
OF_RUNS = {"gather_mla": gather_mla, "gather_kv": gather_kv, "gather_indexer_k": gather_indexer_k}

every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def test_every_declared_operation_is_called_here():
    assert {*DISPATCHED, "plan_decode"} == {operation.name for operation in DECLARED}  # plans: test_plan.py


# (id, call, what the message has to hold)
SHAPES = [
    ("kv_c too wide", lambda a: write_mla(a, kv_c=jnp.ones((5, 9))), ["`kv_c`", "(5, 9)", "[T, R] = [T, 8]", "latent"]),
    ("kv_c with heads", lambda a: write_mla(a, kv_c=a.kv_c[:, None]), ["`kv_c`", "(5, 1, 8)", "[T, R]"]),
    ("k_pe too narrow", lambda a: write_mla(a, k_pe=a.k_pe[:, :3]), ["`k_pe`", "(5, 3)", "[5, 4]", "rope"]),
    ("k_pe too short", lambda a: write_mla(a, k_pe=a.k_pe[:4]), ["`k_pe`", "(4, 4)", "[5, 4]", "that of `kv_c`"]),
    ("slots too short", lambda a: write_mla(a, slot_mapping=a.slots[:4]), ["`slot_mapping`", "(4,)", "[T] = [5]"]),
    ("slots of rank 2", lambda a: write_mla(a, slot_mapping=a.slots[None]), ["`slot_mapping`", "(1, 5)", "[T] = [5]"]),
    ("one slot", lambda a: write_mla(a, slot_mapping=a.slots[0]), ["`slot_mapping`", "()", "[T] = [5]"]),
    ("k of one head", lambda a: write_kv(a, k=a.k[:, 0]), ["`k`", "(5, 8)", "[T, H, D] = [T, 2, 8]"]),
    ("k of 3 heads", lambda a: write_kv(a, k=jnp.ones((5, 3, 8))), ["`k`", "(5, 3, 8)", "[T, 2, 8]", "cache's heads"]),
    ("v as wide as k", lambda a: write_kv(a, v=a.k), ["`v`", "(5, 2, 8)", "[T, H, Dv] = [5, 2, 4]", "value_dim"]),
    ("heads first", lambda a: write_kv(a, k=a.k.swapaxes(0, 1)), ["`k`", "(2, 5, 8)", "[T, 2, 8]"]),
    ("slots of heads", lambda a: write_kv(a, slot_mapping=a.slots[:, None]), ["`slot_mapping`", "(5, 1)", "[5]"]),
    ("key too wide", lambda a: write_indexer_k(a, k=jnp.ones((5, 17))), ["`k`", "(5, 17)", "[T, D] = [T, 16]"]),
    ("key of heads", lambda a: write_indexer_k(a, k=a.key[:, None]), ["`k`", "(5, 1, 16)", "[T, D]"]),
    ("slots of keys", lambda a: write_indexer_k(a, slot_mapping=a.slots[1:]), ["`slot_mapping`", "(4,)", "[5]"]),
    (
        "q_latent of rank 2",
        lambda a: decode_mla(a, q_latent=a.q_latent[0]),
        ["`q_latent`", "2 axes", "[B, Hq", "[B, Q, Hq"],
    ),
    (
        "q_latent of rank 5",
        lambda a: decode_mla(a, q_latent=a.q_latent[None, None]),
        ["`q_latent`", "5 axes", "[B, Hq"],
    ),
    ("q_latent too wide", lambda a: decode_mla(a, q_latent=jnp.ones((2, 3, 12))), ["`q_latent`", "(2, 3, 12)", "8]"]),
    ("q_pe of other heads", lambda a: decode_mla(a, q_pe=jnp.ones((2, 4, 4))), ["`q_pe`", "(2, 4, 4)", "[2, 3, 4]"]),
    ("q_pe with tokens", lambda a: decode_mla(a, q_pe=a.q_pe[:, None]), ["`q_pe`", "(2, 1, 3, 4)", "[2, 3, 4]"]),
    (
        "q_pe of other tokens",
        lambda a: decode_mla(a, q_latent=a.q_latent[:, None]),
        ["`q_pe`", "(2, 3, 4)", "[2, 1, 3, 4]"],
    ),
    (
        "tables of rank 1",
        lambda a: decode_mla(a, block_tables=a.tables[0]),
        ["`block_tables`", "(3,)", "[B, M] = [2, M]"],
    ),
    (
        "tables of 3",
        lambda a: decode_mla(a, block_tables=jnp.zeros((3, 3), int)),
        ["`block_tables`", "(3, 3)", "[2, M]"],
    ),
    ("lengths of 3", lambda a: decode_mla(a, seq_lens=jnp.ones(3, int)), ["`seq_lens`", "(3,)", "[B] = [2]"]),
    ("q too wide", lambda a: decode_kv(a, q=jnp.ones((2, 6, 9))), ["`q`", "(2, 6, 9)", "[B, Hq, 8]", "head_dim"]),
    ("q of rank 2", lambda a: decode_kv(a, q=a.q[0]), ["`q`", "2 axes", "[B, Hq", "[B, Q, Hq"]),
    ("q of 5 heads", lambda a: decode_kv(a, q=a.q[:, :5]), ["`q`", "5 heads", "multiple", "2 heads"]),
    ("q of 1 head", lambda a: decode_kv(a, q=a.q[:, :1]), ["`q`", "1 heads", "multiple", "2 heads"]),
    (
        "q_latent without tokens",
        lambda a: decode_mla_sparse(a, q_latent=a.q_latent),
        ["`q_latent`", "(2, 3, 8)", "[B, Q, Hq"],
    ),
    ("q_pe without tokens", lambda a: decode_mla_sparse(a, q_pe=a.q_pe), ["`q_pe`", "(2, 3, 4)", "[2, 1, 3, 4]"]),
    (
        "slots of other tokens",
        lambda a: decode_mla_sparse(a, slots=jnp.zeros((2, 2, 5), int)),
        ["`slots`", "(2, 2, 5)", "[2, 1, K]"],
    ),
    ("slots without tokens", lambda a: decode_mla_sparse(a, slots=a.chosen[:, 0]), ["`slots`", "(2, 5)", "[B, Q, K]"]),
    (
        "no slots at all",
        lambda a: decode_mla_sparse(a, slots=a.chosen[:, :, :0]),
        ["`slots`", "(2, 1, 0)", "K at least 1"],
    ),
    ("counts of slots", lambda a: decode_mla_sparse(a, counts=a.chosen), ["`counts`", "(2, 1, 5)", "[B, Q] = [2, 1]"]),
    ("counts of requests", lambda a: decode_mla_sparse(a, counts=a.lengths), ["`counts`", "(2,)", "[B, Q] = [2, 1]"]),
    ("sinks of 4", lambda a: decode_mla_sparse(a, sinks=jnp.ones(4)), ["`sinks`", "(4,)", "[Hq] = [3]", "`q_latent`"]),
    ("q without tokens", lambda a: indexer_logits(a, q=a.q_indexer[:, 0]), ["`q`", "(2, 7, 16)", "[B, Q, Hi, D]"]),
    (
        "q of other width",
        lambda a: indexer_logits(a, q=jnp.ones((2, 1, 7, 8))),
        ["`q`", "(2, 1, 7, 8)", "[B, Q, Hi, 16]"],
    ),
    (
        "weights of other heads",
        lambda a: indexer_logits(a, weights=jnp.ones((2, 1, 8))),
        ["`weights`", "(2, 1, 8)", "[2, 1, 7]"],
    ),
    (
        "running sum too short",
        lambda a: gather_mla(a, cu_seq_lens=a.lengths),
        ["`cu_seq_lens`", "(2,)", "[3]", "`block_tables`"],
    ),
    (
        "running sum of rank 2",
        lambda a: gather_kv(a, cu_seq_lens=a.cu_seq_lens[None]),
        ["`cu_seq_lens`", "(1, 3)", "[3]"],
    ),
    (
        "starts of runs and end",
        lambda a: gather_mla(a, seq_starts=a.cu_seq_lens),
        ["`seq_starts`", "(3,)", "[B] = [2]"],
    ),
    ("no logits", lambda a: select_topk(a, logits=a.logits[0, 0]), ["`logits`", "float32[]", "float32 [..., N]"]),
    (
        "positions of rank 2",
        lambda a: positions_to_slots(a, positions=a.chosen[:, 0]),
        ["`positions`", "(2, 5)", "[B, Q, K]"],
    ),
    (
        "positions of rank 1",
        lambda a: positions_to_slots(a, positions=a.chosen[0, 0]),
        ["`positions`", "(5,)", "[B, Q, K]"],
    ),
    (
        "positions of 3",
        lambda a: positions_to_slots(a, block_tables=jnp.zeros((3, 4), int)),
        ["`positions`", "(2, 1, 5)", "[3, n1, n2]"],
    ),
    ("lses as wide as outs", lambda a: merge_states(a, lses=a.outs), ["`lses`", "(2, 3, 4)", "`outs`", "(2, 3)"]),
    ("lses of other parts", lambda a: merge_states(a, lses=a.lses[:1]), ["`lses`", "(1, 3)", "`outs`", "(2, 3)"]),
    (
        "outs of two shapes",
        lambda a: merge_states(a, outs=[a.outs[0], a.outs[0, :2]]),
        ["`outs`", "(2, 4)", "(3, 4)", "one shape"],
    ),
    (
        "lses of two shapes",
        lambda a: merge_states(a, lses=[a.lses[0], a.lses[0, :2]]),
        ["`lses`", "(2,)", "(3,)", "one shape"],
    ),
    ("no parts", lambda a: merge_states(a, outs=[], lses=[]), ["`outs`", "[]", "one shape"]),
    ("dst too short", lambda a: copy_blocks(a, dst=a.ids[:1]), ["`dst`", "(1,)", "[n] = [2]", "that of `src`"]),
    ("src of pairs", lambda a: copy_blocks(a, src=a.tables), ["`src`", "(2, 3)", "[n]"]),
    ("blocks of pairs", lambda a: read_blocks(a, blocks=a.tables), ["`blocks`", "(2, 3)", "[n]"]),
    (
        "rows of entries",
        lambda a: write_blocks(a, data=jnp.ones((2, 48), "bfloat16")),
        ["`data`", "(2, 48)", "[2, 144]", "payload"],
    ),
    ("too few rows", lambda a: write_blocks(a, blocks=jnp.arange(3)), ["`data`", "(2, 144)", "[3, 144]"]),
]

DTYPES = [
    (
        "int kv_c",
        lambda a: write_mla(a, kv_c=a.kv_c.astype(int)),
        ["`kv_c`", "dtype int32", "bfloat16 or float16 or float32"],
    ),
    ("float64 kv_c", lambda a: write_mla(a, kv_c=np.ones((5, 8))), ["`kv_c`", "dtype float64", "float32"]),
    (
        "fp8 k_pe",
        lambda a: write_mla(a, k_pe=a.k_pe.astype("float8_e4m3fn")),
        ["`k_pe`", "dtype float8_e4m3fn", "bfloat16"],
    ),
    (
        "float slots",
        lambda a: write_mla(a, slot_mapping=a.slots.astype(float)),
        ["`slot_mapping`", "dtype float32", "int32"],
    ),
    ("bool slots", lambda a: write_mla(a, slot_mapping=a.slots > 2), ["`slot_mapping`", "dtype bool", "int32"]),
    ("bool v", lambda a: write_kv(a, v=a.v > 0), ["`v`", "dtype bool", "float32"]),
    ("uint8 key", lambda a: write_indexer_k(a, k=a.key.astype("uint8")), ["`k`", "dtype uint8", "bfloat16"]),
    (
        "q_pe of another dtype",
        lambda a: decode_mla(a, q_pe=a.q_pe.astype("bfloat16")),
        ["`q_pe`", "dtype bfloat16", "float32"],
    ),
    (
        "sparse q_pe of another dtype",
        lambda a: decode_mla_sparse(a, q_pe=a.q_pe[:, None].astype("float16")),
        ["`q_pe`", "dtype float16", "float32"],
    ),
    (
        "int q_latent",
        lambda a: decode_mla(a, q_latent=a.q_latent.astype(int)),
        ["`q_latent`", "dtype int32", "bfloat16"],
    ),
    ("fp8 q", lambda a: decode_kv(a, q=a.q.astype("float8_e4m3fn")), ["`q`", "dtype float8_e4m3fn", "bfloat16"]),
    (
        "e5m2 q",
        lambda a: indexer_logits(a, q=a.q_indexer.astype("float8_e5m2")),
        ["`q`", "dtype float8_e5m2", "float8_e4m3fn"],
    ),
    (
        "fp8 weights",
        lambda a: indexer_logits(a, weights=a.weights.astype("float8_e4m3fn")),
        ["`weights`", "dtype float8_e4m3fn"],
    ),
    (
        "float tables",
        lambda a: decode_mla(a, block_tables=a.tables * 1.0),
        ["`block_tables`", "dtype float32", "int32"],
    ),
    ("float lengths", lambda a: decode_kv(a, seq_lens=a.lengths * 1.0), ["`seq_lens`", "dtype float32", "int32"]),
    ("float lengths of keys", lambda a: indexer_logits(a, seq_lens=a.lengths * 1.0), ["`seq_lens`", "dtype float32"]),
    (
        "float running sum",
        lambda a: gather_mla(a, cu_seq_lens=a.cu_seq_lens * 1.0),
        ["`cu_seq_lens`", "dtype float32", "int32"],
    ),
    ("float starts", lambda a: gather_mla(a, seq_starts=a.lengths * 1.0), ["`seq_starts`", "dtype float32", "int32"]),
    ("float chosen slots", lambda a: decode_mla_sparse(a, slots=a.chosen * 1.0), ["`slots`", "dtype float32", "int32"]),
    ("float counts", lambda a: decode_mla_sparse(a, counts=jnp.ones((2, 1))), ["`counts`", "dtype float32", "int32"]),
    (
        "bf16 sinks",
        lambda a: decode_mla_sparse(a, sinks=jnp.ones(3, "bfloat16")),
        ["`sinks`", "dtype bfloat16", "float32"],
    ),
    (
        "float positions",
        lambda a: positions_to_slots(a, positions=a.chosen * 1.0),
        ["`positions`", "dtype float32", "int32"],
    ),
    (
        "bf16 logits",
        lambda a: select_topk(a, logits=a.logits.astype("bfloat16")),
        ["`logits`", "bfloat16[2, 20]", "float32"],
    ),
    ("int outs", lambda a: merge_states(a, outs=a.outs.astype(int)), ["`outs`", "int32[2, 3, 4]", "bfloat16"]),
    ("bf16 lses", lambda a: merge_states(a, lses=a.lses.astype("bfloat16")), ["`lses`", "bfloat16", "float32"]),
    ("float src", lambda a: copy_blocks(a, src=a.ids * 1.0), ["`src`", "dtype float32", "int32"]),
    ("float dst", lambda a: copy_blocks(a, dst=a.ids * 1.0), ["`dst`", "dtype float32", "int32"]),
    ("float blocks", lambda a: read_blocks(a, blocks=a.ids * 1.0), ["`blocks`", "dtype float32", "int32"]),
    ("rows of float32", lambda a: write_blocks(a, data=jnp.ones((2, 144))), ["`data`", "dtype float32", "bfloat16"]),
    (
        "gather to float64",
        lambda a: gather_mla(a, dtype="float64"),
        ["`dtype`", "'float64'", "bfloat16, float16, float32"],
    ),
    ("gather to int8", lambda a: gather_kv(a, dtype="int8"), ["`dtype`", "'int8'", "bfloat16, float16, float32"]),
    (
        "gather to fp8",
        lambda a: gather_mla(a, dtype=jnp.float8_e4m3fn),
        ["`dtype`", "float8_e4m3fn", "bfloat16, float16"],
    ),
    ("gather to nonsense", lambda a: gather_indexer_k(a, dtype="brain"), ["`dtype`", "'brain'", "bfloat16, float16"]),
    ("gather to None", lambda a: gather_mla(a, dtype=None), ["`dtype`", "None", "bfloat16, float16, float32"]),
]

SCALES = [
    (
        "write without kv_scale",
        lambda a: write_mla(a, cache=a.mla_fp8),
        ["`kv_scale`", "None", "'fp8'", "expected a number"],
    ),
    ("decode without kv_scale", lambda a: decode_mla(a, cache=a.mla_fp8), ["`kv_scale`", "None", "'fp8'"]),
    ("sparse without kv_scale", lambda a: decode_mla_sparse(a, cache=a.mla_fp8), ["`kv_scale`", "None", "'fp8'"]),
    ("gather without kv_scale", lambda a: gather_mla(a, cache=a.mla_fp8), ["`kv_scale`", "None", "'fp8'"]),
    ("write without k_scale", lambda a: write_kv(a, cache=a.kv_fp8, v_scale=1.0), ["`k_scale`", "None", "'fp8'"]),
    ("write without v_scale", lambda a: write_kv(a, cache=a.kv_fp8, k_scale=1.0), ["`v_scale`", "None", "'fp8'"]),
    ("decode without v_scale", lambda a: decode_kv(a, cache=a.kv_fp8, k_scale=1.0), ["`v_scale`", "None", "'fp8'"]),
    ("gather without k_scale", lambda a: gather_kv(a, cache=a.kv_fp8, v_scale=1.0), ["`k_scale`", "None", "'fp8'"]),
    ("kv_scale for bf16", lambda a: write_mla(a, kv_scale=0.5), ["`kv_scale`", "0.5", "'bf16'", "None"]),
    (
        "array kv_scale for bf16",
        lambda a: decode_mla(a, kv_scale=a.kv_c[0, 0]),
        ["`kv_scale`", "float32[]", "'bf16'", "None"],
    ),
    ("kv_scale of 1 for bf16", lambda a: gather_mla(a, kv_scale=1), ["`kv_scale`", "is 1:", "'bf16'", "None"]),
    ("v_scale for bf16", lambda a: decode_kv(a, v_scale=2.5), ["`v_scale`", "2.5", "'bf16'", "None"]),
    ("kv_scale of 0", lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=0), ["`kv_scale`", "is 0:", "positive"]),
    ("kv_scale of -0.0", lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=-0.0), ["`kv_scale`", "-0.0", "positive"]),
    ("negative kv_scale", lambda a: decode_mla(a, cache=a.mla_fp8, kv_scale=-0.5), ["`kv_scale`", "-0.5", "positive"]),
    (
        "NaN kv_scale",
        lambda a: gather_mla(a, cache=a.mla_fp8, kv_scale=float("nan")),
        ["`kv_scale`", "nan", "positive"],
    ),
    (
        "kv_scale that is 0 on devices",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=1e-40),
        ["`kv_scale`", "1e-40", "positive"],
    ),
    (
        "NumPy kv_scale of 0",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=np.float32(0)),
        ["`kv_scale`", "0.0", "positive"],
    ),
    (
        "a k_scale of 0",
        lambda a: write_kv(a, cache=a.kv_fp8, k_scale=np.asarray([1.0, 0.0], np.float32), v_scale=1.0),
        ["`k_scale`", "[1. 0.]", "positive"],
    ),
    (
        "kv_scale of a string",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale="0.5"),
        ["`kv_scale`", "'0.5'", "expected a number"],
    ),
    (
        "kv_scale of a list",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=[0.5]),
        ["`kv_scale`", "[0.5]", "expected a number"],
    ),
    (
        "kv_scale of True",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=True),
        ["`kv_scale`", "True", "expected a number"],
    ),
    (
        "kv_scale a layer",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=jnp.ones(3)),
        ["`kv_scale`", "float32[3]", "scalar"],
    ),
    (
        "complex kv_scale",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=jnp.complex64(1)),
        ["`kv_scale`", "complex64[]", "expected a number"],
    ),
    (
        "k_scale of 3 heads",
        lambda a: write_kv(a, cache=a.kv_fp8, k_scale=jnp.ones(3), v_scale=1.0),
        ["`k_scale`", "(3,)", "scalar", "[H] = [2]"],
    ),
    (
        "v_scale of pairs",
        lambda a: decode_kv(a, cache=a.kv_fp8, k_scale=1.0, v_scale=jnp.ones((2, 1))),
        ["`v_scale`", "(2, 1)", "[H] = [2]"],
    ),
    (
        "k_scale of query heads",
        lambda a: gather_kv(a, cache=a.kv_fp8, k_scale=jnp.ones(6), v_scale=1.0),
        ["`k_scale`", "(6,)", "[H] = [2]"],
    ),
    (
        "k_scale of a list",
        lambda a: write_kv(a, cache=a.kv_fp8, k_scale=[1.0, 1.0], v_scale=1.0),
        ["`k_scale`", "[1.0, 1.0]", "array"],
    ),
    ("no softmax scale", lambda a: decode_mla(a, scale=None), ["`scale`", "None", "expected a number"]),
    ("softmax scale of a string", lambda a: decode_kv(a, scale="auto"), ["`scale`", "'auto'", "expected a number"]),
    ("softmax scale a head", lambda a: decode_mla_sparse(a, scale=jnp.ones(3)), ["`scale`", "float32[3]", "scalar"]),
]

STATICS = [
    ("logit_cap 0", lambda a: decode_mla(a, logit_cap=0), ["`logit_cap`", "is 0:", "positive number", "None"]),
    ("negative logit_cap", lambda a: decode_kv(a, logit_cap=-30.0), ["`logit_cap`", "-30.0", "positive number"]),
    (
        "logit_cap of a string",
        lambda a: decode_mla_sparse(a, logit_cap="30"),
        ["`logit_cap`", "'30'", "positive number"],
    ),
    ("NaN logit_cap", lambda a: decode_mla(a, logit_cap=float("nan")), ["`logit_cap`", "nan", "positive number"]),
    ("array logit_cap", lambda a: decode_mla(a, logit_cap=a.kv_c[0, 0]), ["`logit_cap`", "static"]),
    ("window 0", lambda a: decode_kv(a, window=0), ["`window`", "is 0:", "positive int"]),
    ("negative window", lambda a: decode_kv(a, window=-1), ["`window`", "-1", "positive int"]),
    ("window of a float", lambda a: decode_kv(a, window=128.0), ["`window`", "128.0", "positive int"]),
    ("array window", lambda a: decode_kv(a, window=a.lengths[0]), ["`window`", "positive int", "static"]),
    ("total 0", lambda a: gather_mla(a, total=0), ["`total`", "is 0:", "positive int"]),
    ("total of a float", lambda a: gather_kv(a, total=13.0), ["`total`", "13.0", "positive int"]),
    ("no total", lambda a: gather_indexer_k(a, total=None), ["`total`", "None", "positive int"]),
    ("array total", lambda a: gather_mla(a, total=a.cu_seq_lens[-1]), ["`total`", "positive int", "static"]),
    ("max_len 0", lambda a: indexer_logits(a, max_len=0), ["`max_len`", "is 0:", "positive int"]),
    ("max_len of True", lambda a: indexer_logits(a, max_len=True), ["`max_len`", "True", "positive int"]),
    ("window of True", lambda a: decode_kv(a, window=True), ["`window`", "True", "positive int"]),
    (
        "max_len past int32",
        lambda a: indexer_logits(a, max_len=2**31),
        ["`max_len`", "is 2147483648:", "below 2147483648"],
    ),
    ("total past int32", lambda a: gather_mla(a, total=2**31), ["`total`", "is 2147483648:", "below 2147483648"]),
    ("k past int32", lambda a: select_topk(a, k=2**40), ["`k`", "is 1099511627776:", "below 2147483648"]),
    (
        "block_size past int32",
        lambda a: positions_to_slots(a, block_size=2**31),
        ["`block_size`", "is 2147483648:", "below 2147483648"],
    ),
    ("logit_cap past float32", lambda a: decode_mla(a, logit_cap=1e39), ["`logit_cap`", "1e+39", "float32 holds"]),
    ("logit_cap without an inverse", lambda a: decode_mla(a, logit_cap=1e38), ["`logit_cap`", "1e+38", "to 2**126"]),
    ("logit_cap that is 0 on devices", lambda a: decode_kv(a, logit_cap=1e-40), ["`logit_cap`", "1e-40", "2**-126"]),
    ("k 0", lambda a: select_topk(a, k=0), ["`k`", "is 0:", "positive int"]),
    ("k of a float", lambda a: select_topk(a, k=2.0), ["`k`", "2.0", "positive int"]),
    ("block_size 0", lambda a: positions_to_slots(a, block_size=0), ["`block_size`", "is 0:", "positive int"]),
]

LAYERS = [
    ("past the last", 3, ["is 3:", "3 layers", "0 to 2"]),
    ("negative", -1, ["is -1:", "3 layers", "0 to 2"]),
    ("of NumPy, past the last", np.int64(3), ["is 3:", "3 layers", "0 to 2"]),
    ("beyond int32", 2**32, ["is 4294967296:", "3 layers"]),
    ("bool", True, ["is True:", "expected an int"]),
    ("bool of NumPy", np.True_, ["True", "expected an int"]),
    ("bool array of NumPy", np.asarray(True), ["True", "expected an int"]),
    ("bool array", jnp.asarray(True), ["bool[]", "expected an int"]),
    ("float", 1.0, ["is 1.0:", "expected an int"]),
    ("string", "1", ["is '1':", "expected an int"]),
    ("none", None, ["is None:", "expected an int"]),
    ("list", [0], ["is [0]:", "expected an int"]),
    ("slice", slice(0, 1), ["slice(0, 1", "expected an int"]),
    ("float of NumPy", np.float32(1), ["1.0", "expected an int"]),
    ("float array", jnp.float32(1), ["float32[]", "expected an int", "int32 scalar"]),
    ("array of one", jnp.zeros(1, int), ["int32[1]", "expected an int", "int32 scalar"]),
]

CACHES = [
    (
        "view of another size",
        lambda a: a.mla.view(jaxkv.CacheLayout(**SIZES, entry=a.mla.layout.entry, block_padding=1)),
        ["`layout`", "870 elements", "864"],
    ),
    (
        "view of another dtype",
        lambda a: a.mla.view(jaxkv.CacheLayout(**SIZES, entry=jaxkv.MLAEntry("f16", latent=8, rope=4))),
        ["`layout`", "float16", "bfloat16"],
    ),
    *(
        (
            f"{what} in {name}",
            lambda a, broken=broken, run=run, stored=stored: run(a, cache=broken(getattr(a, stored))),
            told,
        )
        for name, (run, stored, _) in {**OF_ONE_CACHE, **OF_ANY_CACHE}.items()
        for what, broken, told in [
            (
                "buffer too short",
                lambda c: jaxkv.KVCache(c.buffer[:-1], c.layout),
                ["`cache.buffer`", "expected its layout's"],
            ),
            ("buffer of rows", lambda c: jaxkv.KVCache(c.buffer.reshape(6, -1), c.layout), ["`cache.buffer`", "[6, "]),
            (
                "buffer of another dtype",
                lambda c: jaxkv.KVCache(c.buffer.astype("float32"), c.layout),
                ["`cache.buffer`", "float32"],
            ),
            ("buffer of a list", lambda c: jaxkv.KVCache([0.0], c.layout), ["`cache.buffer`", "[0.0]"]),
            ("no buffer", lambda c: jaxkv.KVCache(None, c.layout), ["`cache.buffer`", "None"]),
            ("bare buffer", lambda c: c.buffer, ["`cache`", "expected a KVCache"]),
            ("pair for a cache", lambda c: (c.buffer, c.layout), ["`cache` is a tuple", "expected a KVCache"]),
            ("no cache", lambda c: None, ["`cache` is a NoneType", "expected a KVCache"]),
        ]
    ),
    *(
        (
            f"cache of {other} in {name}",
            lambda a, run=run, other=other: run(a, cache=getattr(a, other)),
            ["`cache`", f"a cache of {kind}"],
        )
        for name, (run, stored, kind) in OF_ONE_CACHE.items()
        for other in ("mla", "kv", "indexer")
        if other != stored
    ),
]

TABLES = [
    *(
        (
            f"{name} with tables of no columns",
            lambda a, run=run: run(a, block_tables=a.tables[:, :0]),
            ["`block_tables`", "(2, 0)", "M at least 1"],
        )
        for name, run in {**OF_BATCHES, **OF_RUNS, "positions_to_slots": positions_to_slots}.items()
    ),
    *(
        (
            f"{name} with tables of no rows",
            lambda a, run=run: run(a, block_tables=a.tables[:0]),
            ["`block_tables`", "(0, 3)"],
        )
        for name, run in {**OF_BATCHES, **OF_RUNS}.items()
    ),
    (
        "batch of no requests",
        lambda a: decode_mla(a, q_latent=a.q_latent[:0]),
        ["`q_latent`", "(0, 3, 8)", "B at least 1"],
    ),
    ("no query tokens", lambda a: decode_kv(a, q=a.q[:, None][:, :0]), ["`q`", "(2, 0, 6, 8)", "Q at least 1"]),
    ("no query heads", lambda a: decode_kv(a, q=a.q[:, :0]), ["`q`", "(2, 0, 8)", "Hq at least 1"]),
]

LISTS = [
    ("kv_c", lambda a: write_mla(a, kv_c=[[0.0] * 8] * 5), ["`kv_c` is a list", "expected an array [T, R]"]),
    ("slot_mapping", lambda a: write_mla(a, slot_mapping=[0, 1, 2, 3, 4]), ["`slot_mapping` is a list", "array [T]"]),
    ("one slot", lambda a: write_mla(a, slot_mapping=3), ["`slot_mapping` is a int", "array [T]"]),
    ("no slots", lambda a: write_mla(a, slot_mapping=None), ["`slot_mapping` is a NoneType", "array [T]"]),
    ("k", lambda a: write_kv(a, k=[]), ["`k` is a list", "array [T, H, D]"]),
    ("v", lambda a: write_kv(a, v=(a.v,)), ["`v` is a tuple", "array [T, H, Dv]"]),
    ("key", lambda a: write_indexer_k(a, k="key"), ["`k` is a str", "array [T, D]"]),
    ("q_pe", lambda a: decode_mla(a, q_pe=[1.0]), ["`q_pe` is a list", "array [B, Hq, P]"]),
    (
        "block_tables",
        lambda a: decode_mla(a, block_tables=[[0, 1, 2]] * 2),
        ["`block_tables` is a list", "array [B, M]"],
    ),
    ("seq_lens", lambda a: decode_kv(a, seq_lens=[9, 4]), ["`seq_lens` is a list", "array [B]"]),
    ("slots", lambda a: decode_mla_sparse(a, slots=[[[0]]] * 2), ["`slots` is a list", "array [B, Q, K]"]),
    ("counts", lambda a: decode_mla_sparse(a, counts=[[1]] * 2), ["`counts` is a list", "array [B, Q]"]),
    ("sinks", lambda a: decode_mla_sparse(a, sinks=[0.0] * 3), ["`sinks` is a list", "array [Hq]"]),
    ("weights", lambda a: indexer_logits(a, weights=[[[1.0] * 7]] * 2), ["`weights` is a list", "array [B, Q, Hi]"]),
    ("cu_seq_lens", lambda a: gather_mla(a, cu_seq_lens=[0, 9, 13]), ["`cu_seq_lens` is a list", "array [B+1]"]),
    ("seq_starts", lambda a: gather_kv(a, seq_starts=[0, 1]), ["`seq_starts` is a list", "array [B]"]),
    ("logits", lambda a: select_topk(a, logits=[1.0, 2.0]), ["`logits` is [1.0, 2.0]", "float32 [..., N]"]),
    ("positions", lambda a: positions_to_slots(a, positions=[[[0]]]), ["`positions` is a list", "array [B, Q, K]"]),
    ("src", lambda a: copy_blocks(a, src=[0, 1]), ["`src` is a list", "array [n]"]),
    ("blocks", lambda a: read_blocks(a, blocks=[0, 1]), ["`blocks` is a list", "array [n]"]),
    ("data", lambda a: write_blocks(a, data=[[0] * 144] * 2), ["`data` is a list", "array [n, E]"]),
]

IMPLEMENTATIONS = [
    ("unknown", "cuda", ["'cuda'", "unknown", "xla"]),
    ("of another case", "XLA", ["'XLA'", "unknown", "xla"]),
    ("explain, which is no name", "explain", ["'explain'", "unknown", "xla"]),
    ("empty", "", ["''", "unknown", "xla"]),
    ("unknown after a known", ["xla", "cuda"], ["'cuda'", "unknown", "xla"]),
    ("none among names", ["xla", None], ["None", "unknown", "xla"]),
    ("names among names", [["xla"]], ["['xla']", "unknown", "xla"]),
    ("no names", (), ["is ()", "expected None", "xla"]),
    ("number", 3, ["is 3", "expected None", "xla"]),
    ("set", {"xla"}, ["{'xla'}", "expected None", "xla"]),
]

HELPERS = [
    ("q_latent of a list", lambda a: decode_mla(a, q_latent=[[[0.0] * 8] * 3] * 2), ["`q_latent` is a list"]),
    ("q of a list", lambda a: decode_kv(a, q=[[[0.0] * 8] * 6] * 2), ["`q` is a list"]),
    ("logit_cap of True", lambda a: decode_mla(a, logit_cap=True), ["`logit_cap`", "True"]),
    ("outs of lists", lambda a: merge_states(a, outs=[[1.0, 2.0]] * 2), ["`outs`", "[1.0, 2.0]", "array"]),
    ("lses of numbers", lambda a: merge_states(a, lses=[1.0, 2.0]), ["`lses`", "float"]),
    ("outs of a number", lambda a: merge_states(a, outs=1.0), ["`outs`", "float"]),
    ("outs of rank 0", lambda a: merge_states(a, outs=a.lses[0, 0], lses=a.lses[0, 0]), ["`outs`", "()"]),
    ("an array of no parts", lambda a: merge_states(a, outs=a.outs[:0], lses=a.lses[:0]), ["`outs`", "(0, 3, 4)", "1"]),
    ("view of no layout", lambda a: a.mla.view(None), ["`layout`", "None", "CacheLayout"]),
    ("slots_for of lists", lambda a: jaxkv.slots_for([[0]], [[0]], block_size=4), ["`block_tables` is a list"]),
    (
        "slots_for of no columns",
        lambda a: jaxkv.slots_for(a.tables[:, :0], a.tables, block_size=4),
        ["`block_tables`", "(2, 0)"],
    ),
    (
        "slots_for of floats",
        lambda a: jaxkv.slots_for(a.tables * 1.0, a.tables, block_size=4),
        ["`block_tables`", "float32"],
    ),
    (
        "slots_for of 3 requests",
        lambda a: jaxkv.slots_for(a.tables, jnp.zeros((3, 2), int), block_size=4),
        ["`positions`", "(3, 2)"],
    ),
    ("slots_for of block_size 0", lambda a: jaxkv.slots_for(a.tables, a.tables, block_size=0), ["`block_size`", "0"]),
    (
        "ragged_slots of lists",
        lambda a: jaxkv.ragged_slots([[0]], [0, 1], total=1, block_size=4),
        ["`block_tables` is a list"],
    ),
    (
        "ragged_slots of no rows",
        lambda a: jaxkv.ragged_slots(a.tables[:0], a.ids[:1], total=1, block_size=4),
        ["`block_tables`", "(0, 3)"],
    ),
    (
        "ragged_slots of B sums",
        lambda a: jaxkv.ragged_slots(a.tables, a.ids, total=1, block_size=4),
        ["`cu_seq_lens`", "(2,)", "[3]"],
    ),
    (
        "ragged_slots of total 0.5",
        lambda a: jaxkv.ragged_slots(a.tables, a.cu_seq_lens, total=0.5, block_size=4),
        ["`total`", "0.5"],
    ),
]


def check(wrong, told):
    """The call raises ValueError, as it stands and while it is traced with all arrays unknown."""
    modes = {"eager": lambda a: wrong(a), "traced": lambda a: jax.eval_shape(wrong, a)}
    for mode, run in modes.items():
        with pytest.raises(ValueError, match="`") as caught:
            run(arrays())
        assert type(caught.value) is ValueError, mode
        for fragment in told:
            assert fragment in str(caught.value), mode


def cases(table):
    return pytest.mark.parametrize(("wrong", "told"), [case[1:] for case in table], ids=[case[0] for case in table])


@cases(SHAPES)
def test_shapes(wrong, told):
    check(wrong, told)


@cases(DTYPES)
def test_dtypes(wrong, told):
    check(wrong, told)


@cases(SCALES)
def test_scales(wrong, told):
    check(wrong, told)


@cases(STATICS)
def test_static_arguments(wrong, told):
    check(wrong, told)


@cases(CACHES)
def test_caches(wrong, told):
    check(wrong, told)


@cases(TABLES)
def test_empty_axes(wrong, told):
    check(wrong, told)


@cases(LISTS)
def test_lists_are_no_arrays(wrong, told):
    check(wrong, told)


@cases(HELPERS)
def test_helpers_and_the_rest(wrong, told):
    check(wrong, told)


@cases(LAYERS)
@pytest.mark.parametrize("operation", OF_ONE_CACHE)
def test_layers(operation, wrong, told):
    check(lambda a: OF_ONE_CACHE[operation][0](a, layer=wrong), ["`layer`", *told])


@cases(IMPLEMENTATIONS)
@pytest.mark.parametrize("operation", DISPATCHED)
def test_implementations(operation, wrong, told):
    check(lambda a: OPERATIONS[operation](a, implementation=wrong), ["`implementation`", *told])


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: jaxkv.MLAEntry("int4"), ["MLAEntry", "'int4'", "bf16, f16, f32, fp8, fp8_ds_mla"]),
        (lambda: jaxkv.KVEntry("fp8_ds_mla"), ["KVEntry", "'fp8_ds_mla'", "bf16, f16, f32, fp8"]),
        (lambda: jaxkv.MLAEntry("bf16", latent=0), ["latent=0", "positive int"]),
        (lambda: jaxkv.MLAEntry("bf16", rope=64.0), ["rope=64.0", "positive int"]),
        (lambda: jaxkv.MLAEntry("bf16", latent=True), ["latent=True", "positive int"]),
        (lambda: jaxkv.KVEntry("bf16", value_dim=False), ["value_dim=False", "positive int"]),
        (lambda: jaxkv.KVEntry("bf16", head_dim=-1), ["head_dim=-1", "positive int"]),
        (lambda: jaxkv.MLAEntry("fp8_ds_mla", latent=100), ["fp8_ds_mla", "multiple of 128", "100"]),
        (lambda: jaxkv.MLAEntry("fp8_ds_mla", rope=63), ["fp8_ds_mla", "even", "63"]),
        (lambda: jaxkv.IndexerEntry(head_dim=30), ["indexer_fp8", "multiple of 4", "30"]),
    ],
)
def test_entries(build, told):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the fragments are the match)
        build()
    for fragment in told:
        assert fragment in str(caught.value)


@every_operation
def test_the_good_calls_are_good(operation):
    jax.block_until_ready(operation(arrays()))
    jax.eval_shape(operation, arrays())


@every_operation
def test_numpy_arrays_are_arrays(operation):
    a = arrays()
    from_jax, from_numpy = operation(a), operation(jax.tree.map(np.asarray, a))
    for x, y in zip(jax.tree.leaves(from_jax), jax.tree.leaves(from_numpy), strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_slots_of_any_integer_dtype_are_taken(dtype):
    a = arrays()
    expected = write_mla(a, layer=2).buffer
    found = write_mla(a, slot_mapping=np.asarray(a.slots, dtype), layer=np.int64(2)).buffer
    assert_same_bits(found, expected)
    if "64" not in dtype:
        assert_same_bits(write_mla(a, slot_mapping=a.slots.astype(dtype), layer=jnp.int8(2)).buffer, expected)


@pytest.mark.parametrize(
    "scale", [2, 2.0, np.float32(2), np.float64(2), np.asarray(2.0), jnp.float32(2), jnp.bfloat16(2)]
)
def test_scales_of_any_kind_of_number_are_taken(scale):
    a = arrays()
    expected = write_mla(a, cache=a.mla_fp8, kv_scale=2.0).buffer
    assert_same_bits(write_mla(a, cache=a.mla_fp8, kv_scale=scale).buffer, expected)
    assert_same_bits(decode_mla(a, scale=scale), decode_mla(a, scale=2.0))
    expected = write_kv(a, cache=a.kv_fp8, k_scale=2.0, v_scale=2.0).buffer
    heads = np.broadcast_to(np.asarray(scale), (2,))
    assert_same_bits(write_kv(a, cache=a.kv_fp8, k_scale=scale, v_scale=heads).buffer, expected)


class TestRefusal:
    """NotImplementedError is for correct calls that none of the requested implementations supports."""

    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=8, block_size=64, entry=jaxkv.MLAEntry("fp8"))

    def cache(self):
        return jaxkv.KVCache(jax.ShapeDtypeStruct((self.layout.size,), self.layout.dtype), self.layout)

    def arguments(self):
        values = [jax.ShapeDtypeStruct((5, n), jnp.bfloat16) for n in self.layout.entry.sizes]
        return self.cache(), *values, jax.ShapeDtypeStruct((5,), jnp.int32)

    def planned(self):
        options = {"num_heads": 16, "batch_invariant": True}
        return (self.cache(), jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)), options

    @pytest.mark.parametrize("implementation", ["xla", ("xla",), ["xla", "xla"]])
    def test_a_named_implementation_runs_or_says_why_not(self, implementation):
        arguments, options = self.planned()
        with pytest.raises(NotImplementedError) as caught:
            jaxkv.plan_decode(*arguments, **options, implementation=implementation)
        for fragment in ("plan_decode", "xla: ", "batch-invariant", "depend on the shape of the batch"):
            assert fragment in str(caught.value)

    def test_explain_gives_the_same_reasons(self):
        arguments, options = self.planned()
        explanation = jaxkv.explain(jaxkv.plan_decode, *arguments, **options)
        assert "batch-invariant" in explanation.reasons["xla"][0]

    def test_explain_checks_the_arguments(self):
        cache, kv_c, k_pe, slots = self.arguments()
        with pytest.raises(ValueError, match="`kv_c` has shape"):
            jaxkv.explain(jaxkv.write_mla, cache, k_pe, k_pe, slots, layer=0, kv_scale=1.0)
        with pytest.raises(ValueError, match="`layer` is 1"):
            jaxkv.explain(jaxkv.write_mla, cache, kv_c, k_pe, slots, layer=1, kv_scale=1.0)
        scale = jax.ShapeDtypeStruct((3,), jnp.float32)
        with pytest.raises(ValueError, match="`kv_scale` is float32"):
            jaxkv.explain(jaxkv.write_mla, cache, kv_c, k_pe, slots, layer=0, kv_scale=scale)
