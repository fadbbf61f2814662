"""Kernels of a single token: interpreted on any machine, which replaces what lanes do; on a Hopper GPU, as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

from jaxkv_kernels.mosaic_gpu.experts import unsupported
from jaxkv_kernels.mosaic_gpu.grouped_swiglu_one_token import swiglu_of_one
from support import oracle
from support.compare import assert_close, assert_same_bits
from support.hopper import kernel_operands, on_hopper


def normal(seed, *shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def in_float64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def check_dense(width, inner, dtype, **limit):
    """The result is that of float64."""
    x = normal(0, 1, width, dtype=dtype)
    gate, up = (normal(seed, inner, width, dtype=dtype) * width**-0.5 for seed in (1, 2))
    down = normal(3, width, inner, dtype=dtype) * inner**-0.5
    found = jax.jit(lambda *args: swiglu_of_one(*args, **limit))(x, gate, up, down)
    assert found.dtype == dtype
    one = np.zeros((1, 1), np.int32), np.ones((1, 1))
    expected = oracle.experts(in_float64(x), *one, *(in_float64(matrix)[None] for matrix in (gate, up, down)), **limit)
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


def test_published_sizes_lower():
    shape = jax.ShapeDtypeStruct
    shapes = (1, 2048), (10944, 2048), (10944, 2048), (2048, 10944)
    traced = jax.jit(swiglu_of_one).trace(*(shape(size, jnp.bfloat16) for size in shapes))
    first, second = kernel_operands(traced.lower(lowering_platforms=("cuda",)).as_text())
    # What the second kernel reads before the first one has finished are operands of both.
    assert {*second[1:]} <= {*first}


@pytest.mark.parametrize(
    ("tokens", "dtypes", "reason"),
    [
        (1, ("bfloat16", "bfloat16"), None),
        (2, ("bfloat16", "bfloat16"), "2 tokens: supports 1"),
        (1, ("float32", "float32"), "weights of other dtypes than `x` of float32, or not bfloat16 or float16"),
        (1, ("bfloat16", "float16"), "weights of other dtypes than `x` of bfloat16, or not bfloat16 or float16"),
    ],
)
def test_unsupported(tokens, dtypes, reason, monkeypatch):
    monkeypatch.setattr(unsupported, "unavailable_reasons", lambda capabilities: [])
    x, weight = (jax.ShapeDtypeStruct((rows, 64), dtype) for rows, dtype in zip((tokens, 64), dtypes, strict=True))
    assert [*unsupported.swiglu_of_one(tokens, x, weight, weight, weight)] == [reason] * (reason is not None)


@pytest.mark.parametrize(("inner", "parts"), [(10944, 6), (2048, 1), (18432, 9), (2056, 257), (1004, 0), (40000, 20)])
def test_parts_of_an_inner_size(inner, parts):
    assert unsupported.inner_parts(inner) == (parts if parts <= unsupported.MOST_PARTS else 0)
