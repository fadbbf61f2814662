"""Kernels in Pallas Mosaic GPU: attention by wgmma, copies of entries and blocks by bulk copies."""

from collections.abc import Mapping

import jax

from jaxkv_kernels import calls
from jaxkv_kernels.addressing import Buffer
from jaxkv_kernels.calls import Kernels, Listed, Machines, supports
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.mosaic_gpu import (
    copies,
    decode,
    entries,
    grouped_swiglu,
    indexer_logits,
    merge_states,
    mla_sparse,
    prefill,
    scaled_linear,
    select_experts,
    topk,
)
from jaxkv_kernels.mosaic_gpu.decode import GATHERED
from jaxkv_kernels.mosaic_gpu.runtime import device
from jaxkv_kernels.mosaic_gpu.runtime.device import BULK_COPIES, CLOCK, DECODE, REDUX, WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.stamp import stamp
from jaxkv_kernels.mosaic_gpu.tile_scheduler import Plan
from jaxkv_kernels.xla.masked import decode_by_parts, plan_by_parts, reasons_by_parts

_MOVED_MLA: Listed = {MLAEntry: ("bf16", "f16", "f32", "fp8", "fp8_ds_mla", *GATHERED)}
_MOVED_KV: Listed = {KVEntry: ("bf16", "f16", "f32", "fp8", "int8", "nvfp4")}
_MOVED_INDEXER: Listed = {IndexerEntry: ("bf16", "f16", "f32", "indexer_fp8")}
_MLA: Listed = {MLAEntry: ("bf16", "f16", "fp8", "fp8_ds_mla", *GATHERED)}
_LOGITS: Listed = {IndexerEntry: ("bf16", "f16", "indexer_fp8")}
_KV: Listed = {KVEntry: ("bf16", "f16", "fp8", "int8", "nvfp4")}
_STATE: Listed = {StateEntry: StateEntry.formats}


def _on(capabilities: Mapping[str, str]) -> Machines:
    """Machines with GPUs of these compute capabilities."""
    return Machines(capabilities, lambda: device.unavailable_reasons(capabilities))


