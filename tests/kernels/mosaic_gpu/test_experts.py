"""Mosaic GPU's kernels of experts: interpreted on any machine; the suite on a Hopper GPU."""

import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels.mosaic_gpu.chosen_experts import list_chosen
from jaxkv_kernels.mosaic_gpu.expert_products import ExpertsConfig, default_config, default_config_of_fp8
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.runtime.device import REDUX, interpreting
from jaxkv_kernels.mosaic_gpu.scaled_linear import parts_of
from jaxkv_kernels.tile_scaled import TileScaled
from jaxkv_kernels.tuning import using
from support import kernels, suites
from support.available import assume_available
from support.cases import further, slow
from support.hopper import kernel_operands, on_gpus, on_hopper, read_early
from support.suites.experts import arguments, scaled
from support.suites.linear import operands
from support.suites.routing import V2, V3


class Mosaic:
    """What every suite of these kernels says of itself."""

    implementation = "mosaic_gpu"
    gaps = ("`x` of float32", "tokens of 20", "`scoring` 'sqrtsoftplus'")


@on_hopper
class TestExperts(Mosaic, suites.Experts):
    """The whole suite, on the GPU."""

    @pytest.mark.parametrize(("tokens", "inner"), [(1, 1408), (100, 704), (2000, 1408)])
    def test_sizes_of_a_published_model(self, tokens, inner):
        self.check(arguments(tokens, count=16, chosen=6, width=2048, inner=inner))

    @pytest.mark.parametrize("tokens", [1, 100, 2000])
    def test_weights_in_float8_of_a_published_size(self, tokens):
        self.check(scaled(arguments(tokens, count=16, chosen=6, width=2048, inner=1408)))


@on_gpus(REDUX)
class TestRouting(Mosaic, suites.Routing):
    """The whole suite, on the GPU."""

    gaps = (*Mosaic.gaps, "groups of 16 experts", "groups of 8 experts")


class Listing(Mosaic):
    """Which experts are listed."""

    @pytest.mark.parametrize(
        ("tokens", "chosen", "count", "more"), [(1, 6, 64, 2), (32, 6, 64, 0), (5, 2, 3, 1), (64, 12, 990, 34)]
    )
    def test_those_that_are_chosen(self, tokens, chosen, count, more):
        ids = np.random.default_rng(0).integers(-2, count + 3, (tokens, chosen)).astype(np.int32)
        options = {"count": count, "more": more, "size": 3}
        found, starts, sizes, (listed,) = map(np.asarray, list_chosen(jnp.asarray(ids), **options))
        right = sorted({*ids[(ids >= 0) & (ids < count)].tolist(), *range(count, count + more)})
        assert len(found) == min(count, ids.size) + more
        assert found[:listed].tolist() == right
        assert (starts[:listed] == 3 * np.asarray(right)).all()
        assert (sizes[:listed] == 3).all()


@on_hopper
class TestListing(Listing):
    """On the GPU."""


@pytest.mark.usefixtures("interpreted")
class TestInterpretedListing(Listing):
    """The shapes; what lanes do is not interpreted."""


@pytest.mark.usefixtures("interpreted")
class TestInterpretedRouting(Mosaic, suites.RoutingChecks):
    """Which token a warp has; what its lanes do is not interpreted."""

    @pytest.mark.parametrize("tokens", [1, 6])
    def test_experts_of_v3(self, tokens):
        self.drawn(tokens, 256, bias=True, **V3)


@on_hopper
class TestLinear(Mosaic, suites.Linear):
    """The whole suite, on the GPU."""

    gaps = (*Mosaic.gaps, "tokens of 200")

    @pytest.mark.parametrize(("tokens", "width", "results"), [(1, 16384, 7168), (32, 7168, 576), (256, 1536, 24576)])
    def test_published_sizes(self, tokens, width, results):
        self.check(*operands(tokens, width, results))


