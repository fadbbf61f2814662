"""Mosaic GPU kernels that copy: lowered for CUDA and interpreted on any machine; the whole suites on a Hopper GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.runtime.device import BULK_COPIES, interpreting
from support import kernels, suites
from support.available import assume_available
from support.cases import further, on_layouts, slow
from support.compare import assert_same_bits
from support.hopper import large, on_gpus, read_early
from support.suites.gathers import OF_144_BYTES
from support.suites.states import PLAIN as PLAIN_STATE

MLA, KV = jaxkv.MLAEntry("bf16"), jaxkv.KVEntry("bf16", head_dim=128)
ONE_ARRAY = suites.scenes.ONE_ARRAY
UNEVEN, FP8 = jaxkv.KVEntry("f16", head_dim=16, value_dim=8), jaxkv.KVEntry("fp8", head_dim=16, value_dim=8)
lying_apart = pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("keys and values in halves of blocks", KV),
        ("values with strides of their own", UNEVEN),
        *(further(name, KV) for name in ONE_ARRAY if name != "keys and values in halves of blocks"),
        *(further(name, FP8) for name in ONE_ARRAY),
        further("two arrays", UNEVEN),
        further("two arrays with strides of their own", FP8),
        further("values before keys", jaxkv.KVEntry("int8", 16)),
        further("values with strides of their own", jaxkv.KVEntry("nvfp4", 64)),
    ],
)
"""Keys and values in planes, or in an array each, copied and converted."""


class Mosaic:
    """What every suite of these kernels says of itself."""

    implementation = "mosaic_gpu"


@on_gpus(BULK_COPIES)
class TestWrites(Mosaic, suites.Writes, suites.RotatedWrites, suites.WritesInScans):
    """The whole suite, on the GPU."""

    gaps = (
        "entries of format",
        "keys of format",  # with values of another
        "part of",  # values that are none, or not multiples of 8
        "keys and values of format 'fp8' that lie apart",
        "entries at multiples of 2 bytes",  # of nvfp4 that lie apart, at odd places
    )


@on_gpus(BULK_COPIES)
class TestWriteEntries(Mosaic, suites.WriteEntries):
    """The whole suite, on the GPU."""

    gaps = ("part of", "split pages", "keys and values of format")


@on_gpus(BULK_COPIES)
class TestGathers(Mosaic, suites.Gathers, suites.GatherEntries):
    """The whole suite, on the GPU."""

    gaps = (*TestWrites.gaps, "split pages")


@on_gpus(BULK_COPIES)
class TestReads(Mosaic, suites.Reads):
    """The whole suite, on the GPU."""

    gaps = (*TestWrites.gaps, "no slots")


@on_gpus(BULK_COPIES)
class TestBlocks(Mosaic, suites.Blocks, suites.BlocksInScans):
    """The whole suite, on the GPU."""


def layouts_of(entry):
    """Parametrises `name` with the layouts that differ; half of them are `further`."""
    names = suites.scenes.layout_names(entry)
    return pytest.mark.parametrize("name", [further(name) if i % 2 else name for i, name in enumerate(names)])


class StatesOnLayouts(Mosaic, suites.StateChecks):
    """States of whole units of 16 bytes, on every kind of address."""

    @layouts_of(PLAIN_STATE)
    def test_layouts(self, name):
        layout = suites.layout_of(name, PLAIN_STATE, block_size=3)
        self.check_write(layout, 1, self.slots(layout))
        self.check_read(layout, 1, [*self.slots(layout), *self.slots(layout)[:3]])

    @pytest.mark.parametrize("name", ["BLNHC", "packed, uint8"])
    def test_states_of_several_chunks(self, name):
        """One of 33,808 bytes, which is a chunk and a part of one, and one of 2 bytes per value."""
        entry = jaxkv.StateEntry({"conv": ((3, 8), "bfloat16"), "ssm": ((4, 2113), "float32")})
        layout = suites.layout_of(name, entry, num_blocks=4, block_size=1)
        self.check_write(layout, 2, self.slots(layout, count=3))
        self.check_read(layout, 2, self.slots(layout, count=3))


@on_gpus(BULK_COPIES)
class TestStates(StatesOnLayouts, suites.States):
    """The whole suite, on the GPU."""

    gaps = ("array",)  # of states that are not whole units of 16 bytes


@pytest.mark.usefixtures("interpreted")
class TestInterpretedStates(StatesOnLayouts):
    """The interpreter's word."""

    test_traced_layer = suites.States.test_traced_layer_outside_the_cache_writes_nothing_and_reads_zeros
    test_no_states = suites.States.test_no_states


@on_gpus(BULK_COPIES)
class TestLargeCaches(Mosaic, suites.LargeCaches):
    """The whole suite, on the GPU."""


