"""Triton kernels, launched through jax-triton, for NVIDIA GPUs from Ampere (sm_80) on, and some for AMD GPUs."""

import jax

from jaxkv_kernels import calls
from jaxkv_kernels.addressing import Buffer
from jaxkv_kernels.calls import Kernels, Listed, Machines, supports
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.generations import GENERATIONS
from jaxkv_kernels.triton import (
    available,
    blocks,
    delta_rule,
    entries,
    gqa,
    hot_rows,
    indexer_logits,
    merge_states,
    mla,
    plan_decode,
    select_topk,
    states,
)
from jaxkv_kernels.triton.splits import Plan
from jaxkv_kernels.xla import prefill
from jaxkv_kernels.xla.masked import decode_by_parts, plan_by_parts, reasons_by_parts

_PLAIN = ("bf16", "f16", "f32")
_TILED_MLA = ("fp8_v4", "fp8_v41", "fp8_v41_split", "nvfp4_ds_mla", "mxfp4_ds_mla", "fp4_v41", "fp4_v41_split")
_MLA: Listed = {MLAEntry: (*_PLAIN, "fp8", "fp8_ds_mla", *_TILED_MLA)}
_KV: Listed = {KVEntry: (*_PLAIN, "fp8")}
_ATTENDED_KV: Listed = {KVEntry: (*_KV[KVEntry], "int8", "nvfp4")}
_INDEXER: Listed = {IndexerEntry: (*_PLAIN, "indexer_fp8", "indexer_mxfp4")}
_STATE: Listed = {StateEntry: StateEntry.formats}

_NVIDIA = Machines(GENERATIONS, lambda: available.unavailable_reasons(GENERATIONS))
_ANY = Machines(available.ANY, lambda: available.unavailable_reasons(available.ANY))
"""For kernels that are compiled for AMD GPUs as well."""


