"""The recipe "add an entry format", followed: the class below is all that a new format needs to work on XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.patches import Rectangle

import jaxkv
from jaxkv.layout.describe import bands
from jaxkv.support import format_table, support_matrix
from jaxkv_kernels.formats import FORMATS, Format, register
from jaxkv_kernels.formats.bits import corrected_quotient, largest_magnitude, power_of_two_scale
from jaxkv_kernels.formats.format import join, split_by_page, together
from support import oracle, scenes, suites
from support.cases import further

LARGEST, SMALLEST_EXPONENT = 127, -126


class Int8(Format):
    """int8 values and one float32 scale per entry, a power of two."""

    name = "toy8"
    kinds = (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry)
    dtype = "uint8"

    def fields(self, sizes, block_size):
        return together(*self._fields(sizes))

    def _fields(self, sizes):
        if sum(sizes.values()) % 4:
            raise ValueError(f"toy8 stores a multiple of 4 values, which keeps scales aligned; got {sizes}")
        return *((name, "int8", count) for name, count in sizes.items()), ("scale", "float32", 1)

    def encode(self, values, scales):
        values = [x.astype(jnp.float32) for x in values]
        amax = largest_magnitude(jnp.concatenate(values, axis=-1))[..., None]
        scale, _ = power_of_two_scale(amax, SMALLEST_EXPONENT, LARGEST)
        quotients = [jnp.nan_to_num(corrected_quotient(x, scale)) for x in values]
        stored = [jnp.clip(jnp.round(x), -LARGEST, LARGEST).astype(jnp.int8) for x in quotients]
        return join([*stored, scale], self.dtype)

    def decode(self, row, sizes, scales, dtype):
        *values, scale = (field.read(row) for field in self.fields(sizes, 1))
        return [(x.astype(jnp.float32) * scale).astype(dtype) for x in values]


class Int8Pages(Int8):
    """The same in split pages: all latents, then all rotary parts, then all scales."""

    name = "toy8_pages"
    kinds = (jaxkv.MLAEntry,)

    def fields(self, sizes, block_size):
        return split_by_page(block_size, *([field] for field in self._fields(sizes)))


def _encode(parts, scales):
    amax = np.abs(np.concatenate(parts, axis=-1)).max(axis=-1, keepdims=True).astype(np.float64)
    scale = np.exp2(np.clip(np.ceil(np.log2(amax / 127)), -126, 122))  # 122 is the scale of all values above 2**128
    quotients = (np.nan_to_num(part / scale) for part in parts)
    return *(np.clip(np.round(x), -127, 127).astype(np.int8) for x in quotients), scale.astype(np.float32)


def _decode(field, sizes, scales):
    scale = field(sum(sizes), 1, np.float32)
    return [field(sum(sizes[:i]), size, np.int8) * scale for i, size in enumerate(sizes)]


TOYS = {
    Int8(): oracle.Truth(_encode, _decode),
    Int8Pages(): oracle.Truth(_encode, _decode, lambda entry: (*entry.sizes, 4)),
}
ENTRIES = {
    "latents": lambda: jaxkv.MLAEntry("toy8", latent=128, rope=16),
    "latents in pages": lambda: jaxkv.MLAEntry("toy8_pages", latent=128, rope=16),
    "keys and values": lambda: jaxkv.KVEntry("toy8", head_dim=16, value_dim=8),
    "indexer keys": lambda: jaxkv.IndexerEntry("toy8", head_dim=32),
}
LAYOUTS = ("LHBNC", "BLNHC padded", "packed, bfloat16", "gaps, offset")


@pytest.fixture(autouse=True)
def _toys():
    for toy, truth in TOYS.items():
        register(toy)
        oracle.FORMATS[toy.name] = truth
    yield
    for toy in TOYS:
        del FORMATS[toy.name], oracle.FORMATS[toy.name]


NOISE = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
ROWS = {
    "usual": NOISE,
    "denormal": NOISE * np.float32(1e-40),
    "zero": NOISE * 0,
    "huge": NOISE * np.float32(1e37),
    "ties": np.round(2 * NOISE) / 2,
    "infinite": np.where(np.arange(1024) == 3, np.float32(np.inf), NOISE),
    "invalid": np.where(np.arange(1024) == 3, np.float32(np.nan), NOISE),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", ENTRIES)
def test_encodes_to_the_bytes_of_the_oracle(kind, row):
    """As `tests/kernels/test_formats.py` checks formats that are registered: also for values of unusual magnitudes."""
    entry = ENTRIES[kind]()
    values = np.split(ROWS[row][None, : sum(entry.sizes)], np.cumsum(entry.sizes)[:-1], axis=-1)
    with np.errstate(divide="ignore"):
        right = oracle.encode(entry, values)
    found = jax.jit(lambda values: entry.encode(values, [None] * len(values)))(values)
    np.testing.assert_array_equal(found, right)


def on_layouts(*kinds):
    """Parametrises `kind` and `name`; tokens of split pages cannot lie apart."""
    cases = [(kind, name) for kind in kinds for name in LAYOUTS if (kind, name) != ("latents in pages", "gaps, offset")]
    some = [case if case[1] in LAYOUTS[1:3] else further(*case) for case in cases]
    return pytest.mark.parametrize(("kind", "name"), some)


def make(kind, name):
    """An entry of a toy format, its heads, and a layout."""
    entry = ENTRIES[kind]()
    heads = 1 if entry.one_head else 2
    return entry, heads, suites.layout_of(name, entry, num_heads=heads)


class TestWrites(suites.WriteChecks):
    implementation = "xla"

    @on_layouts(*ENTRIES)
    def test_stores_the_encoders_bytes_and_touches_nothing_else(self, kind, name):
        _, _, layout = make(kind, name)
        self.check(layout, 1, self.slots(layout, np.random.default_rng(0)), "random")


class TestGathers(suites.GatherChecks):
    implementation = "xla"

    @on_layouts(*ENTRIES)
    def test_equals_the_packed_cache_and_the_oracle(self, kind, name):
        entry, heads, layout = make(kind, name)
        self.check(scenes.scene(entry, num_heads=heads), layout, 1)


class TestDecodeMLA(suites.DecodeMLAChecks):
    implementation = "xla"

    @on_layouts("latents", "latents in pages")
    def test_agrees_with_the_oracle(self, kind, name):
        entry, _, layout = make(kind, name)
        scene = scenes.scene(entry)
        self.check(suites.queries(entry, len(scene.lengths), 2, 3), scene.cache(layout, 1), scene, 1)


class TestDecodeMLASparse(suites.DecodeMLASparseChecks):
    implementation = "xla"

    @on_layouts("latents", "latents in pages")
    def test_agrees_with_the_oracle(self, kind, name):
        entry, _, layout = make(kind, name)
        scene = scenes.scene(entry, lengths=(190, 64, 1))
        slots = self.choose(scene, 2, 32, np.random.default_rng(0))
        self.check(suites.queries(entry, 3, 2, 3), scene.cache(layout, 1), slots, 1, scene)


class TestDecodeKV(suites.DecodeKVChecks):
    implementation = "xla"

    @on_layouts("keys and values")
    def test_agrees_with_the_oracle(self, kind, name):
        entry, heads, layout = make(kind, name)
        scene = scenes.scene(entry, num_heads=heads)
        self.check(self.query(entry, len(scene.lengths), 2, 6), scene.cache(layout, 1), scene, 1)


class TestIndexer(suites.IndexerChecks):
    implementation = "xla"

    @on_layouts("indexer keys")
    def test_agrees_with_the_oracle(self, kind, name):
        entry, _, layout = make(kind, name)
        scene = scenes.scene(entry)
        self.check(*self.arguments(scene, 2, "bfloat16"), scene, layout, 1, 200)


class TestBlocks(suites.BlockChecks):
    implementation = "xla"

    @on_layouts("latents", "latents in pages", "keys and values")
    def test_copies_and_round_trips(self, kind, name):
        layout, before = self.make(name, ENTRIES[kind]())
        self.check_copy(layout, before)
        self.check_travel(layout, before)


def test_the_table_and_the_drawing_show_its_byte_map():
    sizes = {"num_layers": 2, "num_blocks": 3, "block_size": 4}
    whole = jaxkv.CacheLayout(**sizes, entry=ENTRIES["latents"]())
    assert "MLAEntry(format='toy8', latent=128, rope=16)" in str(whole)
    assert "148 bytes" in str(whole)
    last = bands({"": whole.describe()})[-1]
    assert [(piece.label, piece.detail, piece.start, piece.stop) for piece in last.pieces] == [
        ("latent", "128 x int8", 0, 128),
        ("rope", "16 x int8", 128, 144),
        ("scale", "1 x float32", 144, 148),
    ]
    pages = jaxkv.CacheLayout(**sizes, entry=ENTRIES["latents in pages"]())
    page, rest = bands({"": pages.describe()})[-2:]
    tokens = [f"token {i}" for i in range(4)]
    assert [piece.label for piece in page.pieces] == [*tokens, "rope", "scale"]
    assert [(piece.label, piece.start) for piece in rest.pieces] == [
        *zip(tokens, (512, 528, 544, 560), strict=True),
        *zip(tokens, (576, 580, 584, 588), strict=True),
    ]
    for layout in (whole, pages):
        drawn = [patch for patch in layout.draw().axes[0].patches if isinstance(patch, Rectangle)]
        assert len(drawn) == sum(len(band.pieces) for band in bands({"": layout.describe()}))


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_other_implementations_move_its_blocks_and_reject_all_else_with_a_reason(implementation):
    header, _, *rows = (line.strip("| ").split(" | ") for line in support_matrix().splitlines())
    column = next(i for i, name in enumerate(header) if f"`{implementation}`" in name)
    for name in FORMATS.keys() & {toy.name for toy in TOYS}:
        supported = {row[0].strip("`") for row in rows if name in row[column].split(", ")}
        # `triton` also stores and reads the bytes of any entry.
        of_bytes = {"write_entries", "gather_entries"} if implementation == "triton" else set()
        assert supported == {"copy_blocks", "read_blocks", "write_blocks"} | of_bytes
    entry, _, layout = make("latents", "LHBNC")
    values = [jnp.zeros((1, size)) for size in entry.sizes]
    found = jaxkv.explain(jaxkv.write_mla, jaxkv.KVCache.zeros(layout), *values, jnp.zeros(1, jnp.int32), layer=0)
    assert any("entries of format 'toy8'" in reason for reason in found.reasons[implementation])


def test_lists_of_formats_have_it():
    assert "toy8" in jaxkv.MLAEntry.formats
    assert "toy8_pages" not in jaxkv.KVEntry.formats
    assert "| `toy8` | `MLAEntry`, `KVEntry`, `IndexerEntry` | 580 for 512 + 64 values |" in format_table()
    assert jaxkv.IndexerEntry.for_latents("toy8", 128).format == "toy8"
    assert jaxkv.IndexerEntry.for_latents("toy8_pages", 128).format == "indexer_fp8"


def test_its_rules_are_reported():
    with pytest.raises(ValueError, match="multiple of 4 values"):
        jaxkv.MLAEntry("toy8", latent=13, rope=4)
    with pytest.raises(ValueError, match=r"KVEntry format 'toy8_pages': expected one of bf16, f16, f32, fp8, .*, toy8"):
        jaxkv.KVEntry("toy8_pages")
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 4, "entry": ENTRIES["latents in pages"](), "size": 8000}
    with pytest.raises(ValueError, match=r"all latent, then all rope, then all scale.*token stride"):
        jaxkv.CacheLayout.from_strides(**sizes, strides={"layer": 4000, "block": 4000, "head": 148, "token": 152})