@pytest.mark.usefixtures("interpreted")
class TestInterpretedWrites(Mosaic, suites.WriteChecks):
    """The interpreter's word on every kind of address."""

    @layouts_of(MLA)
    def test_latents(self, name):
        layout = suites.layout_of(name, MLA, block_size=16)
        self.check(layout, 1, self.slots(layout, np.random.default_rng(0)), "nan")

    @pytest.mark.parametrize(("name", "heads"), [("BLNHC", 4), ("LBHNC", 2), ("BHLNC", 3), ("packed, uint8", 1)])
    def test_keys_and_values(self, name, heads):
        layout = suites.layout_of(name, jaxkv.KVEntry("f16", head_dim=16, value_dim=8), num_heads=heads, block_size=16)
        self.check(layout, 2, self.slots(layout, np.random.default_rng(0), count=33), "random")

    @lying_apart
    def test_keys_and_values_that_lie_apart(self, name, entry):
        layout = suites.layout_of(name, entry, num_heads=2, block_size=16)
        self.check(layout, 2, self.slots(layout, np.random.default_rng(0), count=33), "random")

    test_traced_layer_outside_the_cache_writes_nothing = (
        suites.Writes.test_traced_layer_outside_the_cache_writes_nothing
    )
    test_no_tokens = suites.Writes.test_no_tokens


@pytest.mark.usefixtures("interpreted")
class TestInterpretedGathers(Mosaic, suites.GatherChecks):
    """Likewise, with first tokens that are not 0, requests without tokens, and rows without a token."""

    def case(self, name, entry, heads, lengths=(0, 2, 17, 0, 21), runs=((0, 0), (1, 2), (15, 17), (0, 0), (3, 21))):
        scene = suites.scenes.scene(entry, num_heads=heads, lengths=lengths, block_size=16)
        self.check(scene, suites.layout_of(name, entry, num_heads=heads, block_size=16), 1, runs)

    @layouts_of(MLA)
    def test_latents(self, name):
        self.case(name, MLA, 1)

    @pytest.mark.parametrize(
        ("name", "heads"), [slow("BLNHC", 4), slow("LBHNC", 2), ("BHLNC", 3), ("packed, uint8", 1)]
    )
    def test_keys_and_values(self, name, heads):
        self.case(name, jaxkv.KVEntry("f16", head_dim=16, value_dim=8), heads)

    @lying_apart
    def test_keys_and_values_that_lie_apart(self, name, entry):
        self.case(name, entry, 2)

    def test_many_requests(self):
        rng = np.random.default_rng(0)
        lengths = tuple(int(n) for n in rng.integers(0, 2, 20))
        self.case("BLNHC", jaxkv.MLAEntry("f32", 16, 4), 1, lengths, [(0, n) for n in lengths])

    test_tokens_outside = suites.Gathers.test_tokens_outside_the_table_or_the_cache_are_zero
    test_tokens_past_the_table = suites.Gathers.test_tokens_past_the_table_are_zero


@pytest.mark.usefixtures("interpreted")
class TestInterpretedReads(Mosaic, suites.ReadChecks):
    """By the kernels of gathers, with a request per slot."""

    @pytest.mark.parametrize("name", ["packed, uint8", slow("gaps, offset")])
    def test_latents(self, name):
        scene = suites.scenes.scene(MLA, block_size=16, lengths=(0, 2, 17, 0, 21))
        self.check(scene, suites.layout_of(name, MLA, block_size=16), 1, count=13)


@pytest.mark.usefixtures("interpreted")
class TestInterpretedWriteEntries(Mosaic, suites.WriteEntriesChecks):
    """Bytes of entries."""

    @pytest.mark.parametrize(
        ("entry", "name"),
        [(OF_144_BYTES, "packed, uint8"), slow(suites.scenes.KV_ENTRIES[0], "BHLNC")],
    )
    def test_stores_the_bytes(self, entry, name):
        self.check_bytes(entry, name)


@pytest.mark.usefixtures("interpreted")
class TestInterpretedGatherEntries(Mosaic, suites.GatherEntriesChecks):
    """Bytes of entries."""

    @pytest.mark.parametrize(
        ("entry", "name"),
        [(OF_144_BYTES, "packed, uint8"), slow(suites.scenes.KV_ENTRIES[0], "BHLNC")],
    )
    def test_returns_the_bytes(self, entry, name):
        self.check_bytes(entry, name, block_size=16, lengths=(0, 2, 17, 0, 21))

    test_bytes_outside = suites.GatherEntries.test_bytes_outside_the_table_or_the_cache_are_zero


