"""Kernels of a single token: interpreted on any machine, which replaces what lanes do; on a Hopper GPU, as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv.models.layers.feed_forward import dense
from jaxkv_kernels.mosaic_gpu.grouped_swiglu_one_token import MOST_PARTS, inner_parts
from support import oracle
from support.arrays import as_float64
from support.available import assume_available
from support.compare import assert_close, assert_same_bits
from support.hopper import kernel_operands, on_hopper


def normal(seed, *shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def arguments(x, gate, up, down):
    """Those of `grouped_swiglu` for the feed-forward of a token that is not a mixture."""
    none = jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), jnp.float32)
    return (x, *none, gate[None], up[None], down[None]), {"shared": (gate, up, down)}


def swiglu_of_one(*arrays, **limit):
    args, options = arguments(*arrays)
    return jaxkv.grouped_swiglu(*args, **options, **limit, implementation="mosaic_gpu")


def check_dense(width, inner, dtype, **limit):
    """The result is that of float64."""
    x = normal(0, 1, width, dtype=dtype)
    gate, up = (normal(seed, inner, width, dtype=dtype) * width**-0.5 for seed in (1, 2))
    down = normal(3, width, inner, dtype=dtype) * inner**-0.5
    found = jax.jit(lambda *args: swiglu_of_one(*args, **limit))(x, gate, up, down)
    assert found.dtype == dtype
    one = np.zeros((1, 1), np.int32), np.ones((1, 1))
    expected = oracle.experts(as_float64(x), *one, *(as_float64(matrix)[None] for matrix in (gate, up, down)), **limit)
    assert_close(found, expected, roundings=4, magnitude=1)
    assert_same_bits(jax.jit(lambda *args: swiglu_of_one(*args, **limit))(x, gate, up, down), found)


@on_hopper
class TestOneToken:
    """The kernels, at published sizes, and at sizes of which lanes and warps have unequal parts."""

    @pytest.mark.parametrize(
        ("width", "inner", "dtype", "limit"),
        [
            (2048, 10944, "bfloat16", {}),
            (4096, 2048, "float16", {}),
            (2880, 8 * 5, "bfloat16", {"limit": 0.5}),
        ],
    )
    def test_dense(self, width, inner, dtype, limit):
        check_dense(width, inner, dtype, **limit)


@pytest.mark.usefixtures("interpreted")
class TestInterpreted:
    """Which operands a kernel has; what lanes do is not interpreted."""

    def test_dense(self):
        check_dense(64, 4096 + 2048, "bfloat16", limit=0.5)


def test_published_sizes_lower(monkeypatch):
    assume_available(monkeypatch, "mosaic_gpu")
    shape = jax.ShapeDtypeStruct
    shapes = (1, 2048), (10944, 2048), (10944, 2048), (2048, 10944)
    traced = jax.jit(swiglu_of_one).trace(*(shape(size, jnp.bfloat16) for size in shapes))
    first, second = kernel_operands(traced.lower(lowering_platforms=("cuda",)).as_text())
    # What the second kernel reads before the first one has finished are operands of both.
    assert {*second[1:]} <= {*first}


@pytest.mark.parametrize(("tokens", "dtype", "kernels"), [(1, "bfloat16", 2), (2, "bfloat16", 0), (1, "float32", 0)])
def test_the_feed_forward_of_a_model_runs_on_them(tokens, dtype, kernels, monkeypatch):
    assume_available(monkeypatch, "mosaic_gpu")
    weights = {"gate": (192, 128), "up": (192, 128), "down": (128, 192)}
    weights = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in weights.items()}
    x = jax.ShapeDtypeStruct((tokens, 1, 128), dtype)
    text = jax.jit(dense).trace(weights, x).lower(lowering_platforms=("cuda",)).as_text()
    assert len(kernel_operands(text)) == kernels


@pytest.mark.parametrize(
    ("width", "inner", "dtype", "reason"),
    [
        (64, 64, "bfloat16", None),
        (64, 64, "float32", "`x` of float32: supports bfloat16 and float16"),
        (72, 40, "float16", None),
        (68, 64, "float16", "tokens of 68 values: supports multiples of 8"),
        (64, 1004, "float16", "an inner size of 1004 values: supports up to 16 equal parts of up to 2048"),
    ],
)
def test_unsupported(width, inner, dtype, reason, monkeypatch):
    assume_available(monkeypatch, "mosaic_gpu")
    x, gate, down = (jnp.zeros(shape, dtype) for shape in ((1, width), (inner, width), (width, inner)))
    args, options = arguments(x, gate, gate, down)
    found = jaxkv.explain(jaxkv.grouped_swiglu, *args, **options)
    assert found.reasons["mosaic_gpu"] == (() if reason is None else (reason,))
    assert (found.chosen == "mosaic_gpu") == (reason is None)


@pytest.mark.parametrize(("inner", "parts"), [(10944, 6), (2048, 1), (18432, 9), (2056, 257), (1004, 0), (40000, 20)])
def test_parts_of_an_inner_size(inner, parts):
    assert inner_parts(inner) == (parts if parts <= MOST_PARTS else 0)
