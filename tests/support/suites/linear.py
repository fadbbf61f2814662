"""Tokens times a weight in float8."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.tile_scaled import TileScaled, rounded_to_e4m3
from support.arrays import on_device
from support.compare import assert_close, assert_same_bits
from support.suites.base import Suite
from support.suites.experts import in_float64


def operands(tokens, width=256, results=192, dtype="bfloat16"):
    """Arguments of `scaled_linear`, whose result is about 1."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((results, width), np.float32) * width**-0.5
    return on_device(rng.standard_normal((tokens, width), np.float32), dtype), TileScaled.of(jnp.asarray(weight))


class Linear(Suite):
    """`scaled_linear`."""

    def check(self, x, weight):
        """The result is that of float64, and a second one has the same bits."""
        found = self.run(jaxkv.scaled_linear, x, weight)
        assert found.dtype == x.dtype
        roundings = 64 if found.dtype == "float32" else 4
        assert_close(found, in_float64(x) @ in_float64(weight).T, roundings=roundings, magnitude=1)
        assert_same_bits(self.run(jaxkv.scaled_linear, x, weight), found)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("tokens", [1, 70, 300])
    def test_products_are_those_of_float64(self, tokens, dtype):
        self.check(*operands(tokens, dtype=dtype))

    @pytest.mark.parametrize(("width", "results"), [(128, 64), (1536, 320), (200, 72)])
    def test_sizes(self, width, results):
        self.check(*operands(9, width, results))

    @pytest.mark.parametrize("e4m3_products", [False, True])
    def test_no_tokens(self, e4m3_products):
        x, weight = operands(0)
        weight = dataclasses.replace(weight, e4m3_products=e4m3_products)
        assert self.run(jaxkv.scaled_linear, x, weight).shape == (0, 192)

    def test_a_token_does_not_depend_on_others(self):
        x, weight = operands(30)
        right = self.run(jaxkv.scaled_linear, x, weight)
        found = self.run(jaxkv.scaled_linear, x.at[4].set(jnp.nan), weight)
        assert_same_bits(jnp.delete(found, 4, axis=0), jnp.delete(right, 4, axis=0))

    def test_tokens_rounded_to_e4m3(self):
        x, weight = operands(5, dtype="float32")
        found = self.run(jaxkv.scaled_linear, x, dataclasses.replace(weight, e4m3_products=True))
        assert_close(found, in_float64(rounded_to_e4m3(x)) @ in_float64(weight).T, roundings=64, magnitude=1)

    def test_values_are_rounded_in_the_same_program(self):
        """XLA may leave out a conversion to float8 and back, but weights have the values of float8 all the same."""
        matrix = on_device(np.random.default_rng(0).standard_normal((128, 128), np.float32))

        def product(x, matrix):
            return jaxkv.scaled_linear(x, TileScaled.of(matrix), implementation="xla")

        tiles = np.asarray(matrix) / np.float32(np.abs(matrix).max() / np.float32(448))
        scale = TileScaled.of(matrix).scales[0, 0]
        rounded = tiles.astype(jnp.float8_e4m3fn).astype(np.float32) * np.asarray(scale)
        found = jax.jit(product)(jnp.eye(128), matrix)
        assert_close(found, rounded.T, roundings=4, magnitude=1)
