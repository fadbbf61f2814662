"""Kernels in Triton, by operation, launched through jax-triton: NVIDIA GPUs from Ampere (sm_80) on.

Triton and jax-triton are imported by the first kernel that is traced, not by this module.
"""

from collections.abc import Callable, Iterable

from jaxkv_kernels.kernel import Kernel, imported_when_called
from jaxkv_kernels.triton import unsupported
from jaxkv_kernels.triton.available import unavailable_reasons
from jaxkv_kernels.triton.interpreting import interpreting as interpreting


def _kernel(name: str, unsupported_reasons: Callable[..., Iterable[str]]) -> Kernel:
    """The function `name` of the module `name` here; what all kernels need of the machine is the same."""
    return Kernel(imported_when_called(f"{__name__}.{name}", name), unsupported_reasons, unavailable_reasons)


KERNELS: dict[str, Kernel] = {
    "write_mla": _kernel("write_mla", unsupported.write_mla),
    "write_kv": _kernel("write_kv", unsupported.write_kv),
    "write_indexer_k": _kernel("write_indexer_k", unsupported.write_indexer_k),
    "gather_mla": _kernel("gather_mla", unsupported.gather_mla),
    "gather_kv": _kernel("gather_kv", unsupported.gather_kv),
    "gather_indexer_k": _kernel("gather_indexer_k", unsupported.gather_indexer_k),
    "plan_decode": _kernel("plan_decode", unsupported.plan_decode),
    "decode_mla": _kernel("decode_mla", unsupported.decode_mla),
    "decode_kv": _kernel("decode_kv", unsupported.decode_kv),
    "decode_mla_sparse": _kernel("decode_mla_sparse", unsupported.decode_mla_sparse),
    "indexer_logits": _kernel("indexer_logits", unsupported.indexer_logits),
    "select_topk": _kernel("select_topk", unsupported.select_topk),
    "merge_states": _kernel("merge_states", unsupported.merge_states),
    "copy_blocks": _kernel("copy_blocks", unsupported.nothing),
    "read_blocks": _kernel("read_blocks", unsupported.nothing),
    "write_blocks": _kernel("write_blocks", unsupported.nothing),
}
"""Operations that are not listed have no kernel here."""
