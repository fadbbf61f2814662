"""Random calls that the Mosaic GPU kernels support lower for CUDA: those that cannot must be rejected with a reason."""

import jax
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv.fuzz.case import Case
from jaxkv.fuzz.families import OPERATIONS, draw_case
from jaxkv_kernels import mosaic_gpu
from jaxkv_kernels.mosaic_gpu.experts.linear import MOST_TOKENS
from support.available import assume_available
from support.cases import slow

DRAWS = 4


@pytest.mark.parametrize("number", [0, *(slow(n) for n in range(1, DRAWS))])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name in mosaic_gpu.KERNELS])
def test_a_call_that_is_taken_lowers(operation, number, monkeypatch):
    assume_available(monkeypatch, mosaic_gpu)
    seed = OPERATIONS.index(operation) + (10 + number) * len(OPERATIONS)
    case = draw_case(seed, "mosaic_gpu")
    assert isinstance(case, Case), f"seed {seed}: {case}"
    draw = case.draw(np.random.default_rng(0))
    values = [jax.ShapeDtypeStruct(*value) for value in case.value_shapes]

    def call(buffer, values, draw):
        return case.run(jaxkv.KVCache(buffer, case.layout), values, draw, draw.layer, "mosaic_gpu")

    buffer = jax.ShapeDtypeStruct((case.layout.size,), case.layout.dtype)
    traced = jax.jit(call).trace(buffer, values, draw)
    by_xla = operation == "scaled_linear" and case.count > MOST_TOKENS
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) != by_xla, f"seed {seed}: {case}"
