"""The names that `import jaxkv` provides, which are loaded on first use (`jaxkv/__init__.py`)."""

from jaxkv.cache import KVCache
from jaxkv.data_checks import checked
from jaxkv.dispatch import implementations
from jaxkv.layout.layout import ORDERS, CacheLayout, Strides, TokenShards
from jaxkv.layout.packed import Group, PackedLayout
from jaxkv.ops.attention import decode_kv, decode_mla
from jaxkv.ops.blocks import convert_blocks, copy_blocks, read_blocks, write_blocks
from jaxkv.ops.gathers import (
    gather_entries,
    gather_indexer_k,
    gather_kv,
    gather_mla,
    read_indexer_k,
    read_kv,
    read_mla,
)
from jaxkv.ops.indexer import indexer_logits, positions_to_slots, select_slots, select_topk
from jaxkv.ops.merge import merge_states
from jaxkv.ops.page_tables import block_tables_from_csr
from jaxkv.ops.plan import DecodePlan, plan_decode
from jaxkv.ops.prefill import prefill_kv, prefill_mla
from jaxkv.ops.products import grouped_swiglu, scaled_linear
from jaxkv.ops.ragged import mla_ragged_paged_attention, ragged_paged_attention
from jaxkv.ops.routing import select_experts
from jaxkv.ops.scales import swizzle_scales
from jaxkv.ops.slots import ragged_positions, ragged_slots, slots_for
from jaxkv.ops.sparse import ExtraCache, decode_mla_sparse
from jaxkv.ops.states import decode_delta_rule, read_state, write_state
from jaxkv.ops.writes import write_entries, write_indexer_k, write_kv, write_mla
from jaxkv.support import Explanation, explain
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.tile_scaled import TileScaled

__all__ = [  # noqa: RUF022 (the order of the API reference)
    # New tokens
    "write_mla",
    "write_kv",
    "write_indexer_k",
    "write_entries",
    "gather_mla",
    "gather_kv",
    "gather_indexer_k",
    "gather_entries",
    "read_mla",
    "read_kv",
    "read_indexer_k",
    # Attention
    "decode_mla",
    "decode_kv",
    "plan_decode",
    "DecodePlan",
    "prefill_mla",
    "prefill_kv",
    "decode_mla_sparse",
    "ExtraCache",
    "indexer_logits",
    "select_topk",
    "positions_to_slots",
    "select_slots",
    "merge_states",
    "mla_ragged_paged_attention",
    "ragged_paged_attention",
    # States
    "write_state",
    "read_state",
    "decode_delta_rule",
    # Whole blocks
    "copy_blocks",
    "read_blocks",
    "write_blocks",
    "convert_blocks",
    # Weights
    "select_experts",
    "grouped_swiglu",
    "scaled_linear",
    "TileScaled",
    # Slots
    "slots_for",
    "ragged_positions",
    "ragged_slots",
    # Pages of other libraries
    "block_tables_from_csr",
    "swizzle_scales",
    # Caches
    "KVCache",
    "CacheLayout",
    "ORDERS",
    "Strides",
    "PackedLayout",
    "Group",
    "TokenShards",
    "MLAEntry",
    "KVEntry",
    "IndexerEntry",
    "StateEntry",
    # Diagnosis
    "explain",
    "Explanation",
    "implementations",
    "checked",
]
