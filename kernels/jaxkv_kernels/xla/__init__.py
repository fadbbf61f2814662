"""Every operation in plain JAX: right on every device and every layout, and the last rung of the dispatch.

Entries are encoded and decoded by their format itself, so that every registered format is supported.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxkv_kernels.formats import FORMATS
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, Listed, MLAEntry, unlisted
from jaxkv_kernels.xla.copy_blocks import copy_blocks
from jaxkv_kernels.xla.decode_kv import decode_kv
from jaxkv_kernels.xla.decode_mla import decode_mla
from jaxkv_kernels.xla.decode_mla_sparse import decode_mla_sparse
from jaxkv_kernels.xla.gather_indexer_k import gather_indexer_k
from jaxkv_kernels.xla.gather_kv import gather_kv
from jaxkv_kernels.xla.gather_mla import gather_mla
from jaxkv_kernels.xla.indexer_logits import indexer_logits
from jaxkv_kernels.xla.merge_states import merge_states
from jaxkv_kernels.xla.plan_decode import plan_decode
from jaxkv_kernels.xla.read_blocks import read_blocks
from jaxkv_kernels.xla.select_topk import select_topk
from jaxkv_kernels.xla.write_blocks import write_blocks
from jaxkv_kernels.xla.write_indexer_k import write_indexer_k
from jaxkv_kernels.xla.write_kv import write_kv
from jaxkv_kernels.xla.write_mla import write_mla

OPERATIONS: dict[str, Callable[..., Any]] = {
    "write_mla": write_mla,
    "write_kv": write_kv,
    "write_indexer_k": write_indexer_k,
    "gather_mla": gather_mla,
    "gather_kv": gather_kv,
    "gather_indexer_k": gather_indexer_k,
    "plan_decode": plan_decode,
    "decode_mla": decode_mla,
    "decode_kv": decode_kv,
    "decode_mla_sparse": decode_mla_sparse,
    "indexer_logits": indexer_logits,
    "select_topk": select_topk,
    "merge_states": merge_states,
    "copy_blocks": copy_blocks,
    "read_blocks": read_blocks,
    "write_blocks": write_blocks,
}

ENTRIES: dict[str, Listed] = {
    "write_mla": {MLAEntry: FORMATS},
    "write_kv": {KVEntry: FORMATS},
    "write_indexer_k": {IndexerEntry: FORMATS},
    "gather_mla": {MLAEntry: FORMATS},
    "gather_kv": {KVEntry: FORMATS},
    "gather_indexer_k": {IndexerEntry: FORMATS},
    "plan_decode": {MLAEntry: FORMATS, KVEntry: FORMATS},
    "decode_mla": {MLAEntry: FORMATS},
    "decode_kv": {KVEntry: FORMATS},
    "decode_mla_sparse": {MLAEntry: FORMATS},
    "indexer_logits": {IndexerEntry: FORMATS},
}
"""What operations on entries support."""


def unavailable() -> list[str]:
    """None: JAX brings it."""
    return []


def refuses(operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Reasons against this call on any machine; none means that it is taken."""
    del arrays
    reasons = unlisted(ENTRIES.get(operation, {}), options)
    if operation == "plan_decode" and options["batch_invariant"]:
        reasons.append("the last bits of a request depend on the shape of its batch: cannot be batch-invariant")
    return reasons
