"""Every operation in plain JAX, correct on every device and every layout.

Entries are encoded and decoded by their formats, so every registered format is supported.
"""

from collections.abc import Iterator

import jax

from jaxkv_kernels import calls
from jaxkv_kernels.addressing import Buffer
from jaxkv_kernels.calls import Kernels, Listed, supports
from jaxkv_kernels.formats import FORMATS
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.xla import attention, blocks, delta_rule, entries, experts, hot_rows, indexer, prefill, sparse

_MLA: Listed = {MLAEntry: FORMATS}
_KV: Listed = {KVEntry: FORMATS}
_INDEXER: Listed = {IndexerEntry: FORMATS}
_STATE: Listed = {StateEntry: StateEntry.formats}


def _batch_invariant_reasons(call: calls.PlanDecode | calls.DecodeMLASparse) -> Iterator[str]:
    """A reason against a call that must be batch-invariant."""
    if call.batch_invariant:
        yield "cannot be batch-invariant: the last bits of a result depend on the shape of the batch"


class XLA(Kernels):
    """Plain JAX, for any device."""

    transformable = True

    @supports(_MLA)
    def write_mla(self, call: calls.WriteMLA) -> Buffer:
        return entries.write_mla(call)

    @supports(_KV, mixed=True)
    def write_kv(self, call: calls.WriteKV) -> Buffer:
        return entries.write_kv(call)

    @supports(_INDEXER)
    def write_indexer_k(self, call: calls.WriteIndexerK) -> Buffer:
        return entries.write_indexer_k(call)

    @supports()
    def write_entries(self, call: calls.WriteEntries) -> Buffer:
        return entries.write_entries(call)

    @supports(_MLA)
    def gather_mla(self, call: calls.GatherMLA) -> tuple[jax.Array, jax.Array]:
        return entries.gather_mla(call)

    @supports(_KV, mixed=True)
    def gather_kv(self, call: calls.GatherKV) -> tuple[jax.Array, jax.Array]:
        return entries.gather_kv(call)

    @supports(_INDEXER)
    def gather_indexer_k(self, call: calls.GatherIndexerK) -> jax.Array:
        return entries.gather_indexer_k(call)

    @supports()
    def gather_entries(self, call: calls.GatherEntries) -> jax.Array:
        return entries.gather_entries(call)

    @supports(_MLA)
    def read_mla(self, call: calls.ReadMLA) -> tuple[jax.Array, jax.Array]:
        return entries.read_mla(call)

    @supports(_KV, mixed=True)
    def read_kv(self, call: calls.ReadKV) -> tuple[jax.Array, jax.Array]:
        return entries.read_kv(call)

    @supports(_INDEXER)
    def read_indexer_k(self, call: calls.ReadIndexerK) -> jax.Array:
        return entries.read_indexer_k(call)

    @supports({**_MLA, **_KV}, _batch_invariant_reasons, mixed=True)
    def plan_decode(self, call: calls.PlanDecode) -> None:
        return None  # attention processes all requests together: there is nothing to plan

    @supports(_MLA)
    def decode_mla(self, call: calls.DecodeMLA) -> tuple[jax.Array, jax.Array]:
        return attention.decode_mla(call)

    @supports(_KV, mixed=True)
    def decode_kv(self, call: calls.DecodeKV) -> tuple[jax.Array, jax.Array]:
        return attention.decode_kv(call)

    @supports(_MLA, _batch_invariant_reasons)
    def decode_mla_sparse(self, call: calls.DecodeMLASparse) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        return sparse.decode_mla_sparse(call)

    @supports(_MLA)
    def prefill_mla(self, call: calls.PrefillMLA) -> tuple[jax.Array, jax.Array]:
        return prefill.prefill_mla(call, entries.gather_mla)

    @supports(_KV, mixed=True)
    def prefill_kv(self, call: calls.PrefillKV) -> tuple[jax.Array, jax.Array]:
        return prefill.prefill_kv(call, entries.gather_kv)

    def least_prefill(self, heads: calls.ExpandedHeads) -> int | None:
        return prefill.least_by_flops(heads)

    @supports(_INDEXER)
    def indexer_logits(self, call: calls.IndexerLogits) -> jax.Array:
        return indexer.indexer_logits(call)

    @supports()
    def select_topk(self, call: calls.SelectTopk) -> jax.Array:
        return indexer.select_topk(call)

    @supports()
    def merge_states(self, call: calls.MergeStates) -> tuple[jax.Array, jax.Array]:
        return attention.merge_states(call)

    @supports(_STATE)
    def write_state(self, call: calls.WriteState) -> Buffer:
        return entries.write_state(call)

    @supports(_STATE)
    def read_state(self, call: calls.ReadState) -> dict[str, jax.Array]:
        return entries.read_state(call)

    @supports(_STATE)
    def decode_delta_rule(self, call: calls.DecodeDeltaRule) -> tuple[jax.Array, Buffer]:
        return delta_rule.decode_delta_rule(call)

    @supports()
    def copy_blocks(self, call: calls.CopyBlocks) -> Buffer:
        return blocks.copy_blocks(call)

    @supports()
    def read_blocks(self, call: calls.ReadBlocks) -> jax.Array:
        return blocks.read_blocks(call)

    @supports()
    def write_blocks(self, call: calls.WriteBlocks) -> Buffer:
        return blocks.write_blocks(call)

    @supports()
    def select_experts(self, call: calls.SelectExperts) -> tuple[jax.Array, jax.Array]:
        return experts.select_experts(call)

    @supports()
    def grouped_swiglu(self, call: calls.GroupedSwiglu) -> jax.Array:
        return experts.grouped_swiglu(call)

    @supports()
    def scaled_linear(self, call: calls.ScaledLinear) -> jax.Array:
        return experts.scaled_linear(call)

    @supports()
    def fetch_rows(self, call: calls.FetchRows) -> tuple[jax.Array, jax.Array, jax.Array]:
        return hot_rows.fetch_rows(call)

    @supports()
    def load_rows(self, call: calls.LoadRows) -> jax.Array:
        return hot_rows.load_rows(call)

    @supports()
    def store_rows(self, call: calls.StoreRows) -> jax.Array:
        return hot_rows.store_rows(call)
