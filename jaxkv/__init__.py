"""jaxkv: stride-aware paged KV caches for JAX.

A cache is one flat buffer (`KVCache`) and its static layout (`CacheLayout`); operations are pure functions that take
the layer as an argument.  Vocabulary and conventions are in the README.
"""

from importlib.metadata import version

from jaxkv.blocks import copy_blocks as copy_blocks
from jaxkv.blocks import read_blocks as read_blocks
from jaxkv.blocks import write_blocks as write_blocks
from jaxkv.cache import KVCache as KVCache
from jaxkv.checks import checked as checked
from jaxkv.conversion import convert_blocks as convert_blocks
from jaxkv.decode import decode_kv as decode_kv
from jaxkv.decode import decode_mla as decode_mla
from jaxkv.decode import decode_mla_sparse as decode_mla_sparse
from jaxkv.dispatch import Explanation as Explanation
from jaxkv.dispatch import explain as explain
from jaxkv.dispatch import implementations as implementations
from jaxkv.gathers import gather_indexer_k as gather_indexer_k
from jaxkv.gathers import gather_kv as gather_kv
from jaxkv.gathers import gather_mla as gather_mla
from jaxkv.indexer import indexer_logits as indexer_logits
from jaxkv.indexer import positions_to_slots as positions_to_slots
from jaxkv.indexer import select_topk as select_topk
from jaxkv.layout import ORDERS as ORDERS
from jaxkv.layout import CacheLayout as CacheLayout
from jaxkv.layout import Strides as Strides
from jaxkv.merge import merge_states as merge_states
from jaxkv.packing import Group as Group
from jaxkv.packing import PackedLayout as PackedLayout
from jaxkv.plan import DecodePlan as DecodePlan
from jaxkv.plan import plan_decode as plan_decode
from jaxkv.slots import ragged_slots as ragged_slots
from jaxkv.slots import slots_for as slots_for
from jaxkv.writes import write_indexer_k as write_indexer_k
from jaxkv.writes import write_kv as write_kv
from jaxkv.writes import write_mla as write_mla
from jaxkv_kernels.entries import IndexerEntry as IndexerEntry
from jaxkv_kernels.entries import KVEntry as KVEntry
from jaxkv_kernels.entries import MLAEntry as MLAEntry

__version__ = version("jaxkv")
