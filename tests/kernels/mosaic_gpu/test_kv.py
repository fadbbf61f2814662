"""The Mosaic GPU kernel of `decode_kv`: lowered, interpreted, and the whole suite on a Hopper GPU (`-m gpu`)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv import masks
from jaxkv_kernels import tuning
from jaxkv_kernels.mosaic_gpu.gqa import GQAConfig
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.quantised_swap_ab import QuantisedGQAConfig
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from support import kernels, suites
from support.cases import each_value, further, slow
from support.hopper import kernel_operands, on_hopper, read_early

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN is what stands in the way


UNALIGNED = tuple(f"{plane}{axis} stride of" for plane in ("", "value ") for axis in ("token", "head"))
"""Reasons against planes of packed entries: 128 values have 72 bytes in nvfp4 and 132 in int8."""


class Mosaic:
    """What every suite of this kernel says of itself."""

    implementation = "mosaic_gpu"
    head_dim, value_dim = 128, 64
    exact = "bf16"
    gaps = (
        "entries of",  # float32 has no wgmma; quantised heads are of 64, 128 or 256 values
        *UNALIGNED,
        "query tokens x heads",  # quantised entries with more than 16 rows per head
        "`q` of",  # queries of another dtype than the entries
        "blocks of",  # TMA tiles are of whole 16-token pages
        "`mask`, a function",  # without intervals
        "`logit_cap` of",  # too large for tanh by way of exp2
        "keys of format",  # with values of another
    )


@on_hopper
class TestKVMasks(Mosaic, suites.KVMasks):
    """The whole suite, on the GPU."""


@on_hopper
class TestKVTreeMasks(Mosaic, suites.KVTreeMasks):
    """The whole suite, on the GPU."""


@on_hopper
class TestDecodeKV(Mosaic, suites.DecodeKV):
    """The whole suite, on the GPU."""

    def test_a_scan_over_layers_stacks_the_results(self):
        entry = self.entry()
        scene = suites.scenes.scene(entry, num_heads=2)
        layout = suites.layout_of("BLNHC", entry, num_heads=2)
        cache, q = scene.cache(layout, 1), self.query(entry, len(scene.lengths), 1, 8)

        suites.assert_a_scan_stacks(lambda cache, layer: self.decode(q, cache, scene, layer), cache)


@on_hopper
class TestSharedPrefixes(Mosaic, suites.KVSharedPrefixes):
    """The whole suite, on the GPU."""


@on_hopper
class TestQuantisedHeads(TestDecodeKV):
    """The whole suite in sizes that quantised entries have, too."""

    value_dim = 128


@on_hopper
class TestWindowsOfBothSides(Mosaic, suites.KVWindowsOfBothSides):
    """The whole suite, on the GPU."""

    @pytest.mark.parametrize("form", ["fp8", "int8", "nvfp4"])
    @pytest.mark.parametrize("window", suites.BOTH_SIDES)
    def test_quantised_entries(self, form, window, monkeypatch):
        monkeypatch.setattr(self, "value_dim", 128)
        entry = self.entry(form)
        scene = suites.scenes.scene(entry, num_heads=2)
        cache = scene.cache(suites.layout_of("BLNHC", entry, num_heads=2), 1)
        q = self.query(entry, len(scene.lengths), 5, 6)
        self.check(q, cache, scene, 1, window=window, causal=False)


@on_hopper
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_sizes_of_entries_and_blocks(sizes, block_size):
    suite = TestDecodeKV()
    suite.head_dim, suite.value_dim = sizes
    entry = suite.entry()
    lengths = (0, 700, block_size + 1, 129)
    scene = suites.scenes.scene(entry, num_heads=2, block_size=block_size, lengths=lengths, num_blocks=80)
    layout = suites.layout_of("BLHNC", entry, num_heads=2, block_size=block_size, num_blocks=80)
    for keywords in ({}, {"window": 300, "logit_cap": 2.0}):
        suite.check(suite.query(entry, 4, 2, 10), scene.cache(layout, 1), scene, 1, **keywords)


@on_hopper
class TestLargeHeads(Mosaic, suites.DecodeKVChecks):
    """All layouts and formats in the largest sizes that quantised entries have."""

    head_dim, value_dim = 256, 256
    test_equals_the_packed_cache_and_the_oracle = suites.DecodeKV.test_equals_the_packed_cache_and_the_oracle


@on_hopper
class TestNarrowHeads(Mosaic, suites.DecodeKVChecks):
    """The same in the smallest sizes that quantised entries have."""

    head_dim, value_dim = 64, 64
    test_equals_the_packed_cache_and_the_oracle = suites.DecodeKV.test_equals_the_packed_cache_and_the_oracle


WIDE = [("int8", (256, 256)), ("int8", (256, 128)), ("int8", (128, 256)), ("nvfp4", (256, 256))]
NARROW = [("fp8", (64, 64)), ("int8", (64, 64))]
"""Sizes of large and of small heads whose entries are multiples of 16 bytes, by format."""


@on_hopper
@pytest.mark.parametrize(("form", "sizes"), [*WIDE, *NARROW])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_sizes_of_quantised_heads(form, sizes, block_size):
    suite = TestDecodeKV()
    suite.head_dim, suite.value_dim = sizes
    entry = suite.entry(form)
    lengths = (0, 700, block_size + 1, 129)
    scene = suites.scenes.scene(entry, num_heads=2, block_size=block_size, lengths=lengths, num_blocks=80)
    layout = suites.layout_of("BLHNC", entry, num_heads=2, block_size=block_size, num_blocks=80)
    for keywords in ({}, {"window": 300, "logit_cap": 2.0}):
        suite.check(suite.query(entry, 4, 2, 10), scene.cache(layout, 1), scene, 1, **keywords)


APART = [
    further("int8", (128, 128), 4, "values before keys"),
    *itertools.starmap(
        slow,
        (
            ("fp8", (64, 64), 2, "values with strides of their own"),
            ("fp8", (128, 128), 2, "keys and values in halves of blocks"),
            ("fp8", (256, 128), 2, "values before keys"),
            ("fp8", (128, 256), 2, "values with strides of their own"),
            ("int8", (64, 64), 4, "keys and values in planes"),
            ("int8", (256, 128), 4, "keys and values in planes"),
            ("int8", (128, 256), 8, "values before keys"),
            ("nvfp4", (128, 128), 2, "values before keys"),
            ("nvfp4", (256, 256), 2, "values with strides of their own"),
            ("nvfp4", (256, 128), 2, "keys and values in planes"),
            ("fp8", (128, 128), 2, "two arrays"),
            ("fp8", (64, 64), 2, "two arrays"),
            ("int8", (128, 128), 4, "two arrays"),
            ("nvfp4", (128, 128), 2, "two arrays"),
        ),
    ),
]
"""Format, sizes, heads and layout of quantised keys and values that lie apart."""


def layout_of(name, entry, **sizes):
    """The layout of that name.  Keys, and values, that lie apart begin at multiples of 16 bytes, as TMA demands."""
    alignment = {"alignment": 16} if name in suites.scenes.APART else {}
    return suites.layout_of(name, entry, **sizes, **alignment)


@on_hopper
@pytest.mark.parametrize(("form", "sizes", "heads", "name"), APART)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_quantised_heads_that_lie_apart(form, sizes, heads, name, block_size):
    suite = TestDecodeKV()
    suite.head_dim, suite.value_dim = sizes
    entry = suite.entry(form)
    lengths = (0, 700, block_size + 1, 129)
    scene = suites.scenes.scene(entry, num_heads=heads, block_size=block_size, lengths=lengths, num_blocks=80)
    layout = layout_of(name, entry, num_heads=heads, block_size=block_size, num_blocks=80)
    q, cache = suite.query(entry, 4, 2, 4 * heads), scene.cache(layout, 1)
    for keywords in ({}, {"window": 300, "logit_cap": 2.0}):
        suite.check(q, cache, scene, 1, **keywords)


STRIDES_APART, TWO_STRIDES = "values with strides of their own", "two arrays with strides of their own"
OTHERS_APART = [
    (slow if name == TWO_STRIDES else further)(name) for name in suites.scenes.APART if name != STRIDES_APART
]


@pytest.mark.usefixtures("interpreted")
class TestInterpreted(Mosaic, suites.DecodeKVChecks):
    """Numerics, barriers and races of a few telling cases, each of which takes the interpreter seconds."""

    def case(self, lengths, heads, group, tokens=1, *, form="bf16", layout="BLNHC", layer=1, block_size=64, **keywords):
        entry = self.entry(form)
        scene = suites.scenes.scene(entry, num_heads=heads, lengths=lengths, block_size=block_size)
        found = layout_of(layout, entry, num_heads=heads, block_size=block_size)
        q = self.query(entry, len(lengths), tokens, heads * group)
        return self.check(q, scene.cache(found, layer), scene, layer, **keywords)

    def test_heads_in_the_row_and_lengths_round_the_edges(self):
        self.case((0, 1, 64, 65, 130), 2, 4)

    @pytest.mark.parametrize("name", [STRIDES_APART, *OTHERS_APART])
    def test_keys_and_values_that_lie_apart(self, name):
        self.check_layout(name, jaxkv.KVEntry("bf16", 128, 64), lengths=(0, 1, 200))

    @pytest.mark.parametrize(
        "keywords",
        [
            further({"tree_mask": np.stack([np.eye(3, dtype=bool), np.tri(3, dtype=bool)])}),
            # By hand: on an idle machine, the interpreter often waits for ever in calls of several kernels.
            slow({"mask": masks.Prefix(3) | masks.Sliding(70, 0), "tree_mask": np.ones((2, 3, 3), bool)}),
            slow({"mask": masks.Chunked(64)}),
        ],
    )
    def test_masks(self, keywords):
        self.case((130, 2), 2, 1, 3, **keywords)

    def test_keys_of_very_low_scores_count(self):
        self.check_low_scores("BLNHC", 8, lengths=(0, 1, 600))  # the last is split

    def test_heads_outside_the_block(self):
        self.case((200, 129), 2, 1, layout="LHBNC", form="f16")

    @pytest.mark.parametrize(
        ("form", "layout"),
        [
            further("fp8", "BLNHC"),
            slow("fp8", "LBHNC"),
            further("int8", "LBHNC"),
            slow("int8", "gaps, offset"),
            further("nvfp4", "BLNHC"),
        ],
    )
    def test_few_rows_of_quantised_entries(self, form, layout, monkeypatch):
        monkeypatch.setattr(self, "value_dim", 128)
        self.case((0, 130), 2, 2, 2, form=form, layout=layout, block_size=16, window=70)

    @pytest.mark.ci
    @pytest.mark.parametrize("form", ["fp8", "int8"])
    def test_few_rows_of_narrow_heads(self, form, monkeypatch):
        monkeypatch.setattr(self, "head_dim", 64)
        monkeypatch.setattr(self, "value_dim", 64)
        self.case((0, 130), 2, 2, 2, form=form, layout="LBHNC", block_size=16, window=70)

    @pytest.mark.parametrize(
        ("form", "sizes", "heads", "layout"),
        [
            ("fp8", (128, 256), 2, "values with strides of their own"),
            slow("fp8", (64, 64), 2, "keys and values in halves of blocks"),
            further("int8", (128, 128), 4, "values before keys"),
            slow("int8", (256, 128), 4, "keys and values in planes"),
            slow("int8", (64, 64), 4, "keys and values in planes"),
            slow("nvfp4", (256, 128), 2, "values before keys"),
            slow("nvfp4", (256, 256), 2, "values with strides of their own"),
        ],
    )
    def test_quantised_keys_and_values_that_lie_apart(self, form, sizes, heads, layout, monkeypatch):
        monkeypatch.setattr(self, "head_dim", sizes[0])
        monkeypatch.setattr(self, "value_dim", sizes[1])
        self.case((0, 130), heads, 2, 2, form=form, layout=layout, block_size=16, window=70)

    @pytest.mark.parametrize("consumers", [slow(2), 4])
    def test_any_number_of_consumers_computes_the_same(self, consumers, monkeypatch):
        monkeypatch.setattr(self, "value_dim", 128)
        config = QuantisedGQAConfig(consumers=consumers, stages=2 * consumers, keys_at_once=1, producer_registers=72)
        with tuning.using(config):
            self.case((700, 0, 64), 1, 3, form="int8")

    @pytest.mark.slow
    def test_quantised_entries_of_large_heads(self, monkeypatch):
        monkeypatch.setattr(self, "head_dim", 256)
        monkeypatch.setattr(self, "value_dim", 256)
        self.case((1, 300), 2, 10, form="fp8", logit_cap=2.0)

    def test_several_tiles_of_rows_of_several_tokens(self):
        self.case((3, 140), 1, 23, 3, layout="LBHNC", layer=2)

    @pytest.mark.parametrize("layout", ["BHLNC", slow("gaps, offset"), slow("packed, uint8")])
    def test_small_pages_and_a_cap(self, layout):
        self.case((77,), 2, 2, block_size=16, layout=layout, logit_cap=2.0)

    def test_a_window_whose_edges_lie_inside_tiles(self):
        self.case((500, 70, 30), 1, 2, 2, block_size=128, window=200)

    @pytest.mark.parametrize(
        ("lengths", "tokens", "window"),
        [((300, 70, 3), 5, (100, 2)), further((140, 3), 70, (-1, 40)), slow((140, 3), 70, (40, -1))],
    )
    def test_a_window_of_both_sides(self, lengths, tokens, window):
        self.case(lengths, 1, 2, tokens, window=window, causal=False)

    @pytest.mark.parametrize("form", [further("fp8"), slow("int8"), slow("nvfp4")])
    def test_quantised_entries_in_a_window_of_both_sides(self, form, monkeypatch):
        monkeypatch.setattr(self, "value_dim", 128)
        self.case((200, 3), 2, 2, 4, form=form, window=(70, 1), causal=False)

    @pytest.mark.parametrize("keywords", [further({"window": (70, 2), "causal": False}), slow({"window": 70})])
    def test_ragged_query_tokens_in_a_window(self, keywords):
        entry, edges = self.entry(), np.cumsum([0, 3, 7, 0, 5])
        scene = suites.scenes.scene(entry, num_heads=1, lengths=(200, 5, 64, 3))
        cache, q = scene.cache(suites.layout_of("BLNHC", entry), 1), self.query(entry, 1, edges[-1] + 1, 4)[0]
        found = self.decode(q, cache, scene, 1, cu_q_lens=jnp.asarray(edges), **keywords)
        right = self.truth([q[a:b] for a, b in itertools.pairwise(edges)], scene, **keywords)
        suites.check_ragged(found, right, edges, 4)

    def test_another_configuration_computes_the_same(self):
        with tuning.using(GQAConfig(stages=1, query_stages=1, rescale_threshold=0)):
            self.case((200, 0, 129), 2, 4)

    def test_the_largest_heads_have_one_stage(self, monkeypatch):
        monkeypatch.setattr(self, "head_dim", 256)
        monkeypatch.setattr(self, "value_dim", 256)
        self.case((400, 200), 1, 2)

    @pytest.mark.parametrize("window", [slow(None), 20])
    def test_blocks_outside_the_cache_are_masked(self, window):
        suites.DecodeKV.test_blocks_outside_the_cache_are_masked(self, window)

    @pytest.mark.parametrize("window", [None, slow(70)])
    def test_lengths_outside_the_table(self, window):
        suites.DecodeKV.test_lengths_outside_the_table_are_clamped_to_it(self, window)

    @pytest.mark.parametrize("value", [further(jnp.nan), slow(jnp.inf)])
    def test_keys_that_a_query_does_not_see(self, value):
        suites.DecodeKV.test_keys_that_a_query_does_not_see_do_not_matter(self, value)

    test_traced_layer_outside_the_cache_is_empty = suites.DecodeKV.test_traced_layer_outside_the_cache_is_empty


CASES = [
    ((128, 128), 8, 4, 1, 64, {}),
    ((128, 128), 32, 1, 1, 16, {"window": 1000}),
    ((64, 64), 8, 8, 1, 256, {"logit_cap": 30.0}),
    ((192, 128), 4, 40, 2, 32, {}),
    ((256, 256), 4, 4, 3, 128, {"window": 100, "logit_cap": 30.0}),
]
"""Sizes of an entry, heads, queries per head, query tokens, tokens per block, options."""


SMALL, LARGE = ((128, 128), 8, 8, 2, 16, {"window": 100}), ((256, 128), 2, 5, 1, 256, {"logit_cap": 30.0})
LARGEST, SMALLEST = ((256, 256), 2, 5, 1, 256, {}), ((64, 64), 8, 8, 1, 64, {})
QUANTISED = [
    *(further("fp8", SMALL), further("fp8", LARGE), further("int8", SMALL), ("int8", LARGE)),
    *map(further, ("nvfp4", "nvfp4"), (SMALL, LARGEST)),
    *map(further, ("fp8", "int8"), (SMALLEST, SMALLEST)),
]
"""The same by format."""


@pytest.mark.parametrize(("form", "case"), QUANTISED)
def test_quantised_heads_lower_for_hopper(form, case):
    assert_lowers(form, "LBHNC", case)


@pytest.mark.parametrize(("form", "sizes", "heads", "name"), APART)
def test_quantised_heads_that_lie_apart_lower_for_hopper(form, sizes, heads, name):
    assert_lowers(form, name, (sizes, heads, 2, 2, 16, {"window": 100}))


@each_value(("order", "case"), jaxkv.ORDERS, CASES, default=2)
def test_lowers_for_hopper(order, case):
    assert_lowers("bf16", order, case)


@pytest.mark.parametrize(
    ("form", "ahead", "trailing"),
    [further("bf16", 3, True), slow("bf16", None, True), slow("bf16", 3, False), further("int8", 3, True)],
)
def test_windows_of_both_sides_lower_for_hopper(form, ahead, trailing):
    case = (128, 128), 2, 4, 4, 64, {"window": 100, "ahead": ahead}
    assert_lowers(form, "BLNHC", case, trailing=jax.ShapeDtypeStruct((4,), jnp.int32) if trailing else None)


@pytest.mark.parametrize("name", [further(STRIDES_APART), *OTHERS_APART])
def test_keys_and_values_that_lie_apart_lower_for_hopper(name):
    assert_lowers("bf16", name, CASES[0])


def assert_lowers(form, name, case, trailing=None):
    sizes, heads, group, tokens, block_size, keywords = case
    entry = jaxkv.KVEntry(form, *sizes)
    layout = layout_of(name, entry, num_layers=32, num_blocks=4096, block_size=block_size, num_heads=heads)
    shape, buffer = jax.ShapeDtypeStruct, suites.scenes.shapes_of(layout).buffer
    arrays = (
        shape((4, tokens, heads * group, sizes[0]), jnp.bfloat16),
        buffer,
        shape((4, 9), jnp.int32),
        shape((4,), jnp.int32),
        shape((), jnp.int32),
        shape((), jnp.float32),
        *((shape((), jnp.float32), shape((heads,), jnp.float32)) if entry.codec.scaled else (None, None)),
        trailing,
    )
    options = {"pages": layout.pages, "entry": entry, "logit_cap": None, "window": None, "ahead": 0, **keywords}
    options |= {"plan": None, "tree": None, "mask": None}
    names = ("q", "buffer", "block_tables", "seq_lens", "layer", "scale", "k_scale", "v_scale", "trailing")
    decode = kernels.called(MosaicGPU(), "decode_kv", names, **options)
    traced = jax.jit(decode).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    *_, attention, combining = kernel_operands(text)
    # Planning reads the lengths early, and combining reads the split requests: request, first split, number of splits.
    assert read_early(traced.jaxpr) == [[], [], [], 3 * [(4, 3)]]
    assert combining[3] == attention[-1]  # the plan's, so combine may read them early
    for operation in ("concatenate", "transpose", "pad", "dynamic_slice"):
        for argument, _ in enumerate(jax.tree.leaves(buffer), 1):
            assert f"stablehlo.{operation} %arg{argument}" not in text  # the cache goes in as it is


ENTRY, INT8 = jaxkv.KVEntry("bf16", 64), jaxkv.KVEntry("int8", 128)
INT8_APART = {name: suites.layout_of(name, INT8, num_heads=2) for name in suites.scenes.APART}
DENSE = dict(num_layers=3, num_blocks=4, block_size=64, num_heads=2, entry=ENTRY)
REFUSED = {
    "entries of format 'f32'": jaxkv.CacheLayout(**{**DENSE, "entry": jaxkv.KVEntry("f32", 64)}),
    "entries of 80 + 80 values": jaxkv.CacheLayout(**{**DENSE, "entry": jaxkv.KVEntry("bf16", 80)}),
    "blocks of 48 tokens": jaxkv.CacheLayout(**{**DENSE, "block_size": 48}),
    "block stride of 98312 bytes: supports multiples of 16": jaxkv.CacheLayout(**DENSE, block_padding=4),
    "token stride of 516 bytes: supports multiples of 16": jaxkv.CacheLayout.from_strides(
        **DENSE, strides=dict(layer=258 * 64, block=258 * 64 * 3, head=128, token=258), size=258 * 64 * 12
    ),
    "offset of 2 bytes: supports multiples of 16": jaxkv.CacheLayout.from_strides(
        **DENSE, strides=dict(layer=256 * 64, block=256 * 64 * 3, head=128, token=256), size=256 * 64 * 13, offset=1
    ),
    "buffer of 393218 bytes: supports multiples of 16": jaxkv.CacheLayout.from_strides(
        **DENSE, strides=dict(layer=256 * 64, block=256 * 64 * 3, head=128, token=256), size=256 * 64 * 12 + 1
    ),
    "a buffer of 21474836480 elements whose strides are multiples of 8 only": jaxkv.CacheLayout.from_strides(
        **DENSE, strides=dict(layer=256 * 64, block=2**32 + 8, head=128, token=256), size=5 * 2**32
    ),
    "token stride of 132 bytes: supports multiples of 16": INT8_APART["keys and values in halves of blocks"],
    "value token stride of 264 bytes: supports multiples of 16": INT8_APART["values before keys"],
    "value offset of 221192 bytes: supports multiples of 16": jaxkv.CacheLayout.from_strides(
        **{**DENSE, "entry": INT8},
        value_offset=288 * 64 * 12 + 8,
        size=2 * 288 * 64 * 12 + 16,
        strides=dict(layer=288 * 64, block=288 * 64 * 3, head=132, token=288),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_explain_reports_why_a_layout_is_unsupported(reason):
    layout = REFUSED[reason]
    q = jax.ShapeDtypeStruct((1, 4, layout.entry.sizes[0]), layout.entry.input_dtype)
    tables, lengths = jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    with interpreting(True):
        found = jaxkv.explain(jaxkv.decode_kv, q, cache, tables, lengths, layer=0, scale=1.0)
        assert found.chosen != "mosaic_gpu"
        assert any(given.startswith(reason) for given in found.reasons["mosaic_gpu"]), found
