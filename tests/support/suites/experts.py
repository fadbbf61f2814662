"""Tokens through the experts that they chose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.tile_scaled import TileScaled, rounded_to_e4m3
from support import oracle
from support.arrays import as_float64, on_device
from support.cases import further
from support.compare import assert_close, assert_same_bits
from support.suites.base import Suite


def arguments(tokens, *, dtype="bfloat16", count=8, chosen=2, width=128, inner=192, seed=0):
    """Arguments of `grouped_swiglu`, for which each token chooses different experts."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return on_device(scale * rng.standard_normal(shape, np.float32), dtype)

    gate, up = (normal(count, inner, width, scale=width**-0.5) for _ in range(2))
    experts = np.argsort(rng.random((tokens, count)), axis=1)[:, :chosen]
    shares = on_device(rng.random((tokens, chosen)), jnp.float32)
    down = normal(count, width, inner, scale=inner**-0.5)
    return [normal(tokens, width), on_device(experts, jnp.int32), shares, gate, up, down]


def scaled(arguments, *, e4m3_products=False):
    """The arguments with weights in float8."""
    *rest, gate, up, down = arguments
    weights = (TileScaled.of(weight) for weight in (gate, up, down))
    return [*rest, *(dataclasses.replace(weight, e4m3_products=e4m3_products) for weight in weights)]


def in_float64(array):
    """The values of an array or of a weight in float8."""
    return as_float64(array.dequantised(jnp.float32) if isinstance(array, TileScaled) else array)


class ExpertChecks(Suite):
    """How a result is checked."""

    def check(self, arguments, **limit):
        """The result is that of float64, and a second one has the same bits."""
        found = self.run(jaxkv.grouped_swiglu, *arguments, **limit)
        assert found.dtype == arguments[0].dtype
        expected = oracle.experts(*map(in_float64, arguments), **limit)
        assert_close(found, expected, roundings=64 if found.dtype == "float32" else 4, magnitude=1)
        assert_same_bits(self.run(jaxkv.grouped_swiglu, *arguments, **limit), found)
        return found

    def check_shared(self, arguments, inner, **limit):
        """The same with an expert of `inner` values through which all tokens pass."""
        rng, (x, experts, shares, *matrices) = np.random.default_rng(1), arguments
        width = x.shape[1]
        shapes = (inner, width), (inner, width), (width, inner)
        shared = tuple(on_device(rng.standard_normal(shape) * shape[1] ** -0.5, x.dtype) for shape in shapes)
        found = self.run(jaxkv.grouped_swiglu, *arguments, shared=shared, **limit)
        assert found.dtype == x.dtype
        one = np.zeros((len(x), 1), np.int32), np.ones((len(x), 1))
        alone = oracle.experts(in_float64(x), *one, *(in_float64(matrix)[None] for matrix in shared), **limit)
        tolerance = {"roundings": 64 if found.dtype == "float32" else 4, "magnitude": 1}
        assert_close(found, oracle.experts(*map(in_float64, arguments), **limit) + alone, **tolerance)
        # Ids that do not exist are not those of the shared expert.
        missing = jnp.full_like(experts, len(matrices[0]))
        found = self.run(jaxkv.grouped_swiglu, x, missing, shares, *matrices, shared=shared, **limit)
        assert_close(found, alone, **tolerance)
        none = experts[:, :0], shares[:, :0]
        found = self.run(jaxkv.grouped_swiglu, x, *none, *matrices, shared=shared, **limit)
        assert_close(found, alone, **tolerance)

    def check_biases(self, arguments):
        """The same with biases, the limit and the activation of GPT-OSS; choices of missing experts are skipped."""
        rng, (x, experts, shares, *matrices) = np.random.default_rng(2), arguments
        biases = tuple(on_device(rng.standard_normal(matrix.shape[:2]), x.dtype) for matrix in matrices)
        kind = {"limit": 1.5, "alpha": 1.7}
        arguments = x, experts.at[0, -1].set(-1), shares, *matrices
        found = self.run(jaxkv.grouped_swiglu, *arguments, biases=biases, **kind)
        expected = oracle.experts(*map(in_float64, arguments), biases=[*map(in_float64, biases)], **kind)
        assert_close(found, expected, roundings=64 if x.dtype == "float32" else 4, magnitude=4)