@pytest.mark.usefixtures("interpreted")
class TestInterpretedLinear(Mosaic, suites.Linear):
    """One and several tiles of rows and parts of the summed dimension."""

    gaps = (*Mosaic.gaps, "tokens of 200")
    test_products_are_those_of_float64 = None
    test_sizes = None

    @pytest.mark.parametrize(("tokens", "width", "results"), [(5, 256, 192), slow(70, 384, 64)])
    def test_parts(self, tokens, width, results):
        self.check(*operands(tokens, width, results))


@pytest.mark.usefixtures("interpreted")
class TestInterpreted(Mosaic, suites.ExpertChecks):
    """One and two consumers, groups that fill a tile, several tiles, or a part, and fewer stages than steps."""

    @pytest.mark.parametrize(
        ("tokens", "config", "sizes", "limit"),
        [
            (1, ExpertsConfig(rows=8, consumers=1, stages=2), {}, {}),
            (
                21,
                ExpertsConfig(rows=16, consumers=2, stages=3),
                {"count": 3, "width": 192, "inner": 64},
                {"limit": 0.5},
            ),
            slow(40, ExpertsConfig(rows=24, consumers=1, stages=2), {"count": 2, "dtype": "float16"}, {}),
            slow(40, ExpertsConfig(rows=8, consumers=2), {"count": 5, "width": 320}, {}),
        ],
    )
    def test_sums_are_those_of_float64(self, tokens, config, sizes, limit):
        with using(config):
            self.check(arguments(tokens, **sizes), **limit)

    @pytest.mark.parametrize(
        ("tokens", "config", "sizes"),
        [
            (5, ExpertsConfig(rows=8, consumers=1, stages=2), {"count": 2, "width": 256, "inner": 384}),
            slow(21, ExpertsConfig(rows=16, consumers=2, stages=3), {"count": 3, "inner": 256, "dtype": "float16"}),
        ],
    )
    def test_weights_in_float8(self, tokens, config, sizes):
        with using(config):
            self.check(scaled(arguments(tokens, **{"width": 128, **sizes})))

    @pytest.mark.slow  # the rounding is XLA's
    def test_products_of_e4m3_numbers(self):
        """Those of XLA, but for values that another rounding before moves to the next e4m3 number."""
        x, *rest = scaled(arguments(9, width=256, inner=128), e4m3_products=True)
        found = self.run(jaxkv.grouped_swiglu, x, *rest).astype(jnp.float32)
        right = jaxkv.grouped_swiglu(x, *rest, implementation="xla").astype(jnp.float32)
        kept = [dataclasses.replace(weight, e4m3_products=False) for weight in rest[2:]]
        accurate = jaxkv.grouped_swiglu(x, *rest[:2], *kept, implementation="xla")
        moved, rounded = (np.linalg.norm(other.astype(jnp.float32) - right) for other in (found, accurate))
        assert moved < rounded / 2

    @pytest.mark.parametrize(
        ("tokens", "config"),
        [
            (9, ExpertsConfig(rows=8, consumers=2, stages=2)),  # 64 of 192 features are beyond those of a tile
            slow(40, ExpertsConfig(rows=24, consumers=1, stages=2)),
            slow(3, None),
        ],
    )
    def test_the_activation_of_gpt_oss_and_biases(self, tokens, config):
        with using(config) if config else nullcontext():
            self.check_biases(arguments(tokens, count=3))

    def test_experts_that_do_not_exist_are_skipped(self):
        x, experts, *rest = arguments(9, inner=64)
        found = self.check([x, experts.at[2:4].set(-1).at[5, 0].set(8), *rest])
        assert (found[2:4] == 0).all()

    @pytest.mark.parametrize(("tokens", "inner"), [(1, 128), (9, 64), slow(9, 192), slow(40, 128)])
    def test_the_shared_expert_is_added(self, tokens, inner):
        self.check_shared(arguments(tokens, count=3, inner=64), inner)

    def test_unchosen_experts_and_other_tokens_do_not_matter(self):
        x, experts, shares, *matrices = arguments(9, count=3, inner=64)
        experts = jnp.where(experts == 1, 2, experts)
        right = self.check([x, experts, shares, *matrices])
        bad = [matrix.at[1].set(jnp.nan) for matrix in matrices]
        found = self.run(jaxkv.grouped_swiglu, x.at[3].set(jnp.nan), experts, shares, *bad)
        others = np.arange(9) != 3
        assert (found[others] == right[others]).all()


