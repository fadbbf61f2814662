"""`decode_mla` on Blackwell: interpreted on any machine; the whole suites on a Blackwell GPU (`-m gpu`).

It has not run on a GPU.  `.ci/cubins` compiles it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv import masks
from jaxkv_kernels.mosaic_gpu import decode
from jaxkv_kernels.mosaic_gpu.runtime.device import assumed_capability, interpreting
from support import suites
from support.cases import further, slow
from support.compare import assert_same_bits
from support.hopper import on_blackwell
from support.mosaic_mla import MosaicMLA

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN is what stands in the way

OTHERS = [order for order in jaxkv.ORDERS if order != "BLNHC"]
QUANTISED = [
    ("fp8_ds_mla", "BLNHC", False),
    *(further("fp8_ds_mla", order, padded) for order in OTHERS for padded in (False, True)),
    further("fp8_ds_mla", "BLNHC", True),
    *(further("fp8", order, False) for order in jaxkv.ORDERS),
]
"""Format, order, and whether blocks are padded."""


@pytest.fixture
def blackwell(interpreted):
    """Kernels are those for Blackwell, in Pallas's GPU interpreter, and none of them races."""
    with assumed_capability("10.0"):
        yield


class Blackwell(MosaicMLA):
    """What the suites of this kernel say of themselves."""

    gaps = (
        "entries of format",  # those of FORMATS only
        "entries of 77 + 14",
        "entries of 512 + 0",
        "blocks of",  # TMA tiles are of whole 16-token pages
        "`q_latent` of",  # queries of another dtype than the entries
        "`mask`, a function",  # without intervals
        "`logit_cap` of",  # too large for tanh by way of exp2
    )


@on_blackwell
class TestDecodeMLA(Blackwell, suites.DecodeMLA):
    """The whole suite, on the GPU."""


@on_blackwell
class TestMLATreeMasks(Blackwell, suites.MLATreeMasks):
    """The whole suite, on the GPU."""


@on_blackwell
class TestWindowsOfBothSides(Blackwell, suites.MLAWindowsOfBothSides):
    """The whole suite, on the GPU."""


