"""`decode_kv` on Blackwell: interpreted on any machine; the whole suites on a Blackwell GPU (`-m gpu`).

It has not run on a GPU.  `.ci/cubins` compiles it.
"""

from functools import partial

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
from support.hopper import lowering_for, on_blackwell

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN is what stands in the way

SIZES = [(64, 64), (128, 128), (192, 128), (256, 256)]
STRIDES_APART = "values with strides of their own"


@pytest.fixture
def blackwell(interpreted):
    """Kernels are those for Blackwell, in Pallas's GPU interpreter, and none of them races."""
    with assumed_capability("10.0"):
        yield


class Blackwell:
    """What the suites of this kernel say of themselves."""

    implementation = "mosaic_gpu"
    head_dim, value_dim = 128, 64
    exact = "bf16"
    gaps = (
        "entries of",  # bf16 and f16 only, in a few sizes
        "token stride of",  # TMA copies from multiples of 16 bytes
        "value token stride of",
        "head stride of",
        "value head stride of",
        "`q` of",  # queries of another dtype than the entries
        "blocks of",  # TMA tiles are of whole 16-token pages
        "`mask`, a function",  # without intervals
        "`logit_cap` of",  # too large for tanh by way of exp2
        "keys of format",  # with values of another
    )

    def case(self, lengths, heads, group, tokens=1, *, form="bf16", layout="BLNHC", layer=1, block_size=64, **keywords):
        """Checks one call."""
        entry = self.entry(form)
        scene = suites.scenes.scene(entry, num_heads=heads, lengths=lengths, block_size=block_size)
        found = suites.layout_of(layout, entry, num_heads=heads, block_size=block_size)
        q = self.query(entry, len(lengths), tokens, heads * group)
        return self.check(q, scene.cache(found, layer), scene, layer, **keywords)


@on_blackwell
class TestDecodeKV(Blackwell, suites.DecodeKV):
    """The whole suite, on the GPU."""


@on_blackwell
class TestKVTreeMasks(Blackwell, suites.KVTreeMasks):
    """The whole suite, on the GPU."""


@on_blackwell
class TestWindowsOfBothSides(Blackwell, suites.KVWindowsOfBothSides):
    """The whole suite, on the GPU."""


