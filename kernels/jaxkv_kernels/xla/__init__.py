"""Every operation in plain JAX, correct on every device and every layout.

Entries are encoded and decoded by their formats, so every registered format is supported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxkv_kernels.formats import FORMATS
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, Listed, MLAEntry, unlisted
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.kernel import Kernel, nothing
from jaxkv_kernels.xla.attention import decode_kv, decode_mla
from jaxkv_kernels.xla.blocks import copy_blocks, read_blocks, write_blocks
from jaxkv_kernels.xla.entries import (
    gather_entries,
    gather_indexer_k,
    gather_kv,
    gather_mla,
    read_state,
    write_indexer_k,
    write_kv,
    write_mla,
    write_state,
)
from jaxkv_kernels.xla.experts import grouped_swiglu, scaled_linear, select_experts
from jaxkv_kernels.xla.hot_rows import fetch_rows, store_rows
from jaxkv_kernels.xla.indexer import indexer_logits, select_topk
from jaxkv_kernels.xla.merge import merge_states
from jaxkv_kernels.xla.plan import plan_decode
from jaxkv_kernels.xla.sparse import decode_mla_sparse


def _batch_invariant(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Yields a reason against a call that must be batch-invariant."""
    del arrays
    if options["batch_invariant"]:
        yield "cannot be batch-invariant: the last bits of a result depend on the shape of the batch"


def _extra(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reasons against a call of `decode_mla_sparse`, with or without a second cache."""
    if arrays["extra"] is not None:
        yield from unlisted(_MLA, {"entry": arrays["extra"].entry})
    yield from _batch_invariant(arrays, options)


def _kernel(
    run: Callable[..., Any], entries: Listed, unsupported_reasons: Callable[..., Iterable[str]] = nothing
) -> Kernel:
    """A kernel that runs on every machine."""
    return Kernel(run, entries, unsupported_reasons, unavailable_reasons=lambda: ())


_MLA: Listed = {MLAEntry: FORMATS}
_KV: Listed = {KVEntry: FORMATS}
_INDEXER: Listed = {IndexerEntry: FORMATS}
_STATE: Listed = {StateEntry: StateEntry.formats}

KERNELS: dict[str, Kernel] = {
    "write_mla": _kernel(write_mla, _MLA),
    "write_kv": _kernel(write_kv, _KV),
    "write_indexer_k": _kernel(write_indexer_k, _INDEXER),
    "gather_mla": _kernel(gather_mla, _MLA),
    "gather_kv": _kernel(gather_kv, _KV),
    "gather_indexer_k": _kernel(gather_indexer_k, _INDEXER),
    "gather_entries": _kernel(gather_entries, {**_MLA, **_KV, **_INDEXER}),
    "plan_decode": _kernel(plan_decode, {**_MLA, **_KV}, _batch_invariant),
    "decode_mla": _kernel(decode_mla, _MLA),
    "decode_kv": _kernel(decode_kv, _KV),
    "decode_mla_sparse": _kernel(decode_mla_sparse, _MLA, _extra),
    "indexer_logits": _kernel(indexer_logits, _INDEXER),
    "select_topk": _kernel(select_topk, {}),
    "merge_states": _kernel(merge_states, {}),
    "write_state": _kernel(write_state, _STATE),
    "read_state": _kernel(read_state, _STATE),
    "copy_blocks": _kernel(copy_blocks, {}),
    "read_blocks": _kernel(read_blocks, {}),
    "write_blocks": _kernel(write_blocks, {}),
    "select_experts": _kernel(select_experts, {}),
    "grouped_swiglu": _kernel(grouped_swiglu, {}),
    "scaled_linear": _kernel(scaled_linear, {}),
}

HOT_ROWS: dict[str, Kernel] = {
    "fetch_rows": _kernel(fetch_rows, {}),
    "store_rows": _kernel(store_rows, {}),
}
"""The kernels of `jaxkv.offload.HotRows`."""