@pytest.mark.usefixtures("blackwell")
class TestInterpreted(Blackwell, suites.DecodeMLAChecks):
    """Numerics, barriers and races of a few telling cases, each of which takes the interpreter seconds."""

    @pytest.mark.parametrize(
        ("order", "padded"),
        [*((order, False) for order in jaxkv.ORDERS), ("BLNHC", True), *(further(order, True) for order in OTHERS)],
    )
    def test_equals_the_packed_cache_and_the_oracle(self, order, padded):
        self.check_order("bf16", order, padded=padded)

    @pytest.mark.parametrize(("form", "order", "padded"), QUANTISED)
    def test_quantised_entries_equal_the_packed_cache_and_the_oracle(self, form, order, padded):
        self.check_order(form, order, padded=padded)

    def check_order(self, form, order, *, padded):
        """Lengths of 0, 1, and round a block's edge; NaN in unused slots, and numbers of no block in tables."""
        entry = self.entry(form)
        scene = suites.scenes.scene(entry)
        layout = suites.layout_of(order, entry)
        if padded:
            sizes = {name: getattr(layout, name) for name in ("num_layers", "num_blocks", "block_size")}
            layout = jaxkv.CacheLayout(**sizes, entry=entry, order=order, block_padding=48)
        q = suites.queries(entry, len(scene.lengths), 2, 3)
        found = self.check(q, scene.cache(layout, 1), scene, 1)
        for a, b in zip(found, self.decode(q, scene.twin(layout), scene, 0), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize(
        ("form", "layout"),
        [
            ("bf16", "gaps, offset"),
            further("bf16", "packed, bfloat16"),
            *(further("fp8_ds_mla", layout) for layout in ("gaps, offset", "packed, bfloat16", "packed, uint8")),
        ],
    )
    def test_small_pages_and_a_cap(self, form, layout):
        self.case((77, 16, 0), 16, form=form, block_size=16, layout=layout, logit_cap=2.0)

    def test_two_tiles_of_rows_of_f16(self):
        self.case((200, 129), 70, 3, form="f16")

    @pytest.mark.parametrize(
        ("form", "lengths", "heads"),
        [
            ("bf16", (0, 1, 65, 600), 128),
            further("bf16", (900,), 5),
            ("fp8", (0, 1, 65, 600), 128),
            further("fp8_ds_mla", (0, 1, 65, 600), 130),
        ],
    )
    def test_split_requests(self, form, lengths, heads):
        self.case(lengths, heads, form=form)

    @pytest.mark.parametrize(("form", "tokens"), [("bf16", 3), further("bf16", 70), further("fp8_ds_mla", 3)])
    def test_a_window_whose_edges_lie_inside_tiles(self, form, tokens):
        self.case((200, 70, 30), 20 if tokens == 3 else 2, tokens, form=form, window=100)

    @pytest.mark.parametrize("form", [further("bf16"), further("fp8_ds_mla")])
    def test_a_window_of_both_sides(self, form):
        self.case((200, 70, 3), 2, 5, form=form, window=(100, 2), causal=False)

    @pytest.mark.parametrize(
        "keywords", [further({"tree_mask": np.tri(3, dtype=bool)[None]}), slow({"mask": masks.Chunked(48)})]
    )
    def test_masks(self, keywords):
        self.case((130,), 5, 3, **keywords)

    @pytest.mark.parametrize("form", [further("bf16"), further("fp8_ds_mla")])
    def test_more_work_tiles_than_a_cta_has_stages(self, form):
        self.case((1, 66, 0, 3, 0) * 4, 2, 3, form=form)

    @pytest.mark.parametrize("power", [further(2.0**-60), further(2.0**60)])
    def test_splits_keep_the_range_of_the_entries(self, power):
        entry = self.entry()
        scene = suites.scenes.scene(entry, lengths=(600,))
        cache, q = scene.cache(suites.layout_of("BLNHC", entry), 1), suites.queries(entry, 1, 1, 64)
        tables, lengths = jnp.asarray(scene.tables), jnp.asarray(scene.lengths)
        plan = jaxkv.plan_decode(cache, tables, lengths, num_heads=64, implementation="mosaic_gpu")
        assert plan.schedule.split_requests[0, 0] == 0

        def decode(power):
            scaled = jaxkv.KVCache(cache.buffer * jnp.bfloat16(power), cache.layout)
            options = {"layer": 1, "scale": 0.11 / power, "return_lse": True, "plan": plan}
            return jaxkv.decode_mla(*q, scaled, tables, lengths, implementation="mosaic_gpu", **options)

        (out, lse), (scaled, same_lse) = decode(1.0), decode(power)
        assert_same_bits(scaled, out * jnp.bfloat16(power))
        assert_same_bits(same_lse, lse)

    def test_keys_of_very_low_scores_count(self):
        self.check_low_scores("BLNHC", 8, tokens=1, lengths=(0, 1, 600))  # the last is split

    @pytest.mark.parametrize("value", [np.nan, slow(np.inf)])
    def test_keys_that_a_query_does_not_see(self, value):
        suites.DecodeMLA.test_keys_that_a_query_does_not_see_do_not_matter(self, value)

    test_blocks_outside_the_cache_are_masked = suites.DecodeMLA.test_blocks_outside_the_cache_are_masked
    test_lengths_outside_the_table = suites.DecodeMLA.test_lengths_outside_the_table_are_clamped_to_it
    test_traced_layer_outside_the_cache_is_empty = suites.DecodeMLA.test_traced_layer_outside_the_cache_is_empty
    test_a_nan_in_a_quantised_entry_is_seen = pytest.mark.ci(suites.DecodeMLA.test_a_nan_in_a_quantised_entry_is_seen)
    test_scales_of_both_signs = pytest.mark.ci(suites.DecodeMLA.test_scales_of_both_signs_that_are_not_powers_of_two)
    test_queries_of_any_magnitude = pytest.mark.slow(suites.DecodeMLA.test_queries_of_any_magnitude)
    test_sinks = pytest.mark.ci(suites.DecodeMLA.test_sinks)
    test_ragged_query_tokens = pytest.mark.slow(suites.DecodeMLA.test_ragged_query_tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("blackwell")
class TestInterpretedSuite(Blackwell, suites.DecodeMLA):
    """The whole suite, which takes the interpreter minutes."""


FP8_DS_MLA = jaxkv.MLAEntry("fp8_ds_mla")
REFUSED = {
    "entries of format 'fp8_v4' on Blackwell: supports bf16, f16, fp8 and fp8_ds_mla": dict(
        entry=jaxkv.MLAEntry.typical("fp8_v4")
    ),
    "entries of format 'f32'": dict(entry=jaxkv.MLAEntry("f32")),
    "entries of 256 + 64 values: supports 512 + 64": dict(entry=jaxkv.MLAEntry("bf16", latent=256)),
    "entries of 512 + 0 values": dict(entry=jaxkv.MLAEntry("bf16", rope=0)),
    "blocks of 61 tokens": dict(block_size=61),
    "block stride of": dict(block_padding=4),
    "block stride of 125960 bytes": dict(entry=FP8_DS_MLA, block_padding=8),
}


def reasons_against(operation, **changes):
    """Why the kernels for Blackwell do not run a call."""
    sizes = dict(num_layers=3, num_blocks=4, block_size=64, entry=jaxkv.MLAEntry("bf16"))
    layout = jaxkv.CacheLayout(**{**sizes, **changes})
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    tables, lengths = jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    entry = layout.entry
    with interpreting(True), assumed_capability("10.0"):
        if operation is jaxkv.plan_decode:
            found = jaxkv.explain(operation, cache, tables, lengths, num_heads=16)
        else:
            q = [jax.ShapeDtypeStruct((1, 16, n), entry.input_dtype) for n in entry.sizes]
            found = jaxkv.explain(operation, *q, cache, tables, lengths, layer=0, scale=1.0)
    return found.reasons["mosaic_gpu"]


@pytest.mark.parametrize("operation", [jaxkv.decode_mla, jaxkv.plan_decode])
@pytest.mark.parametrize("reason", REFUSED)
def test_explain_reports_why_a_layout_is_unsupported(operation, reason):
    assert reasons_against(operation) == reasons_against(operation, entry=FP8_DS_MLA) == ()
    assert any(given.startswith(reason) for given in reasons_against(operation, **REFUSED[reason]))


def test_hopper_keeps_its_kernels():
    entry = jaxkv.MLAEntry("bf16")
    assert type(decode.schedule_of(entry, 128)).__name__ == "MLADense"
    with assumed_capability("10.3"):
        assert type(decode.schedule_of(entry, 128)).__name__ == "MLADenseBlackwell"
