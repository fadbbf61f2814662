"""Uses of the public functions that type checkers must accept, with the types of their results.  Nothing here runs."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import (
    CacheLayout,
    ExtraCache,
    IndexerEntry,
    KVCache,
    KVEntry,
    MLAEntry,
    PackedLayout,
    StateEntry,
    blocks,
    masks,
    parallel,
    testing,
)

latents = CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=MLAEntry("fp8"), order="LBNHC")
cache = KVCache.zeros(latents)
kv_cache = KVCache.zeros(CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=KVEntry("bf16"), num_heads=4))
mixed = KVCache.zeros(CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=KVEntry("bf16", value_format="fp8")))
keys = KVCache.zeros(CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=IndexerEntry()))
state = StateEntry({"ssm": ((4,), "float32")})
states = KVCache.zeros(CacheLayout(num_layers=2, num_blocks=8, block_size=1, entry=state))
q, q_pe, q_kv = jnp.ones((2, 16, 512)), jnp.ones((2, 16, 64)), jnp.ones((2, 16, 128))
w_uk, w_uv = jnp.ones((16, 128, 512)), jnp.ones((16, 128, 512))
tables, lengths, slots = jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32), jnp.zeros((2, 1, 8), jnp.int32)
on_host = np.zeros((2, 4), np.int32), np.ones(2, np.int32)

assert_type(cache, KVCache[MLAEntry])
assert_type(cache.buffer, jax.Array | tuple[jax.Array, jax.Array])
assert_type(KVCache((jnp.zeros(9), jnp.zeros(9)), kv_cache.layout), KVCache[KVEntry])
assert_type(kv_cache.layout.entry, KVEntry)
assert_type(mixed, KVCache[KVEntry])
assert_type(KVCache.from_dlpack(np.zeros(9), latents), KVCache[MLAEntry])


def layers(cache: KVCache[MLAEntry], layer: jax.Array) -> KVCache[MLAEntry]:
    """Traced layers and scales, NumPy arrays, and names of implementations."""
    cache = jaxkv.write_mla(cache, q[:, 0], np.ones((2, 64)), np.zeros(2, np.int32), layer=layer, kv_scale=0.5)
    jaxkv.decode_mla(q, q_pe, cache, *on_host, layer=np.int32(1), kv_scale=jnp.float32(0.5), scale=0.1)
    jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=layer, scale=jnp.float32(0.1))
    jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=1, implementation=["mosaic_gpu", "xla"])
    jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=1, implementation=("triton",))
    return cache


plan = jaxkv.plan_decode(cache, tables, lengths, num_heads=16, dtype="bfloat16", window=4096)
one = jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, plan=plan, window=4096)
assert_type(one, jax.Array)
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, window=(64, 64), causal=False)
jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, window=(127, -1), return_lse=True)
jaxkv.plan_decode(kv_cache, tables, lengths, num_heads=16, window=(-1, 127), causal=False)
tree, sinks = np.ones((2, 1, 1), bool), masks.Prefix(4) | masks.Sliding(1023, 0)
jaxkv.decode_kv(q_kv[:, None], kv_cache, tables, lengths, layer=0, scale=0.1, tree_mask=tree, return_lse=True)
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, mask=sinks & masks.Chunked(8192))
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, mask=lambda query, key: key % 2 == query % 2)
jaxkv.plan_decode(kv_cache, tables, lengths, num_heads=16, mask=masks.Prefix(4), tree_mask=tree)
jaxkv.prefill_kv(q_kv[:, None], kv_cache, tables, lengths, layer=0, scale=0.1, window=(127, 0))
jaxkv.prefill_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, cu_q_lens=lengths, causal=False, logit_cap=30.0)
of_a_prefix = jaxkv.decode_kv(
    q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, prefix_tables=np.zeros(4, np.int32), prefix_lens=200
)
assert_type(of_a_prefix, jax.Array)
cascade = jaxkv.plan_decode(
    cache, tables, lengths, num_heads=16, prefix_tables=tables, prefix_lens=lengths, prefix_of=lengths
)
jaxkv.decode_mla(
    q, q_pe, cache, tables, lengths, layer=0, scale=0.1, plan=cascade, prefix_tables=tables, prefix_lens=lengths,
    prefix_of=lengths, return_lse=True,
)  # fmt: skip
both = jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, return_lse=True, implementation="xla")
assert_type(both, tuple[jax.Array, jax.Array])
assert_type(jaxkv.decode_kv(q_kv, kv_cache, *on_host, layer=0, scale=0.1, sinks=np.ones(16)), jax.Array)
in_e4m3 = jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, q_scale=np.ones(16), kv_scale=0.5)
assert_type(in_e4m3, jax.Array)
jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, q_scale=0.5, k_scale=np.ones((8, 64, 4)))

extra = ExtraCache(cache, np.zeros((2, 1, 4), np.int32), 1, kv_scale=0.5)
sparse = jaxkv.decode_mla_sparse(
    q[:, None], q_pe[:, None], cache, slots, layer=0, scale=0.1, extra=extra, return_lse=True
)
assert_type(sparse, tuple[jax.Array, jax.Array])
queries = q[:, None], q_pe[:, None]
largest = jaxkv.decode_mla_sparse(*queries, cache, slots, layer=0, scale=0.1, q_scale=0.5, return_max_logits=True)
assert_type(largest, tuple[jax.Array, jax.Array])
all_three = jaxkv.decode_mla_sparse(*queries, cache, slots, layer=0, scale=0.1, return_lse=True, return_max_logits=True)
assert_type(all_three, tuple[jax.Array, jax.Array, jax.Array])
prefilled = jaxkv.prefill_mla(q[:, None], q_pe[:, None], w_uk, w_uv, cache, tables, lengths, layer=0, scale=0.1)
windowed = jaxkv.prefill_mla(
    q[:, None], q_pe[:, None], w_uk, w_uv, cache, tables, lengths, layer=0, scale=0.1, window=(127, 4), causal=False,
    sinks=np.ones(16, np.float32), return_lse=True,
)  # fmt: skip
assert_type(windowed, tuple[jax.Array, jax.Array])
assert_type(prefilled, jax.Array)
prefilled_kv = jaxkv.prefill_kv(q_kv[:, None], kv_cache, tables, lengths, layer=0, scale=0.1, return_lse=True)
assert_type(prefilled_kv, tuple[jax.Array, jax.Array])

assert_type(jaxkv.write_kv(kv_cache, q_kv, q_kv, lengths, layer=0), KVCache[KVEntry])
read_only = jaxkv.ragged_paged_attention(
    q_kv, None, None, kv_cache, lengths, lengths, lengths, lengths, layer=0, update_kv_cache=False, out_dtype="float32"
)
assert_type(read_only, tuple[jax.Array, KVCache[KVEntry]])
turned = jaxkv.write_kv(kv_cache, q_kv, q_kv, lengths, layer=0, cos_sin=np.ones((2, 128)), interleaved=True)
assert_type(turned, KVCache[KVEntry])
entries = cache.layout.entry.pack({"latent": q_kv[:, 0], "rope": np.ones((2, 64))})
assert_type(jaxkv.write_entries(cache, entries, lengths, layer=0), KVCache[MLAEntry])
assert_type(jaxkv.write_entries(keys, np.ones((2, 256), np.uint8), lengths, layer=0), KVCache[IndexerEntry])
assert_type(keys.layout.entry.unpack(np.ones((2, 256), np.uint8)), dict[str, jax.Array])
assert_type(jaxkv.copy_blocks(keys, lengths, lengths), KVCache[IndexerEntry])
assert_type(jaxkv.gather_mla(cache, tables, lengths, layer=0, total=8, dtype=jnp.float32), tuple[jax.Array, jax.Array])
assert_type(jaxkv.gather_entries(keys, tables, lengths, layer=0, total=8), jax.Array)
assert_type(jaxkv.read_mla(cache, np.arange(8), layer=0, kv_scale=0.5), tuple[jax.Array, jax.Array])
assert_type(jaxkv.read_kv(kv_cache, lengths, layer=0, dtype="float32"), tuple[jax.Array, jax.Array])
assert_type(jaxkv.read_indexer_k(keys, lengths, layer=jnp.int32(1)), jax.Array)
assert_type(jaxkv.read_state(states, lengths, layer=0), dict[str, jax.Array])
assert_type(jaxkv.write_state(states, {"ssm": np.ones((2, 4))}, lengths, layer=0), KVCache[StateEntry])
token = q_kv[:, 0], q_kv[..., :1], np.ones((2, 16), np.float32), w_uk[0]
stepped = jaxkv.decode_delta_rule(*token, states, np.arange(2), lengths, layer=jnp.int32(1), implementation="triton")
assert_type(stepped, tuple[jax.Array, KVCache[StateEntry]])
logits = jaxkv.indexer_logits(q_kv[:, None], q_kv[:, None, :, 0], keys, tables, lengths, layer=0, max_len=256)
assert_type(jaxkv.select_topk(logits, 64), jax.Array)
assert_type(jaxkv.select_topk(logits, 64, lengths=np.ones((2, 1), np.int32)), jax.Array)
ragged = jaxkv.indexer_logits(q_kv, q_kv[..., 0], keys, tables, lengths, layer=0, max_len=256, cu_q_lens=np.arange(3))
assert_type(ragged, jax.Array)
assert_type(jaxkv.merge_states([q, q], (q[..., 0], q[..., 0])), tuple[jax.Array, jax.Array])
paged = jaxkv.block_tables_from_csr(lengths, np.zeros(4, np.int32), lengths, block_size=64, max_blocks=4)
assert_type(paged, tuple[jax.Array, jax.Array])
assert_type(jaxkv.swizzle_scales(np.zeros((2, 8, 16, 8), np.uint8), inverse=True), jax.Array)
assert_type(jaxkv.decode_kv(q_kv, kv_cache, *paged, layer=0, scale=0.1), jax.Array)
assert_type(jaxkv.select_experts(q_kv[:, 0], 4, scoring="sigmoid"), tuple[jax.Array, jax.Array])

assert_type(jaxkv.slots_for(tables, on_host[0], cache), jax.Array)
assert_type(jaxkv.ragged_slots(tables, lengths, kv_cache.layout, total=8, seq_starts=lengths), jax.Array)
assert_type(jaxkv.positions_to_slots(slots, tables, latents), jax.Array)

packed = PackedLayout(
    num_blocks=8,
    block_size=64,
    groups={"latents": jaxkv.Group(2, MLAEntry("bf16")), "keys": jaxkv.Group(2, IndexerEntry())},
    order="BHLNC",
)
shared = KVCache.zeros(packed["latents"])
shared = jaxkv.write_mla(shared, q[:, 0], q_pe[:, 0], lengths, layer=0)
shared = jaxkv.write_indexer_k(shared.view(packed["keys"]), q_kv[:, 0], lengths, layer=0)
assert_type(jaxkv.convert_blocks(jaxkv.read_blocks(shared, lengths), packed, packed, num_tokens=9), jax.Array)
assert_type(parallel.convert_blocks([q[0], q[0]], latents, kv_cache.layout, num_tokens=9), jax.Array)
assert_type(parallel.permute_blocks(shared, lengths, lengths, [(0, 1)], axis="x"), KVCache[IndexerEntry])
print(jaxkv.explain(jaxkv.decode_mla, q, q_pe, cache, tables, lengths, layer=0, scale=0.1).chosen)

sequences = blocks.BlockTables.create(num_sequences=2, max_blocks=4, num_blocks=8, block_size=64)
sequences, new = blocks.append(blocks.fork(sequences, lengths), np.ones(2, np.int32))
assert_type(jaxkv.copy_blocks(kv_cache, new.src, new.dst), KVCache[KVEntry])
assert_type(blocks.truncate(sequences, sequences.seq_lens - 1), blocks.BlockTables)
allocated = blocks.allocate(sequences.allocator, lengths, max_count=4)
assert_type(allocated, tuple[blocks.BlockAllocator, jax.Array, jax.Array])
assert_type(blocks.free(blocks.share(allocated[0], allocated[1]), allocated[1]), blocks.BlockAllocator)

assert_type(testing.poisoned(latents), KVCache[MLAEntry])
testing.assert_caches_equal(shared, testing.poisoned(shared.layout), padding=True)
testing.assert_write_correct(jaxkv.write_kv, testing.every_layout(KVEntry("bf16"), num_heads=4))
testing.assert_attention_correct(jaxkv.decode_mla, latents, q_len=2)

print(jaxkv.serving.Engine, jaxkv.models.load, jaxkv.offload.HostPool, jaxkv.masks.Intervals, jaxkv.blocks.append)
print(jaxkv.parallel.convert_blocks, jaxkv.testing.poisoned, jaxkv.formats.register)
