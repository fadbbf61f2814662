"""Kernels in Pallas Mosaic GPU, by operation: attention by wgmma, copies of entries and blocks by bulk copies.

Pallas is imported by the first kernel that is traced, not by this module.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, Listed, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.kernel import Kernel, imported_when_called
from jaxkv_kernels.mosaic_gpu import unsupported
from jaxkv_kernels.mosaic_gpu.attention.config import GATHERED
from jaxkv_kernels.mosaic_gpu.experts import unsupported as unsupported_experts
from jaxkv_kernels.mosaic_gpu.runtime.device import BULK_COPIES, REDUX, WGMMA, unavailable_reasons
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting as interpreting


def _kernel(
    name: str,
    entries: Listed,
    unsupported_reasons: Callable[..., Iterable[str]],
    capabilities: Mapping[str, str],
) -> Kernel:
    """The function `name` (folder, module, function), for devices of these compute capabilities."""
    module, _, function = name.rpartition(".")
    run = imported_when_called(f"{__name__}.{module}", function)
    return Kernel(run, entries, unsupported_reasons, partial(unavailable_reasons, capabilities))


_MOVED_MLA: Listed = {MLAEntry: ("bf16", "f16", "f32", "fp8", "fp8_ds_mla", *GATHERED)}
_MOVED_KV: Listed = {KVEntry: ("bf16", "f16", "f32", "fp8", "int8", "nvfp4")}
_MOVED_INDEXER: Listed = {IndexerEntry: ("bf16", "f16", "f32", "indexer_fp8")}
_MLA: Listed = {MLAEntry: ("bf16", "f16", "fp8", "fp8_ds_mla", *GATHERED)}
_LOGITS: Listed = {IndexerEntry: ("bf16", "f16", "indexer_fp8")}
_KV: Listed = {KVEntry: ("bf16", "f16", "fp8", "int8", "nvfp4")}
_STATE: Listed = {StateEntry: StateEntry.formats}

KERNELS: dict[str, Kernel] = {
    "write_mla": _kernel("entries.write_mla", _MOVED_MLA, unsupported.write_mla, BULK_COPIES),
    "write_kv": _kernel("entries.write_kv", _MOVED_KV, unsupported.write_kv, BULK_COPIES),
    "write_indexer_k": _kernel("entries.write_indexer_k", _MOVED_INDEXER, unsupported.write_indexer_k, BULK_COPIES),
    "gather_mla": _kernel("entries.gather_mla", _MOVED_MLA, unsupported.gather_mla, BULK_COPIES),
    "gather_kv": _kernel("entries.gather_kv", _MOVED_KV, unsupported.gather_kv, BULK_COPIES),
    "gather_indexer_k": _kernel("entries.gather_indexer_k", _MOVED_INDEXER, unsupported.gather_indexer_k, BULK_COPIES),
    "gather_entries": _kernel("entries.gather_entries", {}, unsupported.gather_entries, BULK_COPIES),
    "plan_decode": _kernel("attention.plan.plan_decode", {**_MLA, **_KV}, unsupported.plan_decode, WGMMA),
    "decode_mla": _kernel("attention.decode_mla.decode_mla", _MLA, unsupported.decode_mla, WGMMA),
    "decode_mla_sparse": _kernel(
        "attention.decode_mla_sparse.decode_mla_sparse", _MLA, unsupported.decode_mla_sparse, WGMMA
    ),
    "decode_kv": _kernel("attention.decode_kv.decode_kv", _KV, unsupported.decode_kv, WGMMA),
    "merge_states": _kernel("merge_states.merge_states", {}, unsupported.merge_states, BULK_COPIES),
    "indexer_logits": _kernel("indexer_logits.indexer_logits", _LOGITS, unsupported.indexer_logits, WGMMA),
    "select_topk": _kernel("topk.select_topk", {}, unsupported.select_topk, REDUX),
    "write_state": _kernel("copies.write_state", _STATE, unsupported.write_state, BULK_COPIES),
    "read_state": _kernel("copies.read_state", _STATE, unsupported.read_state, BULK_COPIES),
    "copy_blocks": _kernel("copies.copy_blocks", {}, unsupported.copy_blocks, BULK_COPIES),
    "read_blocks": _kernel("copies.read_blocks", {}, unsupported.read_blocks, BULK_COPIES),
    "write_blocks": _kernel("copies.write_blocks", {}, unsupported.write_blocks, BULK_COPIES),
    "select_experts": _kernel("select_experts.select_experts", {}, unsupported_experts.select_experts, REDUX),
    "grouped_swiglu": _kernel("grouped_swiglu.grouped_swiglu", {}, unsupported_experts.grouped_swiglu, WGMMA),
    "scaled_linear": _kernel("scaled_linear.scaled_linear", {}, unsupported_experts.scaled_linear, WGMMA),
}
"""Operations that are not listed have no kernel here."""