class Experts(ExpertChecks):
    """`grouped_swiglu`."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("tokens", [1, 7, 64, 333])
    def test_sums_are_those_of_float64(self, tokens, dtype):
        self.check(arguments(tokens, dtype=dtype))

    @pytest.mark.parametrize("dtype", ["bfloat16", further("float16"), "float32"])
    @pytest.mark.parametrize(
        ("tokens", "width", "inner"), [(1, 128, 128), (7, 256, 384), further(333, 384, 256), (9, 200, 72)]
    )
    def test_weights_in_float8(self, tokens, width, inner, dtype):
        self.check(scaled(arguments(tokens, width=width, inner=inner, dtype=dtype)))

    def test_products_of_e4m3_numbers(self):
        x, *rest = scaled(arguments(40, width=256, dtype="float32"), e4m3_products=True)
        found = self.run(jaxkv.grouped_swiglu, x, *rest)

        def rounded(values):
            return in_float64(rounded_to_e4m3(jnp.asarray(values, jnp.float32)))

        expected = oracle.experts(rounded(x), *map(in_float64, rest), rounded=rounded)
        assert_close(found, expected, roundings=64, magnitude=1)

    @pytest.mark.parametrize(("count", "chosen"), [(1, 1), (3, 3), (200, 6)])
    def test_numbers_of_experts(self, count, chosen):
        self.check(arguments(20, count=count, chosen=chosen, inner=64))

    def test_sizes_that_tiles_do_not_divide(self):
        self.check(arguments(65, width=320, inner=64))

    def test_sizes_that_no_tile_divides(self):
        self.check(arguments(9, width=20, inner=12))

    @pytest.mark.parametrize("expert", [0, 5])
    def test_all_tokens_may_choose_one_expert(self, expert):
        x, experts, *rest = arguments(150, chosen=1)
        self.check([x, jnp.full_like(experts, expert), *rest])

    def test_an_expert_may_be_chosen_twice(self):
        x, experts, *rest = arguments(9)
        self.check([x, jnp.zeros_like(experts), *rest])

    def test_no_tokens_give_no_results(self):
        assert self.run(jaxkv.grouped_swiglu, *arguments(0)).shape == (0, 128)

    @pytest.mark.parametrize("missing", [-1, 8, -(2**31), 2**31 - 1])
    def test_experts_that_do_not_exist_are_skipped(self, missing):
        x, experts, *rest = arguments(40)
        found = self.check([x, experts.at[3:9].set(missing).at[11:20, 0].set(missing), *rest])
        assert (found[3:9] == 0).all()

    def test_padding_alone_gives_zeros(self):
        x, experts, *rest = arguments(5)
        assert (self.run(jaxkv.grouped_swiglu, x, jnp.full_like(experts, -1), *rest) == 0).all()

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_token_depends_on_its_own_experts_only(self, value):
        x, experts, shares, *matrices = arguments(30, count=4)
        experts = jnp.where(experts == 2, 3, experts).at[:3, 0].set(2)
        right = self.run(jaxkv.grouped_swiglu, x, experts, shares, *matrices)
        for place in range(3):
            bad = list(matrices)
            bad[place] = bad[place].at[2].set(value)
            found = self.run(jaxkv.grouped_swiglu, x, experts, shares, *bad)
            assert_same_bits(found[3:], right[3:])
            assert jnp.isnan(found[:3].astype(jnp.float32)).any()

    def test_a_token_does_not_depend_on_others(self):
        x, *rest = arguments(30)
        right = self.run(jaxkv.grouped_swiglu, x, *rest)
        found = self.run(jaxkv.grouped_swiglu, x.at[4].set(jnp.nan).at[5].set(jnp.inf), *rest)
        assert_same_bits(jnp.delete(found, on_device([4, 5]), axis=0), jnp.delete(right, on_device([4, 5]), axis=0))

    def test_shares_of_padding_do_not_count(self):
        x, experts, shares, *matrices = arguments(6)
        found = self.run(
            jaxkv.grouped_swiglu, x, experts.at[2].set(-1), shares.at[2].set(jnp.nan), *matrices
        )  # fmt: skip
        assert (found[2] == 0).all()

    @pytest.mark.parametrize("tokens", [1, 9, 80])
    @pytest.mark.parametrize("inner", [192, 384, 64])
    def test_the_shared_expert_is_added(self, tokens, inner):
        """Its inner size is that of the experts, a multiple, or another one."""
        self.check_shared(arguments(tokens), inner)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_inner_values_may_be_limited(self, dtype):
        """So low a limit changes the results."""
        args = arguments(9, dtype=dtype)
        found = self.check(args, limit=0.5)
        free = oracle.experts(*map(in_float64, args))
        assert np.abs(np.asarray(found, np.float64) - free).max() > 0.1 * np.abs(free).max()
        self.check_shared(args, 64, limit=0.5)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("tokens", [1, 40])
    def test_the_activation_of_gpt_oss_and_biases(self, tokens, dtype):
        self.check_biases(arguments(tokens, dtype=dtype))

    def test_it_can_be_compiled_with_traced_experts(self):
        args = arguments(12)
        found = jax.jit(lambda *a: self.run(jaxkv.grouped_swiglu, *a))(*args)
        assert_close(found, np.asarray(self.run(jaxkv.grouped_swiglu, *args).astype(jnp.float32), np.float64))
