"""Gradients of attention by Mosaic GPU kernels: interpreted, and of each operation on a Hopper GPU (`-m gpu`)."""

import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

from support import suites
from support.cases import further
from support.hopper import on_hopper

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN is what stands in the way


class Mosaic:
    """What every suite of these kernels says of itself."""

    implementation = "mosaic_gpu"
    exact = "bf16"
    roundings = 8


@on_hopper
class TestGradients(Mosaic, suites.GradientChecks):
    """Each operation, in sizes of models."""

    def test_decode_kv(self):
        self.check_kv((0, 64, 130), 2, sizes=(128, 64), logit_cap=2.0)

    def test_prefill_kv(self):
        self.check_kv((3, 130), 70, sizes=(128, 128), prefill=True)

    def test_decode_mla(self):
        self.check_mla((0, 64, 130), 2, sizes=(512, 64))

    def test_decode_mla_sparse(self):
        self.check_sparse((1, 1), 2, 130, sizes=(512, 64))


@pytest.mark.usefixtures("interpreted")
class TestInterpreted(Mosaic, suites.GradientChecks):
    """Kernels that attend, with a backward pass in plain JAX."""

    def test_decode_kv(self):
        self.check_kv((1, 70), 1, sizes=(128, 64))

    @pytest.mark.parametrize("lengths", [further((1, 70))])
    def test_decode_mla(self, lengths):
        self.check_mla(lengths, 1, sizes=(512, 64))
