"""jaxkv: stride-aware paged KV caches for JAX.

A cache is one flat buffer (`KVCache`) and its static layout (`CacheLayout`); operations are pure functions that take
the layer as an argument.  Conventions are in jaxkv/ops/README.md, layouts in jaxkv/layout/README.md.
"""

from importlib.metadata import version

from jaxkv.cache import KVCache as KVCache
from jaxkv.dispatch.backends import implementations as implementations
from jaxkv.dispatch.checked import checked as checked
from jaxkv.layout.layout import ORDERS as ORDERS
from jaxkv.layout.layout import CacheLayout as CacheLayout
from jaxkv.layout.layout import Strides as Strides
from jaxkv.layout.packed import Group as Group
from jaxkv.layout.packed import PackedLayout as PackedLayout
from jaxkv.ops.attention import decode_kv as decode_kv
from jaxkv.ops.attention import decode_mla as decode_mla
from jaxkv.ops.blocks import copy_blocks as copy_blocks
from jaxkv.ops.blocks import read_blocks as read_blocks
from jaxkv.ops.blocks import write_blocks as write_blocks
from jaxkv.ops.conversion import convert_blocks as convert_blocks
from jaxkv.ops.gathers import gather_indexer_k as gather_indexer_k
from jaxkv.ops.gathers import gather_kv as gather_kv
from jaxkv.ops.gathers import gather_mla as gather_mla
from jaxkv.ops.indexer import indexer_logits as indexer_logits
from jaxkv.ops.indexer import positions_to_slots as positions_to_slots
from jaxkv.ops.indexer import select_topk as select_topk
from jaxkv.ops.merge import merge_states as merge_states
from jaxkv.ops.plan import DecodePlan as DecodePlan
from jaxkv.ops.plan import plan_decode as plan_decode
from jaxkv.ops.slots import ragged_slots as ragged_slots
from jaxkv.ops.slots import slots_for as slots_for
from jaxkv.ops.sparse import decode_mla_sparse as decode_mla_sparse
from jaxkv.ops.writes import write_indexer_k as write_indexer_k
from jaxkv.ops.writes import write_kv as write_kv
from jaxkv.ops.writes import write_mla as write_mla
from jaxkv.support import Explanation as Explanation
from jaxkv.support import explain as explain
from jaxkv_kernels.formats.entries import IndexerEntry as IndexerEntry
from jaxkv_kernels.formats.entries import KVEntry as KVEntry
from jaxkv_kernels.formats.entries import MLAEntry as MLAEntry

__version__ = version("jaxkv")