@pytest.mark.usefixtures("interpreted")
class TestInterpretedBlocks(Mosaic, suites.BlockChecks):
    """Blocks of one run, of several, of runs longer than a chunk."""

    @layouts_of(MLA)
    def test_copy_and_travel(self, name):
        case = self.make(name, MLA, block_size=16, num_blocks=7)
        self.check_copy(*case)
        self.check_travel(*case)

    @pytest.mark.parametrize("name", [ONE_ARRAY[0], *map(further, [*ONE_ARRAY[1:], "two arrays"])])
    def test_keys_and_values_that_lie_apart(self, name):
        layout = suites.layout_of(name, UNEVEN, num_heads=2, num_blocks=7, block_size=4)
        before = suites.scenes.garbage(layout, np.random.default_rng(2), "random")
        self.check_copy(layout, before)
        self.check_travel(layout, before)

    @pytest.mark.parametrize("name", ["BLNHC", "packed, uint8"])
    def test_entries_of_any_width(self, name):
        self.check_copy(*self.make(name, suites.scenes.INDEXER_ENTRY, num_blocks=7))


def shape(*dims, dtype="int32"):
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def calls(layout):
    """Operation by name: the call of the kernel as a function of (buffer, *arrays), and those arrays."""
    entry, pages, heads, dtype = layout.entry, layout.pages, layout.num_heads, layout.entry.input_dtype
    if isinstance(entry, jaxkv.StateEntry):
        return calls_of_states(entry, pages)
    kind = {jaxkv.MLAEntry: "mla", jaxkv.KVEntry: "kv", jaxkv.IndexerEntry: "indexer_k"}[type(entry)]
    scale = jnp.ones(()) if entry.codec.scaled else None
    scales = {"mla": {"kv_scale": scale}, "kv": {"k_scale": scale, "v_scale": scale}, "indexer_k": {}}[kind]
    values = {"mla": ("kv_c", "k_pe"), "kv": ("k", "v"), "indexer_k": ("k",)}[kind]
    new = [shape(700, *(() if entry.one_head else (heads,)), n, dtype=dtype) for n in entry.sizes]
    ids, options = shape(9), dict(pages=pages, entry=entry, **scales)
    rotation = dict(cos_sin=None, interleaved=False) if kind == "mla" else {}
    gather = ("block_tables", "cu_seq_lens", "seq_starts", "layer")
    return {
        f"write_{kind}": (
            called(f"write_{kind}", (*values, "slot_mapping", "layer"), **options, **rotation),
            [*new, shape(700), shape()],
        ),
        f"gather_{kind}": (
            called(f"gather_{kind}", gather, **options, total=700, dtype=dtype),
            [shape(8, 16), shape(9), shape(8), shape()],
        ),
        "copy_blocks": (called("copy_blocks", ("src", "dst"), pages=pages), [ids, ids]),
        "read_blocks": (called("read_blocks", ("blocks",), pages=pages), [ids]),
        "write_blocks": (
            called("write_blocks", ("blocks", "data"), pages=pages),
            [ids, shape(9, pages.block_elements, dtype=layout.dtype)],
        ),
    }


def called(operation, names, **static):
    """The kernel's call as a function of (buffer, *arrays)."""
    return kernels.called(MosaicGPU(), operation, ("buffer", *names), **static)


def calls_of_states(entry, pages):
    """The same for states."""
    states = {name: shape(9, *size, dtype=dtype) for name, size, dtype in entry.arrays}
    options = {"pages": pages, "entry": entry}
    return {
        "write_state": (called("write_state", ("states", "slots", "layer"), **options), [states, shape(9), shape()]),
        "read_state": (called("read_state", ("slots", "layer"), **options), [shape(9), shape()]),
    }


KERNELS = {"copy_blocks": 2, "write_state": 2, "read_state": 2}
"""Kernels that a call launches, where that is not one: pairs that must wait are written by a second, and the two arrays
of a state by one each."""


QUANTISED = [jaxkv.MLAEntry("fp8_ds_mla"), jaxkv.KVEntry("fp8", head_dim=128), jaxkv.IndexerEntry()]


@on_layouts([MLA, KV, *QUANTISED, PLAIN_STATE], few=True)
def test_lowers_for_hopper_in_place(name, entry):
    check_lowering(name, entry)


@pytest.mark.parametrize(
    "name", [*map(further, [*ONE_ARRAY, "two arrays"]), slow("two arrays with strides of their own")]
)
def test_keys_and_values_that_lie_apart_lower_for_hopper_in_place(name):
    check_lowering(name, KV)


