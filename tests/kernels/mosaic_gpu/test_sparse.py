"""The Mosaic GPU kernel of `decode_mla_sparse`: lowered, interpreted, the whole suite on a Hopper GPU (`-m gpu`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels.extra_slots import ExtraSlots
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from support import kernels, suites
from support.arrays import as_float64
from support.cases import each_value, further, slow
from support.compare import assert_close, assert_same_bits
from support.hopper import kernel_operands, on_hopper, read_early

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN is what stands in the way

QUERY_SCALES = (-60, 40)
"""Powers of two by which queries are scaled: float16 holds neither."""
ROUNDED = [(-9, -8), (-17, -16)]
"""Exponents of scales with a mantissa: as quantisers choose them, and too small to be multiplied into values."""


E8M0_EXPONENTS = [((-8, -5), 4), ((-12, 6), 1), ((-40, 40), 1)]
"""(exponents of tokens, magnitude of values): as encoders write them, of which float16 holds some, and none.

With the first, values have a root mean square of 4, and the kernel rounds their weights to 16 bits.  With the others,
one token has all of the weight, which is exact.
"""
FEW, MANY = 8, 17
"""Heads: `fp8` and `fp8_ds_mla` entries are read by the kernel of few rows with the first, and by the other with the
second."""
NARROW = ["fp8_v4", "nvfp4_ds_mla", "mxfp4_ds_mla"]
"""Formats with scales of one byte."""


class Mosaic:
    """What every suite of this kernel says of itself."""

    implementation = "mosaic_gpu"
    exact = "bf16"
    gaps = (
        "entries of format",  # float32 has no wgmma
        "`extra` of format",
        "offset of",  # loads are of 16 bytes, aligned to as many
        "layer stride of",
        "block stride of",
        "token stride of",
        "`logit_cap` of",  # too large for tanh by way of exp2
    )

    def entry(self, name=None):
        """Entries of a format, of the sizes that models have."""
        return jaxkv.MLAEntry.typical(name or self.exact)

    def sparse(self, form, lengths, heads, slots, *, tokens=1, layout="BLNHC", layer=1, scene=None, q=None, **keywords):
        """Checks random slots of requests of those lengths."""
        entry = self.entry(form)
        scene = scene or suites.scenes.scene(entry, lengths=lengths)
        q = q or suites.queries(entry, len(lengths), tokens, heads)
        chosen = self.choose(scene, tokens, slots, np.random.default_rng(slots))
        return self.check(q, scene.cache(suites.layout_of(layout, entry), layer), chosen, layer, scene, **keywords)

    def check_scales_that_are_not_powers_of_two(self, exponents, heads):
        """The kernel rounds such scales to float16, which scores show, and with them lse."""
        scene = self.with_scales(exponents, mantissa=1.37)
        q, rng = suites.queries(scene.entry, 2, 1, heads), np.random.default_rng(6)
        slots = self.choose(scene, 1, 130, rng)
        out, lse = self.decode(q, scene.cache(suites.layout_of("BLNHC", scene.entry), 1), slots, 1, scene)
        right_out, right_lse = self.truth(q, slots, scene)
        assert_close(out, right_out, roundings=4, magnitude=1, what="out")
        assert_close(lse, right_lse, dtype="float16", roundings=2, magnitude=4, what="lse")

    def with_scales(self, exponents, mantissa=1.0):
        """A scene of fp8_ds_mla entries with scales of either sign and a token of zeros.

        `exponents`: a token's scales are about 2 to the power of a number between these, times `mantissa`.
        """
        scene, rng = suites.scenes.scene(self.entry("fp8_ds_mla"), lengths=(190, 64)), np.random.default_rng(5)
        for request in range(2):
            for position in range(scene.lengths[request]):
                scales = 2.0 ** (rng.integers(*exponents) + rng.integers(-3, 4, 4)) * rng.choice(
                    [-mantissa, mantissa], 4
                )
                scales = (scales * (position != 7)).astype(np.float32)
                scene = scene.holding(scales.view(np.uint8), request, position, slice(512, 528))
        return scene

    def with_e8m0_scales(self, form, exponents):
        """A scene of entries with e8m0 scales whose exponents are between these, a token of zeros, and one of NaN."""
        scene, rng = suites.scenes.scene(self.entry(form), lengths=(190, 64)), np.random.default_rng(5)
        scales = next(part for part in scene.entry.fields() if part.name == "scales")
        for request in range(2):
            for position in range(scene.lengths[request]):
                found = 127 + rng.integers(*exponents) + rng.integers(-3, 4, scales.count)
                found = (found * (position != 7)).clip(0, 254).astype(np.uint8)
                scene = scene.holding(found, request, position, slice(scales.offset, scales.offset + scales.count))
        return scene

    def check_a_nan_scale(self, form, heads):
        """A NaN scale of one token makes all of the results that see it NaN."""
        part = next(part for part in self.entry(form).fields() if "scales" in part.name)
        self.check_a_nan_byte(form, heads, 0xFF if part.dtype == "e8m0" else 0x7F, part.offset + 3)

    def check_a_nan_byte(self, form, heads, byte, place):
        """A byte of one token that makes it NaN makes all of the results that see it NaN."""
        scene = suites.scenes.scene(self.entry(form), lengths=(64, 64))
        scene = scene.holding(np.uint8(byte), 0, 5, slice(place, place + 1))
        slots = np.stack([scene.slots(0), scene.slots(1)])[:, None].astype(np.int32)
        q = suites.queries(scene.entry, 2, 1, heads)
        out, lse = self.decode(q, scene.cache(suites.layout_of("BLNHC", scene.entry), 1), slots, 1, scene)
        assert np.isnan(np.asarray(lse)[0]).all()
        assert np.isnan(np.asarray(out.astype(jnp.float32))[0]).all()
        assert np.isfinite(np.asarray(lse)[1]).all()

    def check_random_bytes(self, heads):
        """Every e4m3 number, subnormal ones too, and every bf16 number of a rotary part that is not huge."""
        scene, rng = suites.scenes.scene(self.entry("fp8_v4"), lengths=(64, 64)), np.random.default_rng(5)
        for request, position in np.ndindex(2, 64):
            values = rng.permutation(np.r_[:127, 128:255, :127, 128:195].astype(np.uint8))[:448]
            rope = np.exp2(rng.uniform(-30, 2, 64)).astype(np.float32).view(np.uint32) >> 16
            scales = rng.integers(112, 118, 7)
            for part, place in (values, slice(0, 448)), (rope.astype(np.uint16).view(np.uint8), slice(448, 576)):
                scene = scene.holding(part, request, position, place)
            scene = scene.holding(scales.astype(np.uint8), request, position, slice(576, 583))
        self.sparse("fp8_v4", (64, 64), heads, 64, scene=scene)

    def check_queries(self, form, power, heads, lengths, slots):
        """Checks queries times a power of two, by which the softmax scale is divided."""
        q = [x * jnp.bfloat16(2.0**power) for x in suites.queries(self.entry(form), len(lengths), 1, heads)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("support.suites.attention.decode_mla_sparse.SCALE", 0.11 * 2.0**-power)
            self.sparse(form, lengths, heads, slots, q=q)

    def check_scale_of_all_entries(self, power, heads, lengths, slots):
        """Checks `kv_scale` times a power of two, which also multiplies results and divides the softmax scale."""
        entry = self.entry("fp8")
        scene = suites.scenes.scene(entry, lengths=lengths)
        cache, q = scene.cache(suites.layout_of("BLNHC", entry), 1), suites.queries(entry, len(lengths), 1, heads)
        chosen = self.choose(scene, 1, slots, np.random.default_rng(slots))
        ((name, kv_scale),) = scene.scale_arguments().items()
        right_out, right_lse = self.truth(q, chosen, scene)
        scaled = {name: kv_scale * 2.0**power, "scale": 0.11 * 2.0**-power}
        out, lse = self.decode(q, cache, chosen, 1, scene, **scaled)
        out = as_float64(out) * 2.0**-power
        assert_close(out, right_out, dtype="bfloat16", roundings=4, magnitude=1, what="out")
        assert_close(lse, right_lse, dtype="float32", roundings=64, magnitude=4, what="lse")

    def check_batch_invariance(self, form, lengths, heads, slots):
        """Query tokens have the same bits alone as together, in batches that split them differently otherwise."""
        scene = suites.scenes.scene(self.entry(form), lengths=lengths)
        cache, q = scene.cache(suites.layout_of("BLNHC", scene.entry), 1), suites.queries(scene.entry, 2, 1, heads)
        chosen = self.choose(scene, 1, slots, np.random.default_rng(slots))

        def decode(rows):
            return jaxkv.decode_mla_sparse(
                *(x[rows] for x in q), cache, jnp.asarray(chosen)[rows], layer=1, scale=0.11, return_lse=True,
                batch_invariant=True, implementation="mosaic_gpu", **scene.scale_arguments(),
            )  # fmt: skip

        together = decode(np.arange(2)[::-1])
        for row in range(2):
            for alone, reversed_ in zip(decode(np.asarray([row])), together, strict=True):
                assert_same_bits(alone[0], reversed_[-1 - row])


@on_hopper
class TestExtraSlots(Mosaic, suites.ExtraSlots):
    """The whole suite for two caches, and calls with sizes of real ones, on the GPU."""

    exact = "fp8_v4"
    forms = (("fp8_v4", "fp8_v4"),)

    @pytest.mark.parametrize("heads", [8, 64, 100, 128])
    @pytest.mark.parametrize("sizes", [(128, 512), (100, 700), (300, 1)])
    def test_many_slots(self, heads, sizes):
        first, second = self.pair(sizes=sizes)
        self.check_two(suites.queries(first[0].entry, 3, 2, heads), first, second)


@pytest.mark.usefixtures("interpreted")
class TestInterpretedExtraSlots(Mosaic, suites.ExtraSlotsChecks):
    """The same for a few cases, in the interpreter."""

    exact = "fp8_v4"

    @pytest.mark.ci
    def test_two_row_tiles_sinks_counts_and_splits(self):
        first, second = self.pair(sizes=(70, 300), tokens=1, block_sizes=(64, 2), layouts=("BLNHC", "packed, bfloat16"))
        most = 2**31 - 1  # counts above the number of slots are clamped
        first[4], second[4] = np.asarray([[3], [most], [0]], np.int32), np.asarray([[most], [0], [0]], np.int32)
        sinks = np.random.default_rng(0).normal(0, 3, 72).astype(np.float32)
        self.check_two(suites.queries(first[0].entry, 3, 1, 72), first, second, sinks=sinks)

    @pytest.mark.slow  # the GPU suite has it as well
    def test_groups_of_one_buffer(self):
        q, first, second = self.in_one_buffer(tokens=1)
        self.check_two(q, first, second)


@on_hopper
class TestDecodeMLASparse(Mosaic, suites.DecodeMLASparse):
    """The whole suite, and what only sizes of real calls show, on the GPU."""

    @pytest.mark.parametrize("form", ["bf16", "fp8", "fp8_ds_mla"])
    @pytest.mark.parametrize("heads", [64, 128])
    def test_batch_invariant_bits(self, form, heads):
        self.check_batch_invariance(form, (190, 64), heads, 4000)

    @pytest.mark.parametrize("form", ["bf16", "f16", "fp8", "fp8_ds_mla", *NARROW])
    @pytest.mark.parametrize("heads", [8, 64, 100, 128])
    def test_many_slots(self, form, heads):
        self.sparse(form, (640, 100, 1), heads, 700, tokens=2)

    @pytest.mark.parametrize("exponents", [(-8, -6), (-12, 6), (-40, 40)])  # the first as encoders write them
    def test_any_scales(self, exponents):
        scene = self.with_scales(exponents)
        self.sparse("fp8_ds_mla", (190, 64), 128, 200, scene=scene)

    @pytest.mark.parametrize("form", ["fp8_v4", "mxfp4_ds_mla"])
    @pytest.mark.parametrize(("exponents", "magnitude"), E8M0_EXPONENTS)
    def test_any_e8m0_scales(self, form, exponents, magnitude):
        scene = self.with_e8m0_scales(form, exponents)
        self.sparse(form, (190, 64), 128, 200, scene=scene, magnitude=magnitude)

    @pytest.mark.parametrize("form", NARROW)
    def test_a_nan_scale(self, form):
        self.check_a_nan_scale(form, 64)

    def test_a_nan_value(self):
        self.check_a_nan_byte("fp8_v4", 64, 0xFF, 400)

    def test_random_bytes(self):
        self.check_random_bytes(64)

    @pytest.mark.parametrize("exponents", ROUNDED)
    def test_scales_that_are_not_powers_of_two(self, exponents):
        self.check_scales_that_are_not_powers_of_two(exponents, 128)

    @pytest.mark.parametrize("form", ["fp8", "fp8_ds_mla"])
    @pytest.mark.parametrize("power", QUERY_SCALES)
    def test_any_queries(self, form, power):
        self.check_queries(form, power, 64, (190, 64), 130)

    @pytest.mark.parametrize("power", QUERY_SCALES)
    def test_any_scale_of_all_entries(self, power):
        self.check_scale_of_all_entries(power, 128, (190, 64), 3000)

    def test_a_scan_over_layers_stacks_the_results(self):
        entry = self.entry("fp8_ds_mla")
        scene = suites.scenes.scene(entry)
        cache = scene.cache(suites.layout_of("BLNHC", entry), 1)
        q, slots = suites.queries(entry, 6, 1, 16), self.choose(scene, 1, 130, np.random.default_rng(3))
        suites.assert_a_scan_stacks(lambda cache, layer: self.decode(q, cache, slots, layer, scene), cache)


@pytest.mark.usefixtures("interpreted")
class TestInterpreted(Mosaic, suites.DecodeMLASparseChecks):
    """Numerics, barriers and races of a few cases, each of which takes the interpreter many seconds."""

    @pytest.mark.parametrize("form", [further("bf16"), further("fp8"), "fp8_ds_mla"])
    def test_two_row_tiles_sinks_counts_and_splits(self, form):
        heads = 72
        sinks = np.random.default_rng(0).normal(0, 3, heads).astype(np.float32)
        sinks[:2] = -np.inf, np.inf
        self.sparse(form, (190, 64), heads, 300, counts=np.asarray([[300], [70]], np.int32), sinks=sinks)

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["fp8", "fp8_ds_mla"])
    def test_batch_invariant_bits(self, form):
        self.check_batch_invariance(form, (190, 64), 8, 2200)

    def test_no_slots_at_all_and_a_cap(self):
        counts = np.asarray([[0, 64], [3, 65]], np.int32)
        self.sparse("f16", (130, 1), 5, 70, tokens=2, layout="LBNHC", counts=counts, logit_cap=2.0)

    @pytest.mark.parametrize(
        ("exponents", "heads"),
        [further((-8, -6), FEW), further((-8, -6), MANY), further((-40, 40), FEW), ((-40, 40), MANY)],
    )  # (-8, -6) as encoders write them
    def test_any_scales(self, exponents, heads):
        self.sparse("fp8_ds_mla", (190, 64), heads, 130, scene=self.with_scales(exponents))

    @pytest.mark.parametrize(
        ("form", "exponents"),
        [further("fp8_v4", (-40, 40)), further("mxfp4_ds_mla", (-8, -5)), slow("mxfp4_ds_mla", (-40, 40))],
    )
    def test_any_e8m0_scales(self, form, exponents):
        self.sparse(form, (70, 3), 8, 80, scene=self.with_e8m0_scales(form, exponents))

    @pytest.mark.parametrize("form", [NARROW[0], *map(further, NARROW[1:])])
    def test_narrow_formats_in_an_odd_layout(self, form):
        self.sparse(form, (70, 3), 8, 80, layout="packed, bfloat16")

    @pytest.mark.slow
    @pytest.mark.parametrize("form", NARROW)
    def test_a_nan_scale(self, form):
        self.check_a_nan_scale(form, 8)

    @pytest.mark.slow
    def test_random_bytes(self):
        self.check_random_bytes(8)

    @pytest.mark.parametrize(
        ("exponents", "heads"),
        [(ROUNDED[0], FEW), further(ROUNDED[0], MANY), further(ROUNDED[1], FEW), (ROUNDED[1], MANY)],
    )
    def test_scales_that_are_not_powers_of_two(self, exponents, heads):
        self.check_scales_that_are_not_powers_of_two(exponents, heads)

    @pytest.mark.parametrize(
        ("form", "power", "heads"),
        [
            further("fp8_ds_mla", QUERY_SCALES[0], FEW),
            further("fp8_ds_mla", QUERY_SCALES[0], MANY),
            further("fp8_ds_mla", QUERY_SCALES[1], MANY),
            further("fp8", 40, FEW),
            further("fp8", 40, MANY),
        ],
    )
    def test_any_queries(self, form, power, heads):
        self.check_queries(form, power, heads, (64, 1), 66)

    @pytest.mark.parametrize(("power", "heads"), [(QUERY_SCALES[0], FEW), (QUERY_SCALES[1], MANY)])
    def test_any_scale_of_all_entries(self, power, heads):
        self.check_scale_of_all_entries(power, heads, (64, 1), 66)

    @pytest.mark.parametrize(
        ("form", "heads"), [("fp8", MANY), further("fp8", FEW), further("fp8_ds_mla", FEW), further("fp8_ds_mla", MANY)]
    )
    def test_an_odd_layout_in_a_buffer_of_another_dtype(self, form, heads):
        self.sparse(form, (190, 64), heads, 66, layout="packed, bfloat16")

    def test_traced_layer_outside_the_cache_is_empty(self):
        entry = self.entry()
        scene = suites.scenes.scene(entry, lengths=(64,))
        cache = scene.cache(suites.layout_of("BLNHC", entry), 1)
        slots = self.choose(scene, 1, 32, np.random.default_rng(0))
        out, lse = jax.jit(lambda layer: self.decode(suites.queries(entry, 1, 1, 8), cache, slots, layer, scene))(3)
        assert not np.asarray(out).any()
        assert (np.asarray(lse) == -np.inf).all()


LOWERED = [("BLNHC", 128, False, False, None), ("LBNHC", 20, True, True, 30.0)]
"""Order, heads, whether there are counts and sinks, `logit_cap`."""


FORMATS = ["bf16", "fp8_ds_mla", "f16", "fp8", "nvfp4_ds_mla", "fp8_v4", "mxfp4_ds_mla"]


@each_value(("form", "case"), FORMATS, LOWERED, default=2)
def test_lowers_for_hopper(form, case):
    order, heads, counts, sinks, cap = case
    entry = jaxkv.MLAEntry.typical(form)
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=64, entry=entry, order=order)
    shape = jax.ShapeDtypeStruct
    arrays = (
        shape((4, 2, heads, entry.latent), entry.input_dtype),
        shape((4, 2, heads, 64), entry.input_dtype),
        shape((layout.size,), layout.dtype),
        shape((4, 2, 300), jnp.int32),
        shape((4, 2), jnp.int32) if counts else None,
        shape((heads,), jnp.float32) if sinks else None,
        shape((), jnp.int32),
        shape((), jnp.float32),
        shape((), jnp.float32) if entry.codec.scaled else None,
    )
    if form == "fp8_v4":
        pages = jaxkv.CacheLayout(num_layers=61, num_blocks=8192, block_size=2, entry=entry, order=order).pages
        given = shape((pages.size,), jnp.uint8), shape((4, 2, 200), jnp.int32), arrays[4], arrays[6], None
        arrays += (ExtraSlots(*given, pages, entry),)
    else:
        arrays += (None,)
    traced = jax.jit(decode_sparse(layout, logit_cap=cap)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    planning = [[], []] if counts else []  # counts are planned by kernels, constants by XLA at once
    assert len(kernel_operands(text)) == len(planning) + 2
    # Combining reads only split_requests before attention has ended.
    assert read_early(traced.jaxpr) == [*planning, [], 3 * [(8, 3)]]
    for operation in ("concatenate", "transpose", "pad", "dynamic_slice", "bitcast_convert"):
        assert f"stablehlo.{operation} %arg2" not in text  # the cache goes in as it is


def decode_sparse(layout, *, logit_cap=None):
    """The kernel of `decode_mla_sparse` as a function of arrays."""
    names = ("q_latent", "q_pe", "buffer", "slots", "counts", "sinks", "layer", "scale", "kv_scale", "extra")
    options = {
        "pages": layout.pages,
        "entry": layout.entry,
        "logit_cap": logit_cap,
        "batch_invariant": False,
        "max_logits": False,
    }
    return kernels.called(MosaicGPU(), "decode_mla_sparse", names, **options)


@pytest.mark.parametrize(("requests", "whole"), [(64, True), (8, False)])
def test_requests_that_are_known_to_stay_whole_are_not_combined(requests, whole):
    entry = jaxkv.MLAEntry.typical("bf16")
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4096, block_size=64, entry=entry)
    shape = jax.ShapeDtypeStruct
    arrays = (
        shape((requests, 1, 128, 512), jnp.bfloat16),
        shape((requests, 1, 128, 64), jnp.bfloat16),
        shape((layout.size,), layout.dtype),
        shape((requests, 1, 640), jnp.int32),
    )

    def decode(*arrays):
        return decode_sparse(layout)(*arrays, None, None, 0, 0.1, None, None)

    jaxpr = jax.make_jaxpr(decode)(*arrays).jaxpr
    assert len(read_early(jaxpr)) == (1 if whole else 2)  # kernels
    # The kernel after attention may start early only if it is `combine`, which waits.
    assert ("griddepcontrol_launch_dependents" in str(jaxpr)) != whole


SIZES = dict(num_layers=3, num_blocks=4, block_size=64, entry=jaxkv.MLAEntry("fp8_ds_mla"))
UNSUPPORTED = {
    "entries of format 'f32'": dict(entry=jaxkv.MLAEntry("f32")),
    "entries of 256 + 64 values": dict(entry=jaxkv.MLAEntry("fp8_ds_mla", latent=256)),
    "block stride of": dict(block_padding=8),
    "`q_latent` of float16": dict(dtype=jnp.float16),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_explain_reports_the_reason(reason):
    found = {**SIZES, **UNSUPPORTED[reason]}
    dtype = found.pop("dtype", None)
    layout = jaxkv.CacheLayout(**found)
    q = [jax.ShapeDtypeStruct((1, 1, 16, n), dtype or layout.entry.input_dtype) for n in layout.entry.sizes]
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    with interpreting(True):
        slots = jax.ShapeDtypeStruct((1, 1, 8), jnp.int32)
        explained = jaxkv.explain(jaxkv.decode_mla_sparse, *q, cache, slots, layer=0, scale=1.0)
    assert any(why.startswith(reason) for why in explained.reasons["mosaic_gpu"]), explained