def shapes(tokens, chosen, count, width, inner, dtype=jnp.bfloat16, *, fp8=False):
    shape = jax.ShapeDtypeStruct
    choices = shape((tokens, chosen), jnp.int32), shape((tokens, chosen), jnp.float32)
    matrices = (
        shape((count, inner, width), dtype),
        shape((count, inner, width), dtype),
        shape((count, width, inner), dtype),
    )
    if fp8:
        matrices = (jax.eval_shape(TileScaled.of, matrix) for matrix in matrices)
    return shape((tokens, width), dtype), *choices, *matrices


@pytest.mark.parametrize("tokens", [1, further(32), further(128), 256, slow(512), further(8192)])
@pytest.mark.parametrize("sizes", [(6, 64, 2048, 1408), slow((6, 64, 2048, 704)), slow((8, 256, 7168, 2048))])
def test_published_sizes_lower(tokens, sizes):
    check_lowering(shapes(tokens, *sizes))


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "bfloat16"), slow(128, "float16"), (8192, "bfloat16")])
@pytest.mark.parametrize("sizes", [(6, 64, 2048, 1408), slow((8, 256, 7168, 2048))])
def test_published_sizes_in_float8_lower(tokens, dtype, sizes):
    check_lowering(shapes(tokens, *sizes, jnp.dtype(dtype), fp8=True))


@pytest.mark.parametrize("tokens", [1, slow(32), slow(256), 8192])
def test_the_experts_of_gpt_oss_lower(tokens):
    """With biases of 2,880 values, of which the last tile has half as many as the others."""
    biases = tuple(jax.ShapeDtypeStruct((32, 2880), jnp.bfloat16) for _ in range(3))
    check_lowering(shapes(tokens, 4, 32, 2880, 2880), biases=biases, limit=7.0, alpha=1.702)


@pytest.mark.parametrize("tokens", [1, 32, 256, slow(8192)])
def test_published_sizes_with_a_shared_expert_lower(tokens):
    width, inner = 2048, 2 * 1408
    shared = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((inner, width), (inner, width), (width, inner)))
    check_lowering(shapes(tokens, 6, 64, width, 1408), shared=tuple(shared), joined=tokens != 256)


@pytest.mark.parametrize(("experts", "options"), [(64, V2), (256, V3)], ids=["v2", "v3"])
@pytest.mark.parametrize("biased", [False, True])
def test_choices_of_experts_lower(experts, options, biased):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(5, experts), (experts,)][: 1 + biased]]

    def call(logits, bias=None):
        return jaxkv.select_experts(logits, bias=bias, implementation="mosaic_gpu", **options)

    with pytest.MonkeyPatch.context() as patch:
        assume_available(patch, "mosaic_gpu")
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert len(kernel_operands(text)) == 1


@pytest.mark.parametrize(
    ("sizes", "parts"), [((7168, 16384), 2), ((576, 7168), 14), slow((24576, 1536), 2), slow((2048, 7168), 8)]
)
@pytest.mark.parametrize("tokens", [1, slow(256)])
def test_weights_of_dense_products_lower(tokens, sizes, parts):
    assert tokens > 1 or parts_of(sizes, 1, 1) == parts
    weight = jax.eval_shape(TileScaled.of, jax.ShapeDtypeStruct(sizes, jnp.bfloat16))
    x = jax.ShapeDtypeStruct((tokens, sizes[1]), jnp.bfloat16)
    run = kernels.called(MosaicGPU(), "scaled_linear", ("x", "weight"))
    assert kernel_operands(jax.jit(run).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text())


