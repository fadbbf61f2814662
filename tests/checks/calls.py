"""Calls that are good unless their arguments are replaced."""

import jax.numpy as jnp

import jaxkv

LAYERS = 3
SIZES = dict(num_layers=LAYERS, num_blocks=6, block_size=4)
ENTRY = jaxkv.MLAEntry("bf16", latent=8, rope=4)
MLA = jaxkv.CacheLayout(**SIZES, entry=ENTRY)
KV = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=jaxkv.KVEntry("fp8", 8, 4))
INDEXER = jaxkv.CacheLayout(**SIZES, entry=jaxkv.IndexerEntry(head_dim=8))

STATE = jaxkv.StateEntry({"conv": ((2, 3), "float32"), "ssm": ((4,), "float32")})
STATES = jaxkv.CacheLayout(**SIZES, entry=STATE)

DELTA = jaxkv.StateEntry({"conv": ((2, 10), "float32"), "delta": ((2, 2, 3), "float32")})

TABLES = [[4, 0], [1, 3]]
LENGTHS = [7, 3]


def ints(values):
    return jnp.asarray(values, jnp.int32)


def write_mla(slots=(0, 7, -1), layer=0, cache=None):
    values = [jnp.ones((len(slots), n), jnp.bfloat16) for n in ENTRY.sizes]
    cache = jaxkv.KVCache.zeros(MLA) if cache is None else cache
    return jaxkv.write_mla(cache, *values, ints(slots), layer=layer)


def write_kv(slots=(0, 7, -1), layer=0):
    k, v = jnp.ones((len(slots), 2, 8)), jnp.ones((len(slots), 2, 4))
    return jaxkv.write_kv(jaxkv.KVCache.zeros(KV), k, v, ints(slots), layer=layer, k_scale=0.1, v_scale=0.1)


def write_indexer_k(slots=(0, 7, -1), layer=0):
    return jaxkv.write_indexer_k(jaxkv.KVCache.zeros(INDEXER), jnp.ones((len(slots), 8)), ints(slots), layer=layer)


def decode_mla(tables=TABLES, lengths=LENGTHS, layer=0, cache=None, tokens=1, plan=None):
    q = [jnp.ones((len(tables), tokens, 2, n), jnp.bfloat16) for n in ENTRY.sizes]
    cache = jaxkv.KVCache.zeros(MLA) if cache is None else cache
    return jaxkv.decode_mla(*q, cache, ints(tables), ints(lengths), layer=layer, scale=0.3, plan=plan)


def decode_kv(tables=TABLES, lengths=LENGTHS, layer=0, cache=None, window=None, tokens=1, **masks):
    q = jnp.ones((len(tables), tokens, 2, 8))
    cache = jaxkv.KVCache.zeros(KV) if cache is None else cache
    scales = {"scale": 0.3, "k_scale": 0.1, "v_scale": 0.1}
    options = {"window": window, **masks, **scales}
    return jaxkv.decode_kv(q, cache, ints(tables), ints(lengths), layer=layer, **options)


def decode_mla_sparse(slots=((0, 23, -1), (-(2**31), 5, 5)), layer=0, cache=None, counts=None):
    q = [jnp.ones((2, 1, 2, n), jnp.bfloat16) for n in ENTRY.sizes]
    cache = jaxkv.KVCache.zeros(MLA) if cache is None else cache
    counts = None if counts is None else ints(counts)[:, None]
    return jaxkv.decode_mla_sparse(*q, cache, ints(slots)[:, None], layer=layer, scale=0.3, counts=counts)


def decode_mla_sparse_of_two(slots=((0, 23, -1), (-(2**31), 5, 5)), layer=0, cache=None, counts=None):
    q = [jnp.ones((2, 1, 2, n), jnp.bfloat16) for n in ENTRY.sizes]
    first = jaxkv.KVCache.zeros(MLA)
    counts = None if counts is None else ints(counts)[:, None]
    extra = jaxkv.ExtraCache(first if cache is None else cache, ints(slots)[:, None], layer, counts)
    return jaxkv.decode_mla_sparse(*q, first, ints(((-1,), (0,)))[:, None], layer=0, scale=0.3, extra=extra)


def planned_decode_mla():
    cache = jaxkv.KVCache.zeros(MLA)
    return decode_mla(plan=jaxkv.plan_decode(cache, ints(TABLES), ints(LENGTHS), num_heads=2), cache=cache)


def indexer_logits(tables=TABLES, lengths=LENGTHS, layer=0):
    q, weights, cache = jnp.ones((2, 1, 2, 8)), jnp.ones((2, 1, 2)), jaxkv.KVCache.zeros(INDEXER)
    return jaxkv.indexer_logits(q, weights, cache, ints(tables), ints(lengths), layer=layer, max_len=5)


def ragged_indexer_logits(tables=TABLES, lengths=LENGTHS, layer=0, cu_q_lens=(0, 1, 3)):
    q, weights, cache = jnp.ones((3, 2, 8)), jnp.ones((3, 2)), jaxkv.KVCache.zeros(INDEXER)
    options = {"layer": layer, "max_len": 5, "cu_q_lens": ints(cu_q_lens)}
    return jaxkv.indexer_logits(q, weights, cache, ints(tables), ints(lengths), **options)