def check_lowering(name, entry):
    long_rows = "values before keys", "two arrays with strides of their own"  # in every view of the planes
    blocks = 64 if name in long_rows else 4096
    layout = suites.layout_of(name, entry, num_heads=1 if entry.one_head else 8, num_layers=61, num_blocks=blocks)
    buffer = suites.scenes.shapes_of(layout).buffer
    for operation, (call, arrays) in calls(layout).items():
        writes = not operation.startswith(("gather", "read"))
        jitted = jax.jit(call, donate_argnums=0 if writes else ())
        traced = jitted.trace(buffer, *arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        launched = re.findall(r"custom_call @mosaic_gpu.*", text)
        assert len(launched) == KERNELS.get(operation, 1), operation
        assert read_early(traced.jaxpr) == len(launched) * [[]]
        if writes:
            main = next(line for line in text.splitlines() if "@main" in line)
            for argument in range(len(jax.tree.leaves(buffer))):
                assert "tf.aliasing_output" in re.search(f"%arg{argument}: ([^%]*)", main)[1]
            assert all("output_operand_alias" in kernel for kernel in launched)
        assert large(text, layout.size) <= {
            "stablehlo.reshape",
            "stablehlo.custom_call",
            "stablehlo.optimization_barrier",
            "call",
        }
        assert not writes or large(text, layout.size)  # else the text of lowered programs has changed


REFUSED = {
    "part of 60 values: supports multiples of 8": (jaxkv.MLAEntry("fp8", 512, 60), {}),
    "entries of 2112 values: supports at most 2048": (jaxkv.MLAEntry("fp8", 2048, 64), {}),
    "entries at multiples of 2 bytes: supports multiples of 4": (jaxkv.MLAEntry("fp8"), dict(block_padding=6)),
    "part of 60 values of 120 bytes: supports multiples of 16": (jaxkv.MLAEntry("bf16", 512, 60), {}),
    "block stride of 221192 bytes: supports multiples of 16": (MLA, dict(block_padding=4)),
    "a token of 163968 bytes in all heads": (jaxkv.MLAEntry("bf16", 81920, 64), {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_explain_reports_unsupported_entries(reason):
    entry, more = REFUSED[reason]
    layout = jaxkv.CacheLayout(num_layers=3, num_blocks=4, block_size=64, entry=entry, **more)
    cache = jaxkv.KVCache(shape(layout.size, dtype=layout.dtype), layout)
    scale = {"kv_scale": 1.0} if entry.codec.scaled else {}
    new = [shape(5, n, dtype="bfloat16") for n in entry.sizes]
    with interpreting(True):
        write = jaxkv.explain(jaxkv.write_mla, cache, *new, shape(5), layer=0, **scale)
        gather = jaxkv.explain(jaxkv.gather_mla, cache, shape(2, 4), shape(3), layer=0, total=9, **scale)
    for found in (write, gather):
        assert found.chosen != "mosaic_gpu"
        assert found.reasons["mosaic_gpu"][0].startswith(reason), found


def test_explain_reports_unsupported_blocks():
    sizes = dict(num_layers=3, num_blocks=4, block_size=63, entry=jaxkv.IndexerEntry())
    for order, reason in {
        "BLNHC": "run of a block of 24948 bytes: supports multiples of 16",
        "LBNHC": "run of a block of 8316 bytes: supports multiples of 16",
    }.items():
        layout = jaxkv.CacheLayout(**sizes, order=order)
        cache = jaxkv.KVCache(shape(layout.size, dtype=layout.dtype), layout)
        with interpreting(True):
            found = jaxkv.explain(jaxkv.read_blocks, cache, shape(3))
        assert found.chosen != "mosaic_gpu"
        assert found.reasons["mosaic_gpu"][0] == reason


LATENTS, ROPE, SLOTS = (65, 512), (65, 64), (65,)
"""Shapes, of which the kernel is given all but the first row."""


def written_but_the_first(buffer, latents, rope, slots, layout):
    cache = jaxkv.KVCache(buffer, layout)
    parts = latents[1:], rope[1:], slots[1:]
    return jaxkv.write_mla(cache, *parts, layer=0, implementation="mosaic_gpu").buffer


def test_slices_that_mosaic_would_reject_are_copied(monkeypatch):
    """XLA would pass all three without a copy; they begin at 1,024, 128 and 4 bytes."""
    assume_available(monkeypatch, "mosaic_gpu")
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=64, entry=MLA)
    shapes = [(shape, jnp.bfloat16) for shape in ((layout.size,), LATENTS, ROPE)] + [(SLOTS, jnp.int32)]
    traced = jax.jit(written_but_the_first, static_argnames="layout").trace(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes), layout=layout
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    copied = re.findall(r"optimization_barrier .* : tensor<64x(.*)>", text)
    assert sorted(copied) == ["64xbf16", "i32"]


@on_gpus(BULK_COPIES)
def test_slices_are_written():
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=64, entry=MLA)
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in (LATENTS, ROPE)]
    slots = jnp.asarray(rng.permutation(128)[:65].astype(np.int32))
    found = jax.jit(written_but_the_first, static_argnames="layout")(
        jnp.zeros(layout.size, layout.dtype), *values, slots, layout=layout
    )
    right = jaxkv.write_mla(jaxkv.KVCache.zeros(layout), *(x[1:] for x in (*values, slots)), layer=0)
    assert_same_bits(found, right.buffer)
