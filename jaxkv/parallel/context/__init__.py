"""Context parallelism: the tokens of each request are interleaved over n devices, each with its own cache.

The layout of a device's cache says which tokens it has: with `shards=jaxkv.TokenShards(n, interleave)`, shard
`i // interleave % n` has token i.  A shard stores its tokens packed, one after the other, in blocks of its own cache.
Each shard attends to its own tokens, and the partial results are merged by their log-sum-exps.  Shards differ by at
most `interleave` tokens and shard 0 has the most, so one block table serves all of them: its blocks must hold
`local_lengths(seq_len, shards=layout.shards, shard=0)` tokens.
"""

from jaxkv.parallel.context.decode import decode_kv, decode_mla, plan_decode
from jaxkv.parallel.context.merge import merge_states
from jaxkv.parallel.context.share import local_lengths, local_slots
from jaxkv.parallel.context.sparse import decode_mla_sparse, indexer_logits, select_slots, select_topk

__all__ = [
    "decode_kv",
    "decode_mla",
    "decode_mla_sparse",
    "indexer_logits",
    "local_lengths",
    "local_slots",
    "merge_states",
    "plan_decode",
    "select_slots",
    "select_topk",
]
