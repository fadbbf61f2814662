"""Context parallelism: the tokens of each request interleaved over n devices, every device with a cache of its own.

Token i belongs to shard `(i // interleave) % n`.  A shard stores its tokens packed, one after the other, in blocks of
its own cache; what it attends to is merged with the others' by the log-sum-exps.  Shares differ by at most `interleave`
tokens and that of shard 0 is the largest, so one block table can serve all shards: blocks that hold
`local_lengths(seq_len, shard=0, ...)` tokens.
"""

from jaxkv.parallel.context.decode import decode_kv as decode_kv
from jaxkv.parallel.context.decode import decode_mla as decode_mla
from jaxkv.parallel.context.decode import plan_decode as plan_decode
from jaxkv.parallel.context.merge import merge_states as merge_states
from jaxkv.parallel.context.share import local_lengths as local_lengths
from jaxkv.parallel.context.share import local_slots as local_slots
from jaxkv.parallel.context.sparse import decode_mla_sparse as decode_mla_sparse
from jaxkv.parallel.context.sparse import indexer_logits as indexer_logits
from jaxkv.parallel.context.sparse import select_topk as select_topk
