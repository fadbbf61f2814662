"""Triton kernels, launched through jax-triton, for NVIDIA GPUs from Ampere (sm_80) on."""

from typing import Any

import jax

from jaxkv_kernels import adapted, calls
from jaxkv_kernels.calls import Kernels, Listed, supports
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.triton import unsupported
from jaxkv_kernels.triton.runtime import available

_PLAIN = ("bf16", "f16", "f32")
_MLA: Listed = {MLAEntry: (*_PLAIN, "fp8", "fp8_ds_mla")}
_KV: Listed = {KVEntry: (*_PLAIN, "fp8")}
_ATTENDED_KV: Listed = {KVEntry: (*_KV[KVEntry], "int8", "nvfp4")}
_INDEXER: Listed = {IndexerEntry: (*_PLAIN, "indexer_fp8")}


def _unavailable() -> list[str]:
    """The reasons against all kernels on this machine."""
    return available.unavailable_reasons()


class Triton(Kernels):
    """Kernels for NVIDIA GPUs, Ampere and later."""

    @supports(_MLA, adapted.reasons(unsupported.write_mla), _unavailable)
    def write_mla(self, call: calls.WriteMLA) -> jax.Array:
        from jaxkv_kernels.triton.entries import writes as kernels

        return adapted.run(kernels.write_mla, call)

    @supports(_KV, adapted.reasons(unsupported.write_kv), _unavailable)
    def write_kv(self, call: calls.WriteKV) -> jax.Array:
        from jaxkv_kernels.triton.entries import writes as kernels

        return adapted.run(kernels.write_kv, call)

    @supports(_INDEXER, adapted.reasons(unsupported.write_indexer_k), _unavailable)
    def write_indexer_k(self, call: calls.WriteIndexerK) -> jax.Array:
        from jaxkv_kernels.triton.entries import writes as kernels

        return adapted.run(kernels.write_indexer_k, call)

    @supports(_MLA, adapted.reasons(unsupported.gather_mla), _unavailable)
    def gather_mla(self, call: calls.GatherMLA) -> tuple[jax.Array, jax.Array]:
        from jaxkv_kernels.triton.entries import gathers as kernels

        return adapted.run(kernels.gather_mla, call)

    @supports(_KV, adapted.reasons(unsupported.gather_kv), _unavailable)
    def gather_kv(self, call: calls.GatherKV) -> tuple[jax.Array, jax.Array]:
        from jaxkv_kernels.triton.entries import gathers as kernels

        return adapted.run(kernels.gather_kv, call)

    @supports(_INDEXER, adapted.reasons(unsupported.gather_indexer_k), _unavailable)
    def gather_indexer_k(self, call: calls.GatherIndexerK) -> jax.Array:
        from jaxkv_kernels.triton.entries import gathers as kernels

        return adapted.run(kernels.gather_indexer_k, call)

    @supports(None, adapted.reasons(unsupported.gather_entries), _unavailable)
    def gather_entries(self, call: calls.GatherEntries) -> jax.Array:
        from jaxkv_kernels.triton.entries import gathers as kernels

        return adapted.run(kernels.gather_entries, call)

    @supports({**_MLA, **_ATTENDED_KV}, adapted.reasons(unsupported.plan_decode), _unavailable)
    def plan_decode(self, call: calls.PlanDecode) -> Any:
        from jaxkv_kernels.triton.attention import plan_decode as kernels

        return adapted.run(kernels.plan_decode, call)

    @supports(_MLA, adapted.reasons(unsupported.decode_mla), _unavailable)
    def decode_mla(self, call: calls.DecodeMLA) -> tuple[jax.Array, jax.Array]:
        from jaxkv_kernels.triton.attention import decode_mla as kernels

        return adapted.run(kernels.decode_mla, call)

    @supports(_ATTENDED_KV, adapted.reasons(unsupported.decode_kv), _unavailable)
    def decode_kv(self, call: calls.DecodeKV) -> tuple[jax.Array, jax.Array]:
        from jaxkv_kernels.triton.attention import decode_kv as kernels

        return adapted.run(kernels.decode_kv, call)

    @supports(_MLA, adapted.reasons(unsupported.decode_mla_sparse), _unavailable)
    def decode_mla_sparse(self, call: calls.DecodeMLASparse) -> tuple[jax.Array, jax.Array]:
        from jaxkv_kernels.triton.attention import decode_mla_sparse as kernels

        return adapted.run(kernels.decode_mla_sparse, call)

    @supports(_INDEXER, adapted.reasons(unsupported.indexer_logits), _unavailable)
    def indexer_logits(self, call: calls.IndexerLogits) -> jax.Array:
        from jaxkv_kernels.triton.indexer import indexer_logits as kernels

        return adapted.run(kernels.indexer_logits, call)

    @supports(None, adapted.reasons(unsupported.select_topk), _unavailable)
    def select_topk(self, call: calls.SelectTopk) -> jax.Array:
        from jaxkv_kernels.triton.indexer import select_topk as kernels

        return adapted.run(kernels.select_topk, call)

    @supports(None, adapted.reasons(unsupported.merge_states), _unavailable)
    def merge_states(self, call: calls.MergeStates) -> tuple[jax.Array, jax.Array]:
        from jaxkv_kernels.triton.attention import merge_states as kernels

        return adapted.run(kernels.merge_states, call)

    @supports(None, adapted.reasons(unsupported.copy_blocks), _unavailable)
    def copy_blocks(self, call: calls.CopyBlocks) -> jax.Array:
        from jaxkv_kernels.triton.blocks import copy_blocks as kernels

        return adapted.run(kernels.copy_blocks, call)

    @supports(None, adapted.reasons(unsupported.read_blocks), _unavailable)
    def read_blocks(self, call: calls.ReadBlocks) -> jax.Array:
        from jaxkv_kernels.triton.blocks import read_blocks as kernels

        return adapted.run(kernels.read_blocks, call)

    @supports(None, adapted.reasons(unsupported.write_blocks), _unavailable)
    def write_blocks(self, call: calls.WriteBlocks) -> jax.Array:
        from jaxkv_kernels.triton.blocks import write_blocks as kernels

        return adapted.run(kernels.write_blocks, call)

    @supports(None, adapted.reasons(unsupported.fetch_rows), _unavailable)
    def fetch_rows(self, call: calls.FetchRows) -> tuple[jax.Array, jax.Array, jax.Array]:
        from jaxkv_kernels.triton.hot_rows import fetch_rows as kernels

        return adapted.run(kernels.fetch_rows, call)

    @supports(None, None, _unavailable)
    def store_rows(self, call: calls.StoreRows) -> jax.Array:
        from jaxkv_kernels.triton.hot_rows import copy_rows as kernels

        return adapted.run(kernels.store_rows, call)
