"""Kernels in plain JAX, by operation: all of them, correct on every device."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxkv_kernels.addressing.row_view import row_view
from jaxkv_kernels.kernel import Kernel
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


def _supported(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterable[str]:
    """No reasons: every call without a cache is supported."""
    del arrays, options
    return ()


def _unaddressable(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against the cache's strides."""
    del arrays
    try:
        row_view(options["pages"])
    except ValueError as error:
        yield str(error)


def _unplannable(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `plan_decode` call."""
    if options["batch_invariant"]:
        yield "the last bits of a request depend on the shape of its batch: cannot be batch-invariant"
        return
    yield from _unaddressable(arrays, options)


def _kernel(run: Callable[..., Any], unsupported_reasons: Callable[..., Iterable[str]] = _unaddressable) -> Kernel:
    """A kernel that needs nothing but JAX."""
    return Kernel(run, unsupported_reasons, unavailable_reasons=lambda: ())


KERNELS: dict[str, Kernel] = {
    "write_mla": _kernel(write_mla),
    "write_kv": _kernel(write_kv),
    "write_indexer_k": _kernel(write_indexer_k),
    "gather_mla": _kernel(gather_mla),
    "gather_kv": _kernel(gather_kv),
    "gather_indexer_k": _kernel(gather_indexer_k),
    "plan_decode": _kernel(plan_decode, _unplannable),
    "decode_mla": _kernel(decode_mla),
    "decode_kv": _kernel(decode_kv),
    "decode_mla_sparse": _kernel(decode_mla_sparse),
    "indexer_logits": _kernel(indexer_logits),
    "select_topk": _kernel(select_topk, _supported),
    "merge_states": _kernel(merge_states, _supported),
    "copy_blocks": _kernel(copy_blocks),
    "read_blocks": _kernel(read_blocks),
    "write_blocks": _kernel(write_blocks),
}