def select_topk(lengths=(5, 0)):
    return jaxkv.select_topk(jnp.ones((2, 5)), 2, lengths=ints(lengths))


def gather_mla(tables=TABLES, cu_seq_lens=(0, 7, 10), starts=None, layer=0, total=10):
    starts = None if starts is None else ints(starts)
    cache = jaxkv.KVCache.zeros(MLA)
    return jaxkv.gather_mla(cache, ints(tables), ints(cu_seq_lens), layer=layer, total=total, seq_starts=starts)


def gather_kv(tables=TABLES, cu_seq_lens=(0, 7, 10), layer=0):
    cache = jaxkv.KVCache.zeros(KV)
    return jaxkv.gather_kv(
        cache, ints(tables), ints(cu_seq_lens), layer=layer, total=10, k_scale=0.1, v_scale=0.1, dtype=jnp.float32
    )


def gather_indexer_k(tables=TABLES, cu_seq_lens=(0, 7, 10), layer=0):
    return jaxkv.gather_indexer_k(jaxkv.KVCache.zeros(INDEXER), ints(tables), ints(cu_seq_lens), layer=layer, total=10)


def write_entries(slots=(0, 7, -1), layer=0):
    rows = jnp.zeros((len(slots), MLA.entry.nbytes), jnp.uint8)
    return jaxkv.write_entries(jaxkv.KVCache.zeros(MLA), rows, ints(slots), layer=layer)


def write_state(slots=(0, 7, -1), layer=0):
    states = {name: jnp.ones((len(slots), *shape)) for name, shape in STATE.shapes.items()}
    return jaxkv.write_state(jaxkv.KVCache.zeros(STATES), states, ints(slots), layer=layer)


def read_state(slots=(0, 7, 7, -1), layer=0):
    return jaxkv.read_state(jaxkv.KVCache.zeros(STATES), ints(slots), layer=layer)


def decode_delta_rule(slots=(0, 7, -1), layer=0, read=(0, 5, -1)):
    token = jnp.ones((3, 10)), jnp.ones((3, 2, 1)), jnp.ones((3, 2)), jnp.ones((10, 3))
    cache = jaxkv.KVCache.zeros(jaxkv.CacheLayout(**SIZES, entry=DELTA))
    return jaxkv.decode_delta_rule(*token, cache, ints(read), ints(slots), layer=layer)


def gather_entries(tables=TABLES, cu_seq_lens=(0, 7, 10), layer=0):
    return jaxkv.gather_entries(jaxkv.KVCache.zeros(MLA), ints(tables), ints(cu_seq_lens), layer=layer, total=10)


def read_mla(slots=(0, 7, 7, -1), layer=0):
    return jaxkv.read_mla(jaxkv.KVCache.zeros(MLA), ints(slots), layer=layer)


def read_kv(slots=(0, 7, 7, -1), layer=0):
    return jaxkv.read_kv(jaxkv.KVCache.zeros(KV), ints(slots), layer=layer, k_scale=0.1, v_scale=0.1)


def read_indexer_k(slots=(0, 7, 7, -1), layer=0):
    return jaxkv.read_indexer_k(jaxkv.KVCache.zeros(INDEXER), ints(slots), layer=layer)


def copy_blocks(src=(0, 1), dst=(2, 3)):
    return jaxkv.copy_blocks(jaxkv.KVCache.zeros(MLA), ints(src), ints(dst))


def read_blocks(blocks=(0, 5, 0)):
    return jaxkv.read_blocks(jaxkv.KVCache.zeros(MLA), ints(blocks))


def write_blocks(blocks=(0, 5)):
    rows = jnp.zeros((len(blocks), MLA.block_nbytes // MLA.itemsize), MLA.dtype)
    return jaxkv.write_blocks(jaxkv.KVCache.zeros(MLA), ints(blocks), rows)


def block_tables_from_csr(indptr=(0, 2, 2, 5), indices=(4, 0, 1, 3, 2), last_page_len=(4, 0, 1), max_blocks=3):
    arrays = ints(indptr), ints(indices), ints(last_page_len)
    return jaxkv.block_tables_from_csr(*arrays, block_size=4, max_blocks=max_blocks)


def grouped_swiglu(experts=((0, 2), (-1, 1))):
    x, weights = jnp.ones((2, 8)), jnp.ones((2, 2))
    return jaxkv.grouped_swiglu(x, ints(experts), weights, *[jnp.ones((3, 4, 8))] * 2, jnp.ones((3, 8, 4)))


OPERATIONS = (
    write_mla,
    write_kv,
    write_indexer_k,
    write_entries,
    decode_mla,
    decode_kv,
    decode_mla_sparse,
    indexer_logits,
    select_topk,
    gather_mla,
    gather_kv,
    gather_indexer_k,
    write_state,
    read_state,
    decode_delta_rule,
    gather_entries,
    read_mla,
    read_kv,
    read_indexer_k,
    copy_blocks,
    read_blocks,
    write_blocks,
    grouped_swiglu,
)
