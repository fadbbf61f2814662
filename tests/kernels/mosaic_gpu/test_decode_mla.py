"""Mosaic GPU kernels: lowered for CUDA and interpreted on any machine; the whole suites on a Hopper GPU (`-m gpu`)."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv import masks
from jaxkv.ops import OPERATIONS
from jaxkv_kernels.mosaic_gpu.combine import combine
from jaxkv_kernels.mosaic_gpu.decode import GATHERED
from jaxkv_kernels.mosaic_gpu.epilogue import KernelResults
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.tile_scheduler import Plan
from support import kernels, suites
from support.cases import each_value, further, slow
from support.compare import assert_close, assert_same_bits
from support.hopper import kernel_operands, on_hopper, read_early
from support.mosaic_mla import MosaicMLA

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN is what stands in the way


SIZES_OF_ENTRIES = [(512, 0), (128, 32), (192, 16), (64, 64)]
"""Besides 512 + 64: without a rotary part, with narrow ones, and with latents that are not multiples of 128."""


class Mosaic(MosaicMLA):
    """What every suite of these kernels says of itself."""

    gaps = (
        "entries of format",  # float32 has no wgmma
        "entries of 77 + 14",  # quantised entries, too, have DeepSeek's sizes
        "entries of 512 + 0",  # supported if they are not quantised
        "query tokens x heads",  # quantised entries with more than 16 rows
        "blocks of",  # TMA tiles are of whole 16-token pages
        "token stride",  # entries that are not side by side, of quantised caches
        "offset of",  # bulk copies of quantised entries begin at multiples of 16 bytes
        "layer stride of",
        "block stride of",
        "`q_latent` of",  # queries of another dtype than the entries
        "`mask`, a function",  # without intervals
        "`logit_cap` of",  # too large for tanh by way of exp2
    )


@on_hopper
class TestMLAMasks(Mosaic, suites.MLAMasks):
    """The whole suite, on the GPU."""


@on_hopper
class TestMLATreeMasks(Mosaic, suites.MLATreeMasks):
    """The whole suite, on the GPU."""


@on_hopper
class TestSharedPrefixes(Mosaic, suites.MLASharedPrefixes):
    """The whole suite, on the GPU."""


@on_hopper
class TestDecodeMLA(Mosaic, suites.DecodeMLA):
    """The whole suite, on the GPU."""

    def test_a_scan_over_layers_stacks_the_results(self):
        scene = suites.scenes.scene(self.entry())
        layout = suites.layout_of("BLNHC", self.entry())
        cache, q = scene.cache(layout, 1), suites.queries(self.entry(), len(scene.lengths), 1, 16)

        suites.assert_a_scan_stacks(lambda cache, layer: self.decode(q, cache, scene, layer), cache)

    @pytest.mark.parametrize(("heads", "tokens"), [(5, 1), (16, 1), (64, 1), (16, 4), (24, 2)])
    @pytest.mark.parametrize("count", [40, 70])
    def test_many_requests(self, heads, tokens, count):
        """With 34 to 66 requests, two CTAs share the keys of each."""
        lengths = tuple(np.random.default_rng(count).integers(0, 700, count).tolist())
        lengths = (0, 1, 64, 128, 129, 9000, *lengths[6:])
        num_blocks = sum(-(-length // 64) for length in lengths) + 3
        scene = suites.scenes.scene(self.entry(), lengths=lengths, num_blocks=num_blocks)
        layout = suites.layout_of("BLNHC", self.entry(), num_blocks=num_blocks)
        cache, q = scene.cache(layout, 1), suites.queries(self.entry(), count, tokens, heads)

        found = self.check(q, cache, scene, 1)
        assert_same_bits(self.check(q, cache, scene, 1)[0], found[0])

    @pytest.mark.parametrize("form", ["bf16", "fp8", "fp8_ds_mla"])
    @pytest.mark.parametrize("heads", [16, 64, 128])
    def test_batch_invariant_bits(self, heads, form):
        suites.assert_batch_invariant((9000, 0, 70, 3000, 1025), heads, form)


@on_hopper
class TestWindowsOfBothSides(Mosaic, suites.MLAWindowsOfBothSides):
    """The whole suite, on the GPU."""

    @pytest.mark.parametrize("form", ["f16", "fp8", "fp8_ds_mla", *GATHERED])
    @pytest.mark.parametrize(("heads", "tokens"), [(5, 3), (16, 5), (40, 3), (128, 2)])
    @pytest.mark.parametrize("window", suites.BOTH_SIDES)
    def test_formats_and_rows(self, form, heads, tokens, window):
        entry = self.entry(form)
        scene = suites.scenes.scene(entry)
        cache = scene.cache(suites.layout_of("BLNHC", entry), 1)
        self.check(
            suites.queries(entry, len(scene.lengths), tokens, heads), cache, scene, 1, window=window, causal=False
        )


@on_hopper
@pytest.mark.parametrize(("latent", "rope"), [(256, 64), *SIZES_OF_ENTRIES])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("layout", ["BLNHC", "gaps, offset"])
def test_sizes_of_entries_and_blocks(latent, rope, block_size, layout):
    suite = TestDecodeMLA()
    suite.latent, suite.rope = latent, rope
    lengths = (0, 700, block_size + 1, 129)
    entry, sizes = suite.entry(), {"block_size": block_size, "num_blocks": 80}
    scene = suites.scenes.scene(entry, lengths=lengths, **sizes)
    cache = scene.cache(suites.layout_of(layout, entry, **sizes), 1)
    for heads, tokens in ((5, 1), (16, 1), (20, 3), (128, 1)):
        for keywords in ({}, {"window": 300, "logit_cap": 2.0}):
            suite.check(suites.queries(entry, 4, tokens, heads), cache, scene, 1, **keywords)


@on_hopper
class TestOtherSizes(TestDecodeMLA):
    """The whole suite with narrow rotary parts."""

    latent, rope = 128, 32


@pytest.mark.usefixtures("interpreted")
class TestInterpreted(Mosaic, suites.DecodeMLAChecks):
    """Numerics, barriers and races of a few telling cases, each of which takes the interpreter seconds."""

    @pytest.mark.parametrize("heads", [5, slow(16), further(64)])
    def test_lengths_round_the_edges(self, heads):
        self.case((0, 1, 64, 65, 130), heads)

    @pytest.mark.parametrize(
        "keywords", [further({"tree_mask": np.tri(3, dtype=bool)[None]}), slow({"mask": masks.Chunked(48)})]
    )
    def test_masks(self, keywords):
        self.case((130,), 5, 3, **keywords)

    @pytest.mark.parametrize("heads", [5, slow(16), further(64)])
    def test_two_ctas_share_the_keys_of_each_request(self, heads):
        self.case((130, 700), heads)  # as many requests as half of the interpreter's partitions

    @pytest.mark.parametrize("heads", [8, slow(64)])
    def test_keys_of_very_low_scores_count(self, heads):
        self.check_low_scores("BLNHC", heads, tokens=1, lengths=(0, 1, 600))  # the last is split

    def test_few_rows_of_more_requests_than_a_cta_has_places_for(self):
        self.case((1, 66, 0, 3, 0) * 4, 2, 3)

    @pytest.mark.parametrize("form", [further("fp8"), "fp8_ds_mla"])
    def test_few_rows_of_quantised_entries(self, form):
        self.case((130, 0), 3, 2, form=form, block_size=16)

    @pytest.mark.parametrize("form", [slow("fp8"), slow("fp8_ds_mla")])
    def test_quantised_entries_of_more_requests_than_ctas(self, form):
        self.case((1, 66, 0, 300, 0) * 2, 16, form=form, layout="LBNHC", logit_cap=2.0)

    def test_a_cluster_shares_the_keys(self):
        self.case((200, 129), 128, form="f16")

    def test_quantised_entries_round_the_edges(self):
        self.case((0, 1, 65, 130), 20, form="fp8")

    @pytest.mark.parametrize(
        ("form", "heads"), [further("fp8_ds_mla", 17), ("fp8_v4", 3), slow("nvfp4_ds_mla", 3), slow("mxfp4_ds_mla", 17)]
    )
    def test_entries_with_scales_of_their_own_are_read_by_slot(self, form, heads):
        self.case((3, 65), heads, 2, form=form)

    @pytest.mark.slow
    @pytest.mark.parametrize(("heads", "tokens"), [(20, 4), (128, 1)])
    def test_quantised_entries_in_small_pages(self, heads, tokens):
        self.case((140, 60), heads, tokens, form="fp8", layout="LBNHC", layer=2, block_size=16, logit_cap=2.0)

    def test_several_tokens_and_odd_heads_on_a_layer_major_cache(self):
        self.case((3, 140), 20, 2, layout="LBNHC", layer=2)

    @each_value(("heads", "layout"), [16, 64], ["packed, uint8", "gaps, offset"], default=1)
    def test_small_pages_and_a_cap(self, heads, layout):
        self.case((77,), heads, block_size=16, layout=layout, logit_cap=2.0)

    @pytest.mark.parametrize(
        ("latent", "rope", "heads"),
        [
            (256, 64, 5),
            (128, 32, 20),
            *(slow(*sizes, heads) for sizes in SIZES_OF_ENTRIES for heads in (5, 24, 128)),
        ],
    )
    def test_other_sizes_of_entries(self, latent, rope, heads, monkeypatch):
        monkeypatch.setattr(self, "latent", latent)
        monkeypatch.setattr(self, "rope", rope)
        self.case((0, 65, 600), heads)  # the last is split

    @pytest.mark.parametrize(
        ("form", "heads"), [("bf16", 5), further("bf16", 20), slow("fp8", 5), slow("fp8", 20), slow("fp8_ds_mla", 20)]
    )
    def test_a_window_whose_edges_lie_inside_tiles(self, form, heads):
        self.case((300, 70, 30), heads, 2, form=form, window=100)

    @pytest.mark.parametrize(
        ("form", "heads"),
        [
            *(further("bf16", 2), slow("bf16", 20), further("fp8", 20), slow("fp8_v4", 3)),
            *(slow("fp8", 2), slow("fp8_ds_mla", 2), slow("fp8_ds_mla", 20)),
        ],
    )
    def test_a_window_of_both_sides(self, form, heads):
        self.case((300, 70, 3), heads, 5, form=form, window=(100, 2), causal=False)

    @pytest.mark.ci
    @each_value(("heads", "power"), [64, 16], [2.0**-60, 2.0**60], default=1)
    def test_pieces_of_a_cut_request_keep_the_range_of_the_entries(self, heads, power):
        entry = self.entry("bf16")
        scene = suites.scenes.scene(entry, lengths=(600,))
        cache, q = scene.cache(suites.layout_of("BLNHC", entry), 1), suites.queries(entry, 1, 1, heads)
        tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths)
        plan = jaxkv.plan_decode(cache, tables, lengths, num_heads=heads, implementation="mosaic_gpu")
        assert plan.schedule.split_requests[0, 0] == 0

        def decode(power):
            scaled = jaxkv.KVCache(cache.buffer * jnp.bfloat16(power), cache.layout)
            options = {"layer": 1, "scale": 0.11 / power, "return_lse": True, "plan": plan}
            return jaxkv.decode_mla(*q, scaled, tables, lengths, **options)

        (out, lse), (scaled, same_lse) = decode(1.0), decode(power)
        assert_same_bits(scaled, out * jnp.bfloat16(power))
        assert_same_bits(same_lse, lse)

    @pytest.mark.parametrize("value", [np.nan, slow(np.inf)])
    def test_keys_that_a_query_does_not_see(self, value):
        suites.DecodeMLA.test_keys_that_a_query_does_not_see_do_not_matter(self, value)

    test_blocks_outside_the_cache_are_masked = suites.DecodeMLA.test_blocks_outside_the_cache_are_masked
    test_lengths_outside_the_table = suites.DecodeMLA.test_lengths_outside_the_table_are_clamped_to_it
    test_traced_layer_outside_the_cache_is_empty = suites.DecodeMLA.test_traced_layer_outside_the_cache_is_empty


OTHER_SIZES = [(128, 32, 128, None), (512, 0, 16, 100)]
"""Latent, rotary part, heads, `window`."""


@pytest.mark.ci
@pytest.mark.parametrize("case", OTHER_SIZES)
def test_other_sizes_lower_for_hopper(case):
    latent, rope, heads, window = case
    assert_lowers(jaxkv.MLAEntry("bf16", latent, rope), "BLNHC", 1, heads, 64, None, window)


CASES = [("LBNHC", 4, 2, 16, 30.0), ("BLNHC", 1, 128, 64, 30.0), ("LBNHC", 3, 20, 128, None)]
"""Order, query tokens, heads, tokens per block, `logit_cap`."""
QUANTISED = [
    further("fp8", "LBNHC", 4, 2, 16, 30.0),
    ("fp8_ds_mla", "BLNHC", 1, 16, 64, None),
    further("fp8", "LBNHC", 3, 20, 128, 30.0),
    slow("fp8", "BLNHC", 1, 128, 16, None),
    slow("fp8_ds_mla", "BLNHC", 1, 128, 64, None),
    *(slow(form, "BLNHC", 1, 16, 64, None) for form in GATHERED),
]
"""The same by format."""
SIZES = [
    (4, 2, 16, 30.0),
    (1, 128, 64, 30.0),
    (3, 20, 128, None),
    (1, 16, 64, None),
    (1, 64, 64, None),
    (2, 128, 16, None),
]
"""Query tokens, heads, tokens per block, `logit_cap`."""


@pytest.mark.parametrize(
    ("form", "order", "tokens", "heads", "block_size", "cap"),
    [
        ("bf16", *CASES[1]),
        *(further("bf16", *case) for case in CASES[::2]),
        *QUANTISED,
        *(slow("bf16", order, *n) for order in ("BLNHC", "LBNHC") for n in SIZES if (order, *n) not in CASES),
    ],
)
def test_lowers_for_hopper(form, order, tokens, heads, block_size, cap):
    assert_lowers(jaxkv.MLAEntry.typical(form), order, tokens, heads, block_size, cap)


def assert_lowers(entry, order, tokens, heads, block_size, cap, window=None):
    form = entry.format
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=block_size, entry=entry, order=order)
    shape = jax.ShapeDtypeStruct
    arrays = (
        *(shape((4, tokens, heads, size), jnp.bfloat16) for size in entry.sizes),
        shape((layout.size,), layout.dtype),
        shape((4, 9), jnp.int32),
        shape((4,), jnp.int32),
        shape((), jnp.int32),
        shape((), jnp.float32),
        shape((), jnp.float32) if form == "fp8" else None,
    )
    names = ("q_latent", "q_pe", "buffer", "block_tables", "seq_lens", "layer", "scale", "kv_scale")
    options = {"pages": layout.pages, "entry": entry, "logit_cap": cap, "window": window, "ahead": 0}
    decode = kernels.called(MosaicGPU(), "decode_mla", names, plan=None, trailing=None, tree=None, mask=None, **options)
    traced = jax.jit(decode).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    *_, attention, combining = kernel_operands(text)
    # Only combining reads early: the split requests, each with its first split and the number of splits.
    planning = [[], []]
    assert read_early(traced.jaxpr) == [*planning, [], 3 * [(4, 3)]]
    assert combining[3] == attention[-1]  # the plan's, so combine may read them early
    for operation in ("concatenate", "transpose", "pad", "dynamic_slice"):
        assert f"stablehlo.{operation} %arg2" not in text  # the cache goes in as it is


NO_TABLES = {
    "block tables of 1048577 blocks per request: supports up to 1048576 of 64 tokens": (1, 2**20 + 1),
    "1048577 requests: supports up to 1048576": (2**20 + 1, 1),
}


@pytest.mark.parametrize("reason", NO_TABLES)
def test_explain_reports_tables_of_too_many_tiles_or_requests(reason):
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=64, entry=jaxkv.MLAEntry("bf16"))
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)

    def reasons(requests, columns):
        q = [jax.ShapeDtypeStruct((requests, 64, n), jnp.bfloat16) for n in layout.entry.sizes]
        tables, lengths = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((requests, columns), (requests,)))
        with interpreting(True):
            found = jaxkv.explain(jaxkv.decode_mla, *q, cache, tables, lengths, layer=0, scale=1.0)
        return found.reasons.get("mosaic_gpu", ())

    assert reasons(*NO_TABLES[reason]) == (reason,)
    assert not reasons(*(min(size, 2**20) for size in NO_TABLES[reason]))


REFUSED = {
    "entries of format 'f32'": dict(entry=jaxkv.MLAEntry("f32")),
    "entries of 96 + 64 values": dict(entry=jaxkv.MLAEntry("bf16", latent=96)),
    "blocks of 61 tokens": dict(block_size=61),
    "block stride of": dict(block_padding=4),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_explain_reports_why_a_layout_is_unsupported(reason):
    sizes = dict(num_layers=3, num_blocks=4, block_size=64, entry=jaxkv.MLAEntry("bf16"))
    layout = jaxkv.CacheLayout(**{**sizes, **REFUSED[reason]})
    q = [jax.ShapeDtypeStruct((1, 16, n), layout.entry.dtype) for n in layout.entry.sizes]
    tables, lengths = jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    with interpreting(True):
        found = jaxkv.explain(jaxkv.decode_mla, *q, cache, tables, lengths, layer=0, scale=1.0)
        assert found.chosen != "mosaic_gpu"
        assert any(given.startswith(reason) for given in found.reasons["mosaic_gpu"]), found


def test_without_a_hopper_gpu_the_reason_is_the_device():
    supports = {operation.name: MosaicGPU.support(operation.name) for operation in OPERATIONS}
    assert {name for name, support in supports.items() if support is None} == {"decode_delta_rule"}  # Triton has it
    for support in filter(None, supports.values()):
        reasons = support.unavailable_reasons()
        if not reasons:
            pytest.skip("this is a Hopper GPU")
        assert reasons[0].startswith("needs ")
    assert "NPROC" in os.environ  # the interpreter's threads wait for each other: see conftest.py


@pytest.mark.parametrize(
    ("rows", "slots", "count"),
    [
        *((24, 4, 2), further(8, 20, 9), (5, 5, 2), (5, 4, 1), slow(40, 64, 33), further(8, 140, 133)),
        further(8, 40, 38),
    ],
    ids=[
        *("a warp has two rows", "a warp has a row", "odd rows", "one split"),
        *("two warpgroups have a row", "four warpgroups have a row", "the last of all splits"),
    ],
)
def test_pieces_are_combined(rows, slots, count):
    rng = np.random.default_rng(0)
    mine = slice(2, 2 + count)
    values, lse, scales = (
        np.full(shape, np.nan, np.float32) for shape in [(slots, rows, 512), (slots, rows), (slots, 2, rows)]
    )
    values[mine] = rng.uniform(-1, 1, (count, rows, 512)).astype(np.float16)
    lse[mine], scales[mine] = rng.normal(0, 9, (count, rows)), rng.uniform(0.1, 9, (count, 2, rows))
    lse[2:, 3] = -np.inf  # a row that sees nothing
    plan = Plan(
        partitions=jnp.zeros((1, 8), jnp.int32),
        work_tiles=jnp.zeros((1, 7), jnp.int32),
        split_requests=jnp.asarray([[-1, 0, 0], [1, 2, count]], jnp.int32),
        max_splits=slots,
    )
    before, before_lse = jnp.full((2, rows, 512), 7, jnp.bfloat16), jnp.full((2, rows), 7, jnp.float32)
    pieces = (jnp.asarray(x) for x in (values.astype(np.float16), lse, scales))
    out, out_lse = combine(KernelResults(before, before_lse, *pieces), plan, rows=rows, interpret=True)

    weights = np.exp2(lse[mine].astype(np.float64) - lse[mine].max(axis=0).clip(-99))
    total = weights.sum(axis=0)
    scaled = values[mine] * scales[mine].swapaxes(1, 2).repeat(256, axis=2)
    expected = (scaled * weights[..., None]).sum(axis=0) / np.where(total == 0, 1, total)[:, None]
    # Rounded to bf16 once, from sums in float32 that may cancel.
    assert_close(out[1], expected, roundings=1, magnitude=2**-9, what="out")
    with np.errstate(divide="ignore"):
        expected_lse = np.log(total) + np.log(2) * lse[mine].max(axis=0)
    assert_close(out_lse[1], expected_lse, magnitude=1, what="lse")
    assert (out[0] == 7).all()
    assert (out_lse[0] == 7).all()