def check_lowering(arguments, shared=None, joined=False, biases=None, **options):
    """The call lowers, and its second kernel reads nothing early that the first one does not have."""
    names = ("x", "experts", "weights", "gate", "up", "down", "shared", "biases")
    options = {"limit": None, "alpha": None, **options}
    run = kernels.called(MosaicGPU(), "grouped_swiglu", names, **options)
    traced = jax.jit(run).trace(*arguments, shared, biases)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    *listed, gate_up, down = kernel_operands(text)
    # The second kernel reads tiles and weights early, which are older than the first one; its first operand is not.
    assert {*down[1:]} <= {*gate_up}
    assert "stablehlo.sort" not in text
    if arguments[0].shape[0] == 1 and not isinstance(arguments[3], TileScaled) and biases is None:
        assert not listed  # and the second kernel waits in PTX
        return
    *before, second = read_early(traced.jaxpr)
    assert len(before) == 1 + len(listed)
    assert not any(before)
    assert [len(shape) for shape in second] == [1, 1, *[3] * (1 + joined)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((6, 64, 2048, 1408), "float32", "`x` of float32: supports bfloat16 and float16"),
        ((6, 64, 2048, 352), "bfloat16", "inner sizes of 352 values: supports multiples of 64"),
        ((6, 64, 2000, 1408), "bfloat16", "tokens of 2000 values: supports multiples of 64"),
    ],
)
def test_explain_reports_unsupported_calls(sizes, dtype, reason):
    with interpreting(True):
        found = jaxkv.explain(jaxkv.grouped_swiglu, *shapes(5, *sizes, jnp.dtype(dtype)))
    assert found.reasons["mosaic_gpu"] == (reason,)


@pytest.mark.parametrize(
    ("experts", "options", "reason"),
    [
        (2048, V2, "2048 experts: supports up to 1024"),
        (64, {"per_token": 33}, "33 experts per token: supports up to 32"),
        (160, V3, "groups of 20 experts: supports multiples of 32"),
    ],
)
def test_explain_reports_unsupported_choices(experts, options, reason):
    with interpreting(True):
        found = jaxkv.explain(jaxkv.select_experts, jax.ShapeDtypeStruct((5, experts), jnp.float32), **options)
    assert found.reasons["mosaic_gpu"] == (reason,)


def test_explain_reports_unsupported_weights_in_float8():
    reason = "inner sizes of 704 values: supports multiples of 128 with weights in float8"
    with interpreting(True):
        found = jaxkv.explain(jaxkv.grouped_swiglu, *shapes(5, 6, 64, 2048, 704, fp8=True))
    assert found.reasons["mosaic_gpu"] == (reason,)


def test_tiles_hold_the_rows_of_most_experts():
    assert default_config(1, 6, 64).rows == 8
    assert default_config(128, 768, 64).rows == 24
    assert default_config(8192, 8192 * 6, 64) == ExpertsConfig(rows=128, consumers=2)
    assert default_config_of_fp8(1, 6, 64, 1408) == ExpertsConfig(rows=8, consumers=1)
    assert default_config_of_fp8(1, 8, 256, 2048) == ExpertsConfig(rows=8, consumers=2)
    assert default_config_of_fp8(8192, 8192 * 6, 64, 1408) == ExpertsConfig(rows=112, consumers=2)


@pytest.mark.parametrize("wrong", [{"rows": 12}, {"rows": 0}, {"rows": 400}, {"consumers": 3}, {"stages": 1}])
def test_configurations_are_validated(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` of ExpertsConfig"):
        ExpertsConfig(**{"rows": 8, "consumers": 1, **wrong})
