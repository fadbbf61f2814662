"""Kernels in Triton, called through jax-triton: NVIDIA GPUs from Ampere (sm_80) on.

Importing this costs nothing: Triton and jax-triton come in with the first kernel that is traced.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxkv_kernels.formats.entries import unlisted
from jaxkv_kernels.kernel import operations
from jaxkv_kernels.triton import limits
from jaxkv_kernels.triton.available import unavailable as unavailable
from jaxkv_kernels.triton.interpreting import interpreting as interpreting

OPERATIONS = operations(
    __name__,
    (
        "write_mla",
        "write_kv",
        "write_indexer_k",
        "plan_decode",
        "decode_mla",
        "decode_kv",
        "decode_mla_sparse",
        "gather_mla",
        "gather_kv",
        "gather_indexer_k",
        "copy_blocks",
        "read_blocks",
        "write_blocks",
        "merge_states",
        "indexer_logits",
        "select_topk",
    ),
)


def refuses(operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Reasons against this call on any machine; none means that it is taken."""
    reasons: Callable[..., Iterable[str]] = getattr(limits, operation)
    return unlisted(limits.ENTRIES.get(operation, {}), options) or list(reasons(arrays, options))