class MosaicGPU(Kernels):
    """Kernels for NVIDIA Hopper, some of them also for Blackwell."""

    @supports(machines=_on(CLOCK))
    def stamp(self, after: jax.Array) -> jax.Array:
        return stamp(after)

    @supports(_MOVED_MLA, entries.write_unsupported_reasons, _on(BULK_COPIES))
    def write_mla(self, call: calls.WriteMLA) -> Buffer:
        return entries.write(call)

    @supports(_MOVED_KV, entries.write_unsupported_reasons, _on(BULK_COPIES))
    def write_kv(self, call: calls.WriteKV) -> Buffer:
        return entries.write(call)

    @supports(_MOVED_INDEXER, entries.write_unsupported_reasons, _on(BULK_COPIES))
    def write_indexer_k(self, call: calls.WriteIndexerK) -> Buffer:
        return entries.write(call)

    @supports(_MOVED_MLA, entries.gather_unsupported_reasons, _on(BULK_COPIES))
    def gather_mla(self, call: calls.GatherMLA) -> tuple[jax.Array, jax.Array]:
        kv_c, k_pe = entries.gather(call)
        return kv_c, k_pe

    @supports(_MOVED_KV, entries.gather_unsupported_reasons, _on(BULK_COPIES))
    def gather_kv(self, call: calls.GatherKV) -> tuple[jax.Array, jax.Array]:
        k, v = entries.gather(call)
        return k, v

    @supports(_MOVED_INDEXER, entries.gather_unsupported_reasons, _on(BULK_COPIES))
    def gather_indexer_k(self, call: calls.GatherIndexerK) -> jax.Array:
        return entries.gather(call)[0]

    @supports(None, entries.bytes_unsupported_reasons, _on(BULK_COPIES))
    def write_entries(self, call: calls.WriteEntries) -> Buffer:
        return entries.write_entries(call)

    @supports(None, entries.bytes_unsupported_reasons, _on(BULK_COPIES))
    def gather_entries(self, call: calls.GatherEntries) -> jax.Array:
        return entries.gather_entries(call)

    @supports(_MOVED_MLA, entries.read_unsupported_reasons, _on(BULK_COPIES))
    def read_mla(self, call: calls.ReadMLA) -> tuple[jax.Array, jax.Array]:
        return self.gather_mla(call.gather())

    @supports(_MOVED_KV, entries.read_unsupported_reasons, _on(BULK_COPIES))
    def read_kv(self, call: calls.ReadKV) -> tuple[jax.Array, jax.Array]:
        return self.gather_kv(call.gather())

    @supports(_MOVED_INDEXER, entries.read_unsupported_reasons, _on(BULK_COPIES))
    def read_indexer_k(self, call: calls.ReadIndexerK) -> jax.Array:
        return self.gather_indexer_k(call.gather())

    @supports({**_MLA, **_KV}, reasons_by_parts(decode.plan_unsupported_reasons), _on(DECODE))
    def plan_decode(self, call: calls.PlanDecode) -> Plan | tuple[Plan, ...]:
        return plan_by_parts(call, decode.plan_decode)

    @supports(_MLA, reasons_by_parts(decode.mla_unsupported_reasons), _on(DECODE))
    def decode_mla(self, call: calls.DecodeMLA) -> tuple[jax.Array, jax.Array]:
        return decode_by_parts(call, decode.decode_mla)

    @supports(_MLA, mla_sparse.unsupported_reasons, _on(WGMMA))
    def decode_mla_sparse(self, call: calls.DecodeMLASparse) -> tuple[jax.Array, jax.Array, None]:
        out, lse = mla_sparse.decode_mla_sparse(call)
        return out, lse, None

    @supports(_KV, reasons_by_parts(decode.kv_unsupported_reasons), _on(DECODE))
    def decode_kv(self, call: calls.DecodeKV) -> tuple[jax.Array, jax.Array]:
        return decode_by_parts(call, decode.decode_kv)

    @supports(_MOVED_MLA, entries.gather_unsupported_reasons, _on(BULK_COPIES))
    def prefill_mla(self, call: calls.PrefillMLA) -> tuple[jax.Array, jax.Array]:
        return prefill.prefill_mla(call)

    @supports(_MOVED_KV, entries.gather_unsupported_reasons, _on(BULK_COPIES))
    def prefill_kv(self, call: calls.PrefillKV) -> tuple[jax.Array, jax.Array]:
        return prefill.prefill_kv(call)

    def least_prefill(self, heads: calls.ExpandedHeads) -> int | None:
        return prefill.least_prefill(heads)

    @supports(None, merge_states.unsupported_reasons, _on(BULK_COPIES))
    def merge_states(self, call: calls.MergeStates) -> tuple[jax.Array, jax.Array]:
        return merge_states.merge_states(call)

    @supports(_LOGITS, indexer_logits.unsupported_reasons, _on(WGMMA))
    def indexer_logits(self, call: calls.IndexerLogits) -> jax.Array:
        return indexer_logits.indexer_logits(call)

    @supports(None, topk.unsupported_reasons, _on(REDUX))
    def select_topk(self, call: calls.SelectTopk) -> jax.Array:
        return topk.select_topk(call)

    @supports(_STATE, copies.states_unsupported_reasons, _on(BULK_COPIES))
    def write_state(self, call: calls.WriteState) -> jax.Array:
        return copies.write_state(call)

    @supports(_STATE, copies.states_unsupported_reasons, _on(BULK_COPIES))
    def read_state(self, call: calls.ReadState) -> dict[str, jax.Array]:
        return copies.read_state(call)

    @supports(None, copies.blocks_unsupported_reasons, _on(BULK_COPIES))
    def copy_blocks(self, call: calls.CopyBlocks) -> Buffer:
        return copies.copy_blocks(call)

    @supports(None, copies.blocks_unsupported_reasons, _on(BULK_COPIES))
    def read_blocks(self, call: calls.ReadBlocks) -> jax.Array:
        return copies.read_blocks(call)

    @supports(None, copies.blocks_unsupported_reasons, _on(BULK_COPIES))
    def write_blocks(self, call: calls.WriteBlocks) -> Buffer:
        return copies.write_blocks(call)

    @supports(None, select_experts.unsupported_reasons, _on(REDUX))
    def select_experts(self, call: calls.SelectExperts) -> tuple[jax.Array, jax.Array]:
        return select_experts.select_experts(call)

    @supports(None, grouped_swiglu.unsupported_reasons, _on(WGMMA))
    def grouped_swiglu(self, call: calls.GroupedSwiglu) -> jax.Array:
        return grouped_swiglu.grouped_swiglu(call)

    @supports(None, scaled_linear.unsupported_reasons, _on(WGMMA))
    def scaled_linear(self, call: calls.ScaledLinear) -> jax.Array:
        return scaled_linear.scaled_linear(call)
