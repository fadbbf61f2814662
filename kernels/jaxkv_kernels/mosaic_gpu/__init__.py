"""Kernels in Pallas Mosaic GPU, by operation: attention by wgmma, copies of entries and blocks by bulk copies.

Pallas is imported by the first kernel that is traced, not by this module.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from jaxkv_kernels.formats.entries import KVEntry, Listed, MLAEntry
from jaxkv_kernels.kernel import Kernel, imported_when_called
from jaxkv_kernels.mosaic_gpu import unsupported
from jaxkv_kernels.mosaic_gpu.runtime.available import BULK_COPIES, WGMMA, unavailable_reasons
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting as interpreting


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


_COPIED = ("bf16", "f16", "f32")
_SPARSE: Listed = {MLAEntry: ("bf16", "f16", "fp8_ds_mla")}
_DENSE: Listed = {MLAEntry: ("bf16", "f16", "fp8", "fp8_ds_mla")}
_KV: Listed = {KVEntry: ("bf16", "f16")}

KERNELS: dict[str, Kernel] = {
    "write_mla": _kernel("bulk.writes.write_mla", {MLAEntry: _COPIED}, unsupported.write_mla, BULK_COPIES),
    "write_kv": _kernel("bulk.writes.write_kv", {KVEntry: _COPIED}, unsupported.write_kv, BULK_COPIES),
    "gather_mla": _kernel("bulk.gathers.gather_mla", {MLAEntry: _COPIED}, unsupported.gather_mla, BULK_COPIES),
    "gather_kv": _kernel("bulk.gathers.gather_kv", {KVEntry: _COPIED}, unsupported.gather_kv, BULK_COPIES),
    "plan_decode": _kernel("attention.plan.plan_decode", {**_DENSE, **_KV}, unsupported.plan_decode, WGMMA),
    "decode_mla": _kernel("attention.decode_mla.decode_mla", _DENSE, unsupported.decode_mla, WGMMA),
    "decode_mla_sparse": _kernel(
        "attention.decode_mla_sparse.decode_mla_sparse", _SPARSE, unsupported.decode_mla_sparse, WGMMA
    ),
    "decode_kv": _kernel("attention.decode_kv.decode_kv", _KV, unsupported.decode_kv, WGMMA),
    "copy_blocks": _kernel("bulk.copy_blocks.copy_blocks", {}, unsupported.copy_blocks, BULK_COPIES),
    "read_blocks": _kernel("bulk.read_blocks.read_blocks", {}, unsupported.read_blocks, BULK_COPIES),
    "write_blocks": _kernel("bulk.write_blocks.write_blocks", {}, unsupported.write_blocks, BULK_COPIES),
}
"""Operations that are not listed have no kernel here."""
