"""Triton kernels by operation, launched through jax-triton, for NVIDIA GPUs from Ampere (sm_80) on.

Triton and jax-triton are imported by the first kernel that is traced, not by this module.
"""

from collections.abc import Callable, Iterable

from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, Listed, MLAEntry
from jaxkv_kernels.kernel import Kernel, imported_when_called, nothing
from jaxkv_kernels.triton import unsupported
from jaxkv_kernels.triton.available import unavailable_reasons
from jaxkv_kernels.triton.interpreter import interpreting as interpreting


def _kernel(name: str, entries: Listed, unsupported_reasons: Callable[..., Iterable[str]]) -> Kernel:
    """The kernel `name` ("module.function").  All kernels have the same requirements on the machine."""
    module, _, function = name.rpartition(".")
    run = imported_when_called(f"{__name__}.{module}", function)
    return Kernel(run, entries, unsupported_reasons, unavailable_reasons)


_PLAIN = ("bf16", "f16", "f32")
_MLA: Listed = {MLAEntry: (*_PLAIN, "fp8", "fp8_ds_mla")}
_KV: Listed = {KVEntry: (*_PLAIN, "fp8")}
_ATTENDED_KV: Listed = {KVEntry: (*_KV[KVEntry], "int8", "nvfp4")}
_INDEXER: Listed = {IndexerEntry: (*_PLAIN, "indexer_fp8")}

KERNELS: dict[str, Kernel] = {
    "write_mla": _kernel("entries.write_mla", _MLA, unsupported.write_mla),
    "write_kv": _kernel("entries.write_kv", _KV, unsupported.write_kv),
    "write_indexer_k": _kernel("entries.write_indexer_k", _INDEXER, unsupported.write_indexer_k),
    "gather_mla": _kernel("entries.gather_mla", _MLA, unsupported.gather_mla),
    "gather_kv": _kernel("entries.gather_kv", _KV, unsupported.gather_kv),
    "gather_indexer_k": _kernel("entries.gather_indexer_k", _INDEXER, unsupported.gather_indexer_k),
    "gather_entries": _kernel("entries.gather_entries", {}, unsupported.gather_entries),
    "plan_decode": _kernel("plan_decode.plan_decode", {**_MLA, **_ATTENDED_KV}, unsupported.plan_decode),
    "decode_mla": _kernel("decode_mla.decode_mla", _MLA, unsupported.decode_mla),
    "decode_kv": _kernel("decode_kv.decode_kv", _ATTENDED_KV, unsupported.decode_kv),
    "decode_mla_sparse": _kernel("decode_mla.decode_mla_sparse", _MLA, unsupported.decode_mla_sparse),
    "indexer_logits": _kernel("indexer_logits.indexer_logits", _INDEXER, unsupported.indexer_logits),
    "select_topk": _kernel("select_topk.select_topk", {}, unsupported.select_topk),
    "merge_states": _kernel("merge_states.merge_states", {}, unsupported.merge_states),
    "copy_blocks": _kernel("blocks.copy_blocks", {}, unsupported.copy_blocks),
    "read_blocks": _kernel("blocks.read_blocks", {}, unsupported.read_blocks),
    "write_blocks": _kernel("blocks.write_blocks", {}, unsupported.write_blocks),
}
"""The kernels by operation.  Operations that are not listed have no Triton kernel."""

HOT_ROWS: dict[str, Kernel] = {
    "fetch_rows": _kernel("hot_rows.fetch_rows", {}, unsupported.fetch_rows),
    "store_rows": _kernel("hot_rows.store_rows", {}, nothing),
}
"""The kernels of `jaxkv.offload.HotRows`."""
