"""Kernels in Pallas Mosaic GPU: attention by wgmma, copies of entries and blocks by bulk copies."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxkv_kernels import adapted, calls
from jaxkv_kernels.calls import Kernels, Listed, supports
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.mosaic_gpu import unsupported
from jaxkv_kernels.mosaic_gpu.attention import decode_kv as decode_kv_kernels
from jaxkv_kernels.mosaic_gpu.attention import decode_mla as decode_mla_kernels
from jaxkv_kernels.mosaic_gpu.attention import decode_mla_sparse as decode_mla_sparse_kernels
from jaxkv_kernels.mosaic_gpu.attention import plan as plan_kernels
from jaxkv_kernels.mosaic_gpu.attention.config import GATHERED
from jaxkv_kernels.mosaic_gpu.bulk import copy_blocks as copy_blocks_kernels
from jaxkv_kernels.mosaic_gpu.bulk import read_blocks as read_blocks_kernels
from jaxkv_kernels.mosaic_gpu.bulk import states as states_kernels
from jaxkv_kernels.mosaic_gpu.bulk import write_blocks as write_blocks_kernels
from jaxkv_kernels.mosaic_gpu.entries import gathers as gathers_kernels
from jaxkv_kernels.mosaic_gpu.entries import merge_states as merge_states_kernels
from jaxkv_kernels.mosaic_gpu.entries import writes as writes_kernels
from jaxkv_kernels.mosaic_gpu.experts import linear as linear_kernels
from jaxkv_kernels.mosaic_gpu.experts import routing as routing_kernels
from jaxkv_kernels.mosaic_gpu.experts import swiglu as swiglu_kernels
from jaxkv_kernels.mosaic_gpu.experts import unsupported as unsupported_experts
from jaxkv_kernels.mosaic_gpu.indexer import logits as logits_kernels
from jaxkv_kernels.mosaic_gpu.indexer import topk as topk_kernels
from jaxkv_kernels.mosaic_gpu.runtime import available
from jaxkv_kernels.mosaic_gpu.runtime.available import BULK_COPIES, REDUX, WGMMA

_MOVED_MLA: Listed = {MLAEntry: ("bf16", "f16", "f32", "fp8", "fp8_ds_mla", *GATHERED)}
_MOVED_KV: Listed = {KVEntry: ("bf16", "f16", "f32", "fp8", "int8", "nvfp4")}
_MOVED_INDEXER: Listed = {IndexerEntry: ("bf16", "f16", "f32", "indexer_fp8")}
_MLA: Listed = {MLAEntry: ("bf16", "f16", "fp8", "fp8_ds_mla", *GATHERED)}
_LOGITS: Listed = {IndexerEntry: ("bf16", "f16", "indexer_fp8")}
_KV: Listed = {KVEntry: ("bf16", "f16", "fp8", "int8", "nvfp4")}
_STATE: Listed = {StateEntry: StateEntry.formats}


def _on(capabilities: Mapping[str, str]) -> Callable[[], list[str]]:
    """The reasons against kernels for these compute capabilities on this machine."""
    return lambda: available.unavailable_reasons(capabilities)


class MosaicGPU(Kernels):
    """Kernels for NVIDIA Hopper."""

    @supports(_MOVED_MLA, adapted.reasons(unsupported.write_mla), _on(BULK_COPIES))
    def write_mla(self, call: calls.WriteMLA) -> jax.Array:
        return adapted.run(writes_kernels.write_mla, call)

    @supports(_MOVED_KV, adapted.reasons(unsupported.write_kv), _on(BULK_COPIES))
    def write_kv(self, call: calls.WriteKV) -> jax.Array:
        return adapted.run(writes_kernels.write_kv, call)

    @supports(_MOVED_INDEXER, adapted.reasons(unsupported.write_indexer_k), _on(BULK_COPIES))
    def write_indexer_k(self, call: calls.WriteIndexerK) -> jax.Array:
        return adapted.run(writes_kernels.write_indexer_k, call)

    @supports(_MOVED_MLA, adapted.reasons(unsupported.gather_mla), _on(BULK_COPIES))
    def gather_mla(self, call: calls.GatherMLA) -> tuple[jax.Array, jax.Array]:
        return adapted.run(gathers_kernels.gather_mla, call)

    @supports(_MOVED_KV, adapted.reasons(unsupported.gather_kv), _on(BULK_COPIES))
    def gather_kv(self, call: calls.GatherKV) -> tuple[jax.Array, jax.Array]:
        return adapted.run(gathers_kernels.gather_kv, call)

    @supports(_MOVED_INDEXER, adapted.reasons(unsupported.gather_indexer_k), _on(BULK_COPIES))
    def gather_indexer_k(self, call: calls.GatherIndexerK) -> jax.Array:
        return adapted.run(gathers_kernels.gather_indexer_k, call)

    @supports(None, adapted.reasons(unsupported.gather_entries), _on(BULK_COPIES))
    def gather_entries(self, call: calls.GatherEntries) -> jax.Array:
        return adapted.run(gathers_kernels.gather_entries, call)

    @supports({**_MLA, **_KV}, adapted.reasons(unsupported.plan_decode), _on(WGMMA))
    def plan_decode(self, call: calls.PlanDecode) -> Any:
        return adapted.run(plan_kernels.plan_decode, call)

    @supports(_MLA, adapted.reasons(unsupported.decode_mla), _on(WGMMA))
    def decode_mla(self, call: calls.DecodeMLA) -> tuple[jax.Array, jax.Array]:
        return adapted.run(decode_mla_kernels.decode_mla, call)

    @supports(_MLA, adapted.reasons(unsupported.decode_mla_sparse), _on(WGMMA))
    def decode_mla_sparse(self, call: calls.DecodeMLASparse) -> tuple[jax.Array, jax.Array]:
        return adapted.run(decode_mla_sparse_kernels.decode_mla_sparse, call)

    @supports(_KV, adapted.reasons(unsupported.decode_kv), _on(WGMMA))
    def decode_kv(self, call: calls.DecodeKV) -> tuple[jax.Array, jax.Array]:
        return adapted.run(decode_kv_kernels.decode_kv, call)

    @supports(None, adapted.reasons(unsupported.merge_states), _on(BULK_COPIES))
    def merge_states(self, call: calls.MergeStates) -> tuple[jax.Array, jax.Array]:
        return adapted.run(merge_states_kernels.merge_states, call)

    @supports(_LOGITS, adapted.reasons(unsupported.indexer_logits), _on(WGMMA))
    def indexer_logits(self, call: calls.IndexerLogits) -> jax.Array:
        return adapted.run(logits_kernels.indexer_logits, call)

    @supports(None, adapted.reasons(unsupported.select_topk), _on(REDUX))
    def select_topk(self, call: calls.SelectTopk) -> jax.Array:
        return adapted.run(topk_kernels.select_topk, call)

    @supports(_STATE, adapted.reasons(unsupported.write_state), _on(BULK_COPIES))
    def write_state(self, call: calls.WriteState) -> jax.Array:
        return adapted.run(states_kernels.write_state, call)

    @supports(_STATE, adapted.reasons(unsupported.read_state), _on(BULK_COPIES))
    def read_state(self, call: calls.ReadState) -> dict[str, jax.Array]:
        return adapted.run(states_kernels.read_state, call)

    @supports(None, adapted.reasons(unsupported.copy_blocks), _on(BULK_COPIES))
    def copy_blocks(self, call: calls.CopyBlocks) -> jax.Array:
        return adapted.run(copy_blocks_kernels.copy_blocks, call)

    @supports(None, adapted.reasons(unsupported.read_blocks), _on(BULK_COPIES))
    def read_blocks(self, call: calls.ReadBlocks) -> jax.Array:
        return adapted.run(read_blocks_kernels.read_blocks, call)

    @supports(None, adapted.reasons(unsupported.write_blocks), _on(BULK_COPIES))
    def write_blocks(self, call: calls.WriteBlocks) -> jax.Array:
        return adapted.run(write_blocks_kernels.write_blocks, call)

    @supports(None, adapted.reasons(unsupported_experts.select_experts), _on(REDUX))
    def select_experts(self, call: calls.SelectExperts) -> tuple[jax.Array, jax.Array]:
        return adapted.run(routing_kernels.select_experts, call)

    @supports(None, adapted.reasons(unsupported_experts.grouped_swiglu), _on(WGMMA))
    def grouped_swiglu(self, call: calls.GroupedSwiglu) -> jax.Array:
        return adapted.run(swiglu_kernels.grouped_swiglu, call)

    @supports(None, adapted.reasons(unsupported_experts.scaled_linear), _on(WGMMA))
    def scaled_linear(self, call: calls.ScaledLinear) -> jax.Array:
        return adapted.run(linear_kernels.scaled_linear, call)
