"""Typical mistakes of users.  Each statement is wrong in the way that the comment before it says.

A comment begins with the kind of error that type checkers must report (`KINDS` in test_types.py).  Nothing here runs.
"""

# ruff: noqa: B018

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import CacheLayout, ExtraCache, IndexerEntry, KVCache, KVEntry, MLAEntry, blocks, masks, parallel, testing

SIZES = {"num_layers": 2, "num_blocks": 8, "block_size": 64}
layout = CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=MLAEntry("bf16"))
cache = KVCache.zeros(layout)
kv_cache = KVCache.zeros(CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=KVEntry("bf16"), num_heads=4))
keys = KVCache.zeros(CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=IndexerEntry()))
q, q_pe, q_kv = jnp.ones((2, 16, 512)), jnp.ones((2, 16, 64)), jnp.ones((2, 16, 128))
w_uk, w_uv = jnp.ones((16, 128, 512)), jnp.ones((16, 128, 512))
tables, lengths, slots = jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32), jnp.zeros((2, 1, 8), jnp.int32)


# Layouts and entries.

# argument: a format that does not exist
MLAEntry("bf61")
# argument: a format of latents for keys and values
KVEntry("fp8_ds_mla")
# argument: a format of latents for values
KVEntry("bf16", value_format="fp8_ds_mla")
# argument: a format of latents for an indexer's keys
IndexerEntry("fp8_v4")
# argument: a dtype instead of the name of a format
MLAEntry(np.dtype("float16"))
# argument: an order that does not exist
CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=MLAEntry("bf16"), order="BNLHC")
# argument: a format instead of an entry
CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry="bf16")
# missing: no entry
CacheLayout(num_layers=2, num_blocks=8, block_size=64)
# missing: an argument that does not exist
CacheLayout(num_layers=2, num_pages=8, num_blocks=8, block_size=64, entry=MLAEntry("bf16"))
# argument: the class of an entry instead of an entry
CacheLayout(num_layers=2, num_blocks=8, block_size=64, entry=MLAEntry)
# argument: the size of a buffer instead of a layout
KVCache.zeros(1024)
# argument: a layer-major order of a packed layout
jaxkv.PackedLayout(num_blocks=8, block_size=64, groups={"a": jaxkv.Group(2, MLAEntry("bf16"))}, order="LBNHC")
# argument: an entry instead of a group
jaxkv.PackedLayout(num_blocks=8, block_size=64, groups={"a": MLAEntry("bf16")})
# assigned: caches are not changed in place
cache.buffer = jnp.zeros(layout.size)


# Writes and reads.

# argument: a buffer instead of a cache
jaxkv.write_mla(cache.buffer, q[:, 0], q_pe[:, 0], lengths, layer=0)
# argument: latents for a cache of keys and values
jaxkv.write_mla(kv_cache, q[:, 0], q_pe[:, 0], lengths, layer=0)
# argument: the name of a layer
jaxkv.write_mla(cache, q[:, 0], q_pe[:, 0], lengths, layer="0")
# argument: a list instead of an array
jaxkv.write_mla(cache, q[:, 0], q_pe[:, 0], [0, 1], layer=0)
# missing: no layer
jaxkv.write_kv(kv_cache, q_kv, q_kv, lengths)
# missing: no values
jaxkv.write_kv(kv_cache, q_kv, lengths, layer=0)
# missing: the scale of latents for keys and values
jaxkv.write_kv(kv_cache, q_kv, q_kv, lengths, layer=0, kv_scale=1.0)
# missing: cosines and sines as two arguments
jaxkv.write_kv(kv_cache, q_kv, q_kv, lengths, layer=0, cos=lengths, sin=lengths)
# missing: the layer by position
jaxkv.write_indexer_k(keys, q_kv[:, 0], lengths, 0)
# attribute: a write returns a cache, not a buffer
jaxkv.write_indexer_k(keys, q_kv[:, 0], lengths, layer=0).at[0].set(1)
# missing: the layer of bytes by position
jaxkv.write_entries(keys, lengths, lengths, 0)
# argument: fields one after the other instead of by name
keys.layout.entry.pack([lengths, lengths])
# argument: a cache of latents
jaxkv.gather_indexer_k(cache, tables, lengths, layer=0, total=8)
# argument: an array as a static number
jaxkv.gather_mla(cache, tables, lengths, layer=0, total=lengths[0])
# attribute: a gather of latents returns two arrays
jaxkv.gather_mla(cache, tables, lengths, layer=0, total=8).shape
# argument: latents for a cache of keys and values
jaxkv.read_mla(kv_cache, lengths, layer=0)
# missing: the layer of a read by position
jaxkv.read_indexer_k(keys, lengths, 0)
# argument: keys and values instead of states
jaxkv.decode_delta_rule(q_kv[:, 0], q_kv, q_kv[..., 0], w_uk[0], kv_cache, lengths, lengths, layer=0)
# attribute: a read of keys and values returns two arrays
jaxkv.read_kv(kv_cache, lengths, layer=0).shape
# argument: a layout instead of a cache
jaxkv.read_blocks(layout, lengths)


