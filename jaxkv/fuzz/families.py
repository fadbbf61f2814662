"""How random calls of each operation are drawn: the table `FAMILIES`, and operations on partial results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import dispatch
from jaxkv.fuzz.attention import DecodeKV, DecodeMLA, Logits, Plan, Sparse
from jaxkv.fuzz.case import Case, Index, Shapes
from jaxkv.fuzz.layouts import pick
from jaxkv.fuzz.moves import (
    CopyBlocks,
    Gather,
    GatherEntries,
    ReadBlocks,
    ReadState,
    Write,
    WriteBlocks,
    WriteMLA,
    WriteState,
)
from jaxkv.fuzz.products import Experts, Linear, Routing
from jaxkv.ops import OPERATIONS as DECLARED

TRIES = 300
"""Draws before an operation counts as unsupported.  GPU kernels support only some sizes and layouts."""


class TopK(Case):
    """Selects the largest logits, many of which are equal."""

    @classmethod
    def sizes(cls, rng, layout, fields):
        """k, the number of positions to select."""
        return {"options": {"k": pick(rng, 1, 7, 64, 512)}}

    def index(self, rng, live) -> Index:
        """Logits, and -inf past the end of each row."""
        shape = self.requests, self.q_len, self.columns * self.layout.block_size
        logits = np.round(rng.standard_normal(shape, np.float32), int(rng.integers(1, 7)))
        return (), {"logits": np.where(np.arange(shape[-1]) < rng.integers(shape[-1] + 1), logits, -np.inf)}

    def arguments(self, cache, values, draw, layer):
        """Logits and k."""
        return (), {**dict(self.options), **draw.keywords}


class Merge(Case):
    """Merges partial results, some of them empty."""

    result = "attention"

    @classmethod
    def sizes(cls, rng, layout, fields):
        """The number of partial results, and heads."""
        return {"count": pick(rng, 1, 2, 3, 9), "heads": pick(rng, 1, 3, 16)}

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the partial results."""
        shape = self.count, self.requests, self.q_len, self.heads, self.layout.entry.sizes[0]
        return [(shape, self.dtype)]

    def index(self, rng, live) -> Index:
        """The log-sum-exps of the partial results."""
        shape = self.count, self.requests, self.q_len, self.heads
        lses = rng.standard_normal(shape, np.float32)
        empty = rng.random(shape) < pick(rng, 0, 0.1, 0.5)
        return (), {"lses": np.where(empty, rng.choice([-np.inf, np.inf, np.nan], shape), lses).astype(np.float32)}

    def arguments(self, cache, values, draw, layer):
        """Results and log-sum-exps."""
        return tuple(values), dict(draw.keywords)


FAMILIES: dict[str, type[Case]] = {
    "write_mla": WriteMLA,
    "write_kv": Write,
    "write_indexer_k": Write,
    "gather_mla": Gather,
    "gather_kv": Gather,
    "gather_indexer_k": Gather,
    "gather_entries": GatherEntries,
    "plan_decode": Plan,
    "decode_mla": DecodeMLA,
    "decode_kv": DecodeKV,
    "decode_mla_sparse": Sparse,
    "indexer_logits": Logits,
    "select_topk": TopK,
    "merge_states": Merge,
    "write_state": WriteState,
    "read_state": ReadState,
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
