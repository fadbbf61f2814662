"""Random calls that the Mosaic GPU kernels support lower for CUDA: those that cannot must be rejected with a reason."""

import jax
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv.testing.case import Case
from jaxkv.testing.families import OPERATIONS, draw_case
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.scaled_linear import MOST_TOKENS
from support import scenes
from support.available import assume_available
from support.cases import slow

DRAWS = 4


@pytest.mark.ci  # each kernel's own tests lower it
@pytest.mark.parametrize("number", [0, *(slow(n) for n in range(1, DRAWS))])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if MosaicGPU.support(name)])
def test_a_call_that_is_taken_lowers(operation, number, monkeypatch):
    assume_available(monkeypatch, "mosaic_gpu")
    seed = OPERATIONS.index(operation) + (10 + number) * len(OPERATIONS)
    case = draw_case(seed, "mosaic_gpu")
    assert isinstance(case, Case), f"seed {seed}: {case}"
    draw = case.draw(np.random.default_rng(0))
    values = [jax.ShapeDtypeStruct(*value) for value in case.value_shapes]

    def call(cache, values, draw):
        return case.run(cache, values, draw, draw.layer, "mosaic_gpu")

    traced = jax.jit(call).trace(scenes.shapes_of(case.layout), values, draw)
    by_xla = operation == "scaled_linear" and case.count > MOST_TOKENS
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) != by_xla, f"seed {seed}: {case}"


@pytest.mark.parametrize(
    "entry",
    [jaxkv.MLAEntry("bf16"), jaxkv.MLAEntry("f32", latent=384, rope=64), jaxkv.KVEntry("bf16", 640, 64)],
    ids=str,
)
def test_entries_of_any_size_are_gathered(entry, monkeypatch):
    """The zeros of rows without a token are stored by all lanes, so that their size is not that of an entry."""
    assume_available(monkeypatch, "mosaic_gpu")
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=4, block_size=16, num_heads=1, entry=entry)
    buffer = jax.ShapeDtypeStruct((layout.size,), layout.dtype)
    tables, sums = jax.ShapeDtypeStruct((2, 2), np.int32), jax.ShapeDtypeStruct((3,), np.int32)
    own = jaxkv.gather_mla if isinstance(entry, jaxkv.MLAEntry) else jaxkv.gather_kv

    def gathered(buffer, tables, sums):
        cache, options = jaxkv.KVCache(buffer, layout), {"layer": 1, "total": 9, "implementation": "mosaic_gpu"}
        values = own(cache, tables, sums, dtype=entry.dtype, **options)
        return values, jaxkv.gather_entries(cache, tables, sums, **options)

    text = jax.jit(gathered).trace(buffer, tables, sums).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