# Attention.

# argument: a buffer instead of a cache
jaxkv.decode_mla(q, q_pe, cache.buffer, tables, lengths, layer=0, scale=0.1)
# argument: a cache of keys and values
jaxkv.decode_mla(q, q_pe, kv_cache, tables, lengths, layer=0, scale=0.1)
# argument: a cache of latents
jaxkv.decode_kv(q_kv, cache, tables, lengths, layer=0, scale=0.1)
# missing: no scale
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0)
# missing: no rotary queries
jaxkv.decode_mla(q, cache, tables, lengths, layer=0, scale=0.1)
# argument: the name of a layer
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer="0", scale=0.1)
# argument: an implementation that does not exist
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, implementation="cuda")
# argument: one of several implementations does not exist
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, implementation=["triton", "pallas"])
# argument: a window of a float number of tokens
jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, window=4096.0)
# argument: a window of three limits
jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, window=(64, 64, 64))
# argument: a window without a left limit, which is -1
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, window=(None, 64))
# argument: a mask that is an array
jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, mask=tables > 0)
# argument: a mask without numbers
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, mask=masks.Chunked)
# argument: a tree as a list
jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, tree_mask=[[[True]]])
# argument: a chunk of a float number of tokens
masks.Chunked(8192.0)
# argument: block tables as lists
jaxkv.decode_kv(q_kv, kv_cache, [[0, 1], [2, 3]], lengths, layer=0, scale=0.1)
# argument: a schedule instead of a plan
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, plan=(tables, lengths))
# argument: a string as a flag
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, return_lse="yes")
# attribute: with return_lse, two arrays are returned
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, return_lse=True).shape
# assigned: without return_lse, one array is returned
both: tuple[jax.Array, jax.Array] = jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1)
# argument: a cache instead of an ExtraCache
jaxkv.decode_mla_sparse(q[:, None], q_pe[:, None], cache, slots, layer=0, scale=0.1, extra=cache)
# argument: a second cache of keys and values
ExtraCache(kv_cache, slots, 0)
# missing: a second cache without its layer
ExtraCache(cache, slots)
# attribute: with return_lse, two arrays are returned
jaxkv.decode_mla_sparse(q[:, None], q_pe[:, None], cache, slots, layer=0, scale=0.1, return_lse=True).dtype
# assigned: with return_max_logits, two arrays are returned
one: jax.Array = jaxkv.decode_mla_sparse(
    q[:, None], q_pe[:, None], cache, slots, layer=0, scale=0.1, return_max_logits=True
)
# missing: the scale of queries for a plan
jaxkv.plan_decode(cache, tables, lengths, num_heads=16, q_scale=0.5)
# argument: scales of queries as a list
jaxkv.decode_mla(q, q_pe, cache, tables, lengths, layer=0, scale=0.1, q_scale=[0.5] * 16)
# missing: no number of heads
jaxkv.plan_decode(cache, tables, lengths)
# argument: an indexer's cache has no attention to plan
jaxkv.plan_decode(keys, tables, lengths, num_heads=16)
# missing: the weights come before the cache
jaxkv.prefill_mla(q[:, None], q_pe[:, None], cache, tables, lengths, layer=0, scale=0.1)
# argument: an indexer's cache
jaxkv.prefill_mla(q[:, None], q_pe[:, None], w_uk, w_uv, keys, tables, lengths, layer=0, scale=0.1)
# argument: a window of strings
jaxkv.prefill_mla(q[:, None], q_pe[:, None], w_uk, w_uv, cache, tables, lengths, layer=0, scale=0.1, window="all")
# argument: the blocks of a prefix in a list
jaxkv.decode_kv(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1, prefix_tables=[3, 4], prefix_lens=100)
# attribute: with return_lse, two arrays are returned
jaxkv.prefill_kv(q_kv[:, None], kv_cache, tables, lengths, layer=0, scale=0.1, return_lse=True).shape