class Triton(Kernels):
    """Kernels for NVIDIA GPUs, Ampere and later, and some of them for AMD GPUs."""

    @supports(_MLA, entries.write_unsupported_reasons, _ANY)
    def write_mla(self, call: calls.WriteMLA) -> Buffer:
        return entries.write_mla(call)

    @supports(_KV, entries.kv_write_unsupported_reasons, _ANY, mixed=True)
    def write_kv(self, call: calls.WriteKV) -> Buffer:
        return entries.write_kv(call)

    @supports(_INDEXER, entries.write_unsupported_reasons, _NVIDIA)
    def write_indexer_k(self, call: calls.WriteIndexerK) -> Buffer:
        return entries.write_indexer_k(call)

    @supports(_MLA, entries.gather_unsupported_reasons, _ANY)
    def gather_mla(self, call: calls.GatherMLA) -> tuple[jax.Array, jax.Array]:
        return entries.gather_mla(call)

    @supports(_KV, entries.gather_unsupported_reasons, _ANY, mixed=True)
    def gather_kv(self, call: calls.GatherKV) -> tuple[jax.Array, jax.Array]:
        return entries.gather_kv(call)

    @supports(_INDEXER, entries.gather_unsupported_reasons, _NVIDIA)
    def gather_indexer_k(self, call: calls.GatherIndexerK) -> jax.Array:
        return entries.gather_indexer_k(call)

    @supports(None, entries.bytes_unsupported_reasons, _NVIDIA)
    def write_entries(self, call: calls.WriteEntries) -> Buffer:
        return entries.write_entries(call)

    @supports(None, entries.bytes_unsupported_reasons, _NVIDIA)
    def gather_entries(self, call: calls.GatherEntries) -> jax.Array:
        return entries.gather_entries(call)

    @supports(_MLA, entries.read_unsupported_reasons, _ANY)
    def read_mla(self, call: calls.ReadMLA) -> tuple[jax.Array, jax.Array]:
        return self.gather_mla(call.gather())

    @supports(_KV, entries.read_unsupported_reasons, _ANY, mixed=True)
    def read_kv(self, call: calls.ReadKV) -> tuple[jax.Array, jax.Array]:
        return self.gather_kv(call.gather())

    @supports(_INDEXER, entries.read_unsupported_reasons, _NVIDIA)
    def read_indexer_k(self, call: calls.ReadIndexerK) -> jax.Array:
        return self.gather_indexer_k(call.gather())

    @supports(
        {**_MLA, **_ATTENDED_KV},
        reasons_by_parts(plan_decode.unsupported_reasons),
        _ANY,
        mixed=True,
    )
    def plan_decode(self, call: calls.PlanDecode) -> Plan | tuple[Plan, ...]:
        return plan_by_parts(call, plan_decode.plan_decode)

    @supports(_MLA, reasons_by_parts(mla.unsupported_reasons), _ANY)
    def decode_mla(self, call: calls.DecodeMLA) -> tuple[jax.Array, jax.Array]:
        return decode_by_parts(call, mla.decode_mla)

    @supports(_ATTENDED_KV, reasons_by_parts(gqa.unsupported_reasons), _ANY, mixed=True)
    def decode_kv(self, call: calls.DecodeKV) -> tuple[jax.Array, jax.Array]:
        return decode_by_parts(call, gqa.decode_kv)

    @supports(_MLA, mla.sparse_unsupported_reasons, _NVIDIA)
    def decode_mla_sparse(self, call: calls.DecodeMLASparse) -> tuple[jax.Array, jax.Array, None]:
        out, lse = mla.decode_mla_sparse(call)
        return out, lse, None

    @supports(_MLA, entries.gather_unsupported_reasons, _ANY)
    def prefill_mla(self, call: calls.PrefillMLA) -> tuple[jax.Array, jax.Array]:
        return prefill.prefill_mla(call, entries.gather_mla)

    @supports(_KV, entries.gather_unsupported_reasons, _ANY, mixed=True)
    def prefill_kv(self, call: calls.PrefillKV) -> tuple[jax.Array, jax.Array]:
        return prefill.prefill_kv(call, entries.gather_kv)

    @supports(_INDEXER, indexer_logits.unsupported_reasons, _NVIDIA)
    def indexer_logits(self, call: calls.IndexerLogits) -> jax.Array:
        return indexer_logits.indexer_logits(call)

    @supports(None, select_topk.unsupported_reasons, _NVIDIA)
    def select_topk(self, call: calls.SelectTopk) -> jax.Array:
        return select_topk.select_topk(call)

    @supports(None, merge_states.unsupported_reasons, _NVIDIA)
    def merge_states(self, call: calls.MergeStates) -> tuple[jax.Array, jax.Array]:
        return merge_states.merge_states(call)

    @supports(_STATE, states.unsupported_reasons, _NVIDIA)
    def write_state(self, call: calls.WriteState) -> jax.Array:
        return states.write_state(call)

    @supports(_STATE, states.unsupported_reasons, _NVIDIA)
    def read_state(self, call: calls.ReadState) -> dict[str, jax.Array]:
        return states.read_state(call)

    @supports(_STATE, delta_rule.unsupported_reasons, _ANY)
    def decode_delta_rule(self, call: calls.DecodeDeltaRule) -> tuple[jax.Array, Buffer]:
        return delta_rule.decode_delta_rule(call)

    @supports(None, blocks.unsupported_reasons, _NVIDIA)
    def copy_blocks(self, call: calls.CopyBlocks) -> Buffer:
        return blocks.copy_blocks(call)

    @supports(None, blocks.unsupported_reasons, _NVIDIA)
    def read_blocks(self, call: calls.ReadBlocks) -> jax.Array:
        return blocks.read_blocks(call)

    @supports(None, blocks.unsupported_reasons, _NVIDIA)
    def write_blocks(self, call: calls.WriteBlocks) -> Buffer:
        return blocks.write_blocks(call)

    @supports(None, hot_rows.unsupported_reasons, _NVIDIA)
    def fetch_rows(self, call: calls.FetchRows) -> tuple[jax.Array, jax.Array, jax.Array]:
        return hot_rows.fetch_rows(call)

    @supports(machines=_NVIDIA)
    def load_rows(self, call: calls.LoadRows) -> jax.Array:
        return hot_rows.load_rows(call)

    @supports(machines=_NVIDIA)
    def store_rows(self, call: calls.StoreRows) -> jax.Array:
        return hot_rows.store_rows(call)