@pytest.mark.usefixtures("blackwell")
class TestInterpreted(Blackwell, suites.DecodeKVChecks):
    """Numerics, barriers and races of a few telling cases, each of which takes the interpreter seconds."""

    def test_heads_in_the_row_and_lengths_round_the_edges(self):
        self.case((0, 1, 64, 65, 130), 2, 4)

    @pytest.mark.parametrize(
        ("order", "padded"),
        [
            ("BLNHC", False),
            *(further(order, False) for order in jaxkv.ORDERS if order != "BLNHC"),
            *(further(order, True) for order in jaxkv.ORDERS),
        ],
    )
    def test_equals_the_packed_cache_and_the_oracle(self, order, padded):
        """NaN in unused slots, and numbers of no block in tables."""
        entry = self.entry()
        scene = suites.scenes.scene(entry, num_heads=2, lengths=(0, 1, 130))
        layout = suites.layout_of(order, entry, num_heads=2)
        if padded:
            sizes = {name: getattr(layout, name) for name in ("num_layers", "num_blocks", "block_size", "num_heads")}
            layout = jaxkv.CacheLayout(**sizes, entry=entry, order=order, block_padding=48)
        q = self.query(entry, 3, 2, 6)
        found = self.check(q, scene.cache(layout, 1), scene, 1)
        for a, b in zip(found, self.decode(q, scene.twin(layout), scene, 0), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize(
        "name", [STRIDES_APART, *(further(name) for name in suites.scenes.APART if "strides" not in name)]
    )
    def test_keys_and_values_that_lie_apart(self, name):
        self.check_layout(name, jaxkv.KVEntry("bf16", 128, 64), lengths=(0, 1, 200))

    def test_heads_outside_the_block(self):
        self.case((200, 129), 2, 1, layout="LHBNC", form="f16")

    @pytest.mark.parametrize(("lengths", "group"), [((700, 0, 64), 3), further((900,), 16)])
    def test_split_requests(self, lengths, group):
        self.case(lengths, 1, group)

    def test_several_tiles_of_rows_of_several_tokens(self):
        self.case((3, 140), 1, 43, 3, layout="LBHNC", layer=2)

    @pytest.mark.parametrize("layout", ["BHLNC", further("gaps, offset"), further("packed, uint8")])
    def test_small_pages_and_a_cap(self, layout):
        self.case((77,), 2, 2, block_size=16, layout=layout, logit_cap=2.0)

    @pytest.mark.ci
    @pytest.mark.parametrize("sizes", SIZES)
    def test_sizes_of_heads(self, sizes, monkeypatch):
        monkeypatch.setattr(self, "head_dim", sizes[0])
        monkeypatch.setattr(self, "value_dim", sizes[1])
        self.case((600, 200), 1, 2, window=500)

    @pytest.mark.parametrize("tokens", [2, further(70)])
    def test_a_window_whose_edges_lie_inside_tiles(self, tokens):
        self.case((500, 70, 30), 1, 2, tokens, block_size=128, window=200)

    @pytest.mark.parametrize(
        ("lengths", "tokens", "window"), [further((300, 70, 3), 5, (100, 2)), slow((140, 3), 70, (-1, 40))]
    )
    def test_a_window_of_both_sides(self, lengths, tokens, window):
        self.case(lengths, 1, 2, tokens, window=window, causal=False)

    @pytest.mark.parametrize(
        "keywords",
        [
            further({"tree_mask": np.stack([np.eye(3, dtype=bool), np.tri(3, dtype=bool)])}),
            slow({"mask": masks.Chunked(64)}),
        ],
    )
    def test_masks(self, keywords):
        self.case((130, 2), 2, 1, 3, **keywords)

    @pytest.mark.ci
    def test_more_work_tiles_than_a_cta_has_stages(self):
        self.case((1, 66, 0, 3, 0) * 4, 1, 2, 3)

    @pytest.mark.ci
    def test_keys_of_very_low_scores_count(self):
        self.check_low_scores("BLNHC", 8, lengths=(0, 1, 600))  # the last is split

    @pytest.mark.parametrize("window", [None, further(20)])
    def test_blocks_outside_the_cache_are_masked(self, window):
        suites.DecodeKV.test_blocks_outside_the_cache_are_masked(self, window)

    @pytest.mark.ci
    @pytest.mark.parametrize("window", [None, slow(70)])
    def test_lengths_outside_the_table(self, window):
        suites.DecodeKV.test_lengths_outside_the_table_are_clamped_to_it(self, window)

    @pytest.mark.parametrize("value", [jnp.nan, slow(jnp.inf)])
    def test_keys_that_a_query_does_not_see(self, value):
        suites.DecodeKV.test_keys_that_a_query_does_not_see_do_not_matter(self, value)

    test_traced_layer_outside_the_cache_is_empty = suites.DecodeKV.test_traced_layer_outside_the_cache_is_empty
    test_sinks = pytest.mark.ci(suites.DecodeKV.test_sinks)
    test_ragged_query_tokens = pytest.mark.slow(suites.DecodeKV.test_ragged_query_tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("blackwell")
class TestInterpretedSuite(Blackwell, suites.DecodeKV):
    """The whole suite, which takes the interpreter minutes."""


@pytest.mark.parametrize("sizes", [SIZES[1], *map(further, (SIZES[0], *SIZES[2:]))])
def test_lowers_for_blackwell(sizes):
    """Layouts, swizzles and budgets, which the interpreter does not know.  `.ci/cubins` compiles heads of 128."""
    entry = jaxkv.KVEntry("bf16", *sizes)
    layout = jaxkv.CacheLayout(num_layers=3, num_blocks=4096, block_size=32, num_heads=2, entry=entry)
    shape = jax.ShapeDtypeStruct
    cache = jaxkv.KVCache(shape((layout.size,), layout.dtype), layout)
    arguments = shape((4, 10, sizes[0]), jnp.bfloat16), cache, shape((4, 9), jnp.int32), shape((4,), jnp.int32)
    options = {"layer": 1, "scale": 0.1, "window": 100, "logit_cap": 30.0, "implementation": "mosaic_gpu"}
    with lowering_for("10.0"):
        lowered = jax.jit(partial(jaxkv.decode_kv, **options)).trace(*arguments).lower(lowering_platforms=("cuda",))
    kernels = [line for line in lowered.as_text().splitlines() if "custom_call @mosaic_gpu" in line]
    assert ["tcgen05" in kernel for kernel in kernels] == [False, False, True, False]  # two plan, and the last combines


REFUSED = {
    "entries of format 'int8' on Blackwell: supports bf16 and f16": dict(entry=jaxkv.KVEntry("int8", 128)),
    "entries of format 'f32'": dict(entry=jaxkv.KVEntry("f32", 128)),
    "entries of 96 + 96 values: supports 64, 128, 192 and 256 of each": dict(entry=jaxkv.KVEntry("bf16", 96)),
    "blocks of 61 tokens": dict(block_size=61),
    "block stride of": dict(block_padding=4),
}


def reasons_against(operation, **changes):
    """Why the kernels for Blackwell do not run a call."""
    sizes = dict(num_layers=3, num_blocks=4, block_size=64, num_heads=2, entry=jaxkv.KVEntry("bf16", 128))
    layout = jaxkv.CacheLayout(**{**sizes, **changes})
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    tables, lengths = jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    with interpreting(True), assumed_capability("10.0"):
        if operation is jaxkv.plan_decode:
            found = jaxkv.explain(operation, cache, tables, lengths, num_heads=16)
        else:
            q = jax.ShapeDtypeStruct((1, 16, layout.entry.head_dim), layout.entry.input_dtype)
            found = jaxkv.explain(operation, q, cache, tables, lengths, layer=0, scale=1.0)
    return found.reasons["mosaic_gpu"]


@pytest.mark.parametrize("operation", [jaxkv.decode_kv, jaxkv.plan_decode])
@pytest.mark.parametrize("reason", REFUSED)
def test_explain_reports_why_a_layout_is_unsupported(operation, reason):
    assert reasons_against(operation) == ()
    assert any(given.startswith(reason) for given in reasons_against(operation, **REFUSED[reason]))


def test_hopper_keeps_its_kernels():
    entry = jaxkv.KVEntry("bf16", 128)
    assert type(decode.schedule_of(entry, 8)).__name__ == "GQA"
    with assumed_capability("10.3"):
        assert type(decode.schedule_of(entry, 8)).__name__ == "GQABlackwell"