# The indexer, experts, blocks, tables and diagnosis.

# argument: latents for the indexer
jaxkv.indexer_logits(q_kv[:, None], q_kv[:, None, :, 0], cache, tables, lengths, layer=0, max_len=256)
# missing: no length of the result
jaxkv.indexer_logits(q_kv[:, None], q_kv[:, None, :, 0], keys, tables, lengths, layer=0)
# argument: how experts are scored
jaxkv.select_experts(q_kv[:, 0], 4, scoring="relu")
# argument: an ordinary weight
jaxkv.scaled_linear(q_kv[:, 0], w_uk[0])
# missing: no number of columns of the tables
jaxkv.block_tables_from_csr(lengths, lengths, lengths, block_size=64)
# argument: block ids in a list
jaxkv.block_tables_from_csr(lengths, [0, 1], lengths, block_size=64, max_blocks=4)
# argument: a traced number of columns
jaxkv.block_tables_from_csr(lengths, lengths, lengths, block_size=64, max_blocks=lengths[0])
# attribute: tables and lengths are returned
jaxkv.block_tables_from_csr(lengths, lengths, lengths, block_size=64, max_blocks=4).shape
# missing: the direction by position
jaxkv.swizzle_scales(lengths, True)
# argument: layouts instead of payloads
jaxkv.convert_blocks(cache, layout, layout)
# missing: one of the two layouts
jaxkv.convert_blocks(q[0], layout)
# argument: an array instead of a static number of tokens
jaxkv.convert_blocks(q[0], layout, layout, num_tokens=lengths)
# argument: a layout per device
parallel.convert_blocks(q, [layout, layout], layout)
# argument: an array of pairs instead of pairs
parallel.permute_blocks(cache, lengths, lengths, tables, axis="x")
# argument: the name of an operation instead of the operation
jaxkv.explain("decode_mla", q, q_pe, cache, tables, lengths, layer=0, scale=0.1)
# argument: tokens per block instead of the cache
jaxkv.slots_for(tables, lengths, 64)
# missing: tokens per block by name instead of the cache
jaxkv.positions_to_slots(lengths, tables, block_size=64)
# argument: all groups instead of one
jaxkv.ragged_slots(tables, lengths, jaxkv.PackedLayout(num_blocks=2, block_size=4, groups={}), total=8)
# attribute: the name of an operation
jaxkv.decode_mha(q_kv, kv_cache, tables, lengths, layer=0, scale=0.1)
# argument: a PackedLayout instead of one of its groups
KVCache.from_dlpack(q, jaxkv.PackedLayout(num_blocks=2, block_size=4, groups={}))


# Allocation of blocks.

allocator = blocks.BlockAllocator.create(8)
# argument: the ids of blocks instead of the allocator
blocks.free(lengths, lengths)
# argument: an allocator without tables
blocks.append(allocator, lengths)
# missing: the most blocks of a request
blocks.allocate(allocator, lengths)
# missing: the block size
blocks.BlockTables.create(num_sequences=2, max_blocks=4, num_blocks=8)
# assigned: states do not change
allocator.num_free = lengths[0]


# Checks of kernels.

# argument: a cache instead of its layout
testing.poisoned(cache)
# argument: an entry instead of layouts
testing.assert_gather_correct(jaxkv.gather_mla, MLAEntry("bf16"))
# missing: too many arguments, as `padding` is a keyword
testing.assert_caches_equal(cache, cache, True)
