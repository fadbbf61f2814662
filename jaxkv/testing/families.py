"""How random calls of each operation are drawn: the table `FAMILIES`, and `draw_case`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import dispatch
from jaxkv.ops import OPERATIONS as DECLARED
from jaxkv.testing.attention import DecodeKV, DecodeMLA, Logits, Merge, Plan, PrefillKV, PrefillMLA, Sparse, TopK
from jaxkv.testing.case import Case
from jaxkv.testing.entries import (
    CopyBlocks,
    DecodeDeltaRule,
    Gather,
    GatherEntries,
    Read,
    ReadBlocks,
    ReadState,
    RotatedWrite,
    Write,
    WriteBlocks,
    WriteEntries,
    WriteState,
)
from jaxkv.testing.experts import Experts, Linear, Routing

TRIES = 300
"""Draws before an operation counts as unsupported.  GPU kernels support only some sizes and layouts."""


FAMILIES: dict[str, type[Case]] = {
    "write_mla": RotatedWrite,
    "write_kv": RotatedWrite,
    "write_indexer_k": Write,
    "write_entries": WriteEntries,
    "gather_mla": Gather,
    "gather_kv": Gather,
    "gather_indexer_k": Gather,
    "gather_entries": GatherEntries,
    "read_mla": Read,
    "read_kv": Read,
    "read_indexer_k": Read,
    "plan_decode": Plan,
    "decode_mla": DecodeMLA,
    "decode_kv": DecodeKV,
    "decode_mla_sparse": Sparse,
    "prefill_mla": PrefillMLA,
    "prefill_kv": PrefillKV,
    "indexer_logits": Logits,
    "select_topk": TopK,
    "merge_states": Merge,
    "write_state": WriteState,
    "read_state": ReadState,
    "decode_delta_rule": DecodeDeltaRule,
    "copy_blocks": CopyBlocks,
    "read_blocks": ReadBlocks,
    "write_blocks": WriteBlocks,
    "select_experts": Routing,
    "grouped_swiglu": Experts,
    "scaled_linear": Linear,
}
"""The family of each declared operation."""

OPERATIONS = tuple(operation.name for operation in DECLARED)
"""Names of the operations.  Seed s draws a case of operation number s modulo their count."""


def draw_case(seed: int, implementation: str) -> Case | str:
    """A case of this seed that the implementation supports; otherwise the reasons against the last one drawn."""
    rng, operation = np.random.default_rng(seed), DECLARED[seed % len(DECLARED)]
    kernels = next(backend.kernels() for backend in dispatch.BACKENDS if backend.name == implementation)
    reasons: tuple[str, ...] = ()
    for _ in range(TRIES if kernels.support(operation.name) else 1):
        case = FAMILIES[operation.name].drawn(rng, operation)
        draw, layout = case.draw(np.random.default_rng(0)), case.layout
        cache: Any = jax.eval_shape(lambda layout=layout: jaxkv.KVCache.zeros(layout))
        values = [jax.ShapeDtypeStruct(*value) for value in case.value_shapes]
        args, keywords = case.arguments(cache, values, draw, jnp.int32(0))
        reasons = jaxkv.explain(case.function, *args, **keywords).reasons[implementation]
        if not reasons:
            return case
    return f"{operation.name}: {'; '.join(reasons)}"
