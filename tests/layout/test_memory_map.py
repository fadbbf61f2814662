"""The table and the memory map of a layout, against maps of every byte that are made without strides."""

import itertools
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.patches import Rectangle

from jaxkv.layout.describe import bands, table
from jaxkv.layout.draw import draw, svg
from jaxkv.layout.layout import AXES, ORDERS, CacheLayout
from jaxkv.layout.packed import Group, PackedLayout
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from support import scenes

COUNTS = {"L": 2, "B": 3, "H": 2, "N": 4}
BIG = {"num_layers": 61, "num_blocks": 4096, "block_size": 64, "entry": MLAEntry("bf16")}
PACKED = PackedLayout(
    num_blocks=64,
    block_size=64,
    groups={"latent": Group(8, MLAEntry("bf16")), "indexer": Group(8, IndexerEntry())},
)


PLANES = "keys", "values"


def described(groups):
    """What the table and the drawing are made from, of layouts by name."""
    return {name: layout.describe() for name, layout in groups.items()}


def make(order, entry, counts, padding=0):
    sizes = {"num_layers": counts["L"], "num_blocks": counts["B"], "num_heads": counts["H"], "block_size": counts["N"]}
    return CacheLayout(**sizes, entry=entry, order=order, block_padding=padding)


def bytes_of(order, entry, counts, padding=0):
    """The owner of every byte as a record of layer, block, head, token; -1 for padding.  Built from inside out."""
    record = np.dtype([(name, int) for name in ("group", "part", *AXES.values())])
    memory = np.zeros(entry.nbytes, record)
    for axis in reversed(order[:-1]):
        steps = []
        for i in range(counts[axis]):
            step = memory.copy()
            step[AXES[axis]] = np.where(step["group"] < 0, -1, i)
            hole = np.full(padding if axis == "B" else 0, -1).astype(record)
            steps.append(np.concatenate([step, hole]))
        if axis == "N" and isinstance(entry, IndexerEntry):
            values = entry.head_dim
            steps = [step[:values] for step in steps] + [step[values:] for step in steps]
        memory = np.concatenate(steps)
    return memory


def check(groups, memory):
    """That every row says of every byte in it what `memory` says."""
    names, seen = list(groups), set()
    for band in bands(described(groups)):
        coordinates = {axis: int(i) for axis, i in re.findall(r"(block|layer|head|token) (\d+)", band.title)}
        if band.group is not None:
            coordinates["group"] = names.index(band.group)
        if shown := re.search("(^| · )(keys|values)( · |$)", band.title):
            coordinates["part"] = PLANES.index(shown[2])
        low, high = band.pieces[0].start, band.pieces[-1].stop
        assert 0 <= low < high <= len(memory)
        assert all(a.stop == b.start for a, b in itertools.pairwise(band.pieces))
        claimed = np.zeros(len(memory), bool)
        for piece in band.pieces:
            assert piece.start < piece.stop
            owners = memory[piece.start : piece.stop]
            owned = owners[owners["group"] >= 0]
            if piece.kind == "padding":
                assert not len(owned)
                continue
            claimed[piece.start : piece.stop] = True
            assert owners["group"][0] >= 0
            assert owners["group"][-1] >= 0
            expected = dict(coordinates)
            if piece.kind in AXES.values():
                expected[piece.kind] = piece.index
                seen.add((piece.group, piece.kind, piece.index))
            if piece.label in PLANES and isinstance(groups[names[0]].entry, KVEntry):
                expected["part"] = PLANES.index(piece.label)
            if piece.group or band.row > 0:
                expected["group"] = names.index(piece.group)
            for name, i in expected.items():
                assert set(owned[name]) == {i}, (band, piece)
        inside = memory["group"] >= 0
        for name, i in coordinates.items():
            inside &= memory[name] == i
        if band.title == "buffer":
            assert (low, high) == (0, len(memory))
        elif "scales" not in band.title:
            assert np.array_equal(np.flatnonzero(inside), np.flatnonzero(claimed & (memory["group"] >= 0)))
    return seen


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("padding", [0, 24])
def test_the_map_agrees_with_every_byte(order, padding):
    entry = KVEntry("bf16", head_dim=3, value_dim=5)
    layout = make(order, entry, COUNTS, padding)
    seen = check({"": layout}, bytes_of(order, entry, COUNTS, padding * 2))
    assert seen == {("", AXES[axis], i) for axis, count in COUNTS.items() for i in range(count)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("short", ["L", "B", "H", "N", "LB", "LN", "HN", "LBHN"])
def test_axes_of_one_step(order, short):
    entry = KVEntry("f16", head_dim=2)
    counts = COUNTS | dict.fromkeys(short, 1)
    check({"": make(order, entry, counts, 8)}, bytes_of(order, entry, counts, 16))


@pytest.mark.parametrize("tokens", [1, 5])
def test_indexer_pages(tokens):
    entry, counts = IndexerEntry(head_dim=8), {"L": 3, "B": 2, "H": 1, "N": tokens}
    layout = make("BLNHC", entry, counts)
    check({"": layout}, bytes_of("BLNHC", entry, counts))
    values, scales = bands(described({"": layout}))[-2:]
    if tokens > 1:
        assert [(piece.start, piece.stop) for piece in values.pieces][-2:] == [(32, 40), (40, 60)]
        assert [piece.start for piece in scales.pieces] == [40, 44, 48, 52, 56]


@pytest.mark.parametrize("order", ["BLNHC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_packed_groups(order, blocks):
    groups = {
        "one": Group(1, MLAEntry("f16", latent=3, rope=2)),
        "keys": Group(3, IndexerEntry(head_dim=4)),
        "kv": Group(2, KVEntry("fp8", head_dim=5), 3),
    }
    packed = PackedLayout(num_blocks=blocks, block_size=4, groups=groups, order=order)
    regions = []
    for i, group in enumerate(groups.values()):
        counts = {"L": group.num_layers, "B": 1, "H": group.num_heads, "N": 4}
        region = bytes_of(order, group.entry, counts)
        region["group"] = i
        regions += [region, np.full(-len(region) % 128, -1).astype(region.dtype)]
    memory = np.tile(np.concatenate(regions), blocks)
    memory["block"] = np.where(memory["group"] < 0, -1, np.arange(len(memory)) // (len(memory) // blocks))
    check(packed, memory)
    names = [
        name
        for name, _ in itertools.groupby(piece.group for piece in bands(described(packed))[1].pieces if piece.group)
    ]
    assert names == list(groups)


def test_explicit_strides():
    rng = np.random.default_rng(0)
    for _ in range(300):
        counts, strides, extent = dict(zip("LBHN", rng.integers(1, 5, 4).tolist(), strict=True)), {}, 5
        for axis in rng.permutation(list("LBHN")):
            strides[AXES[axis]] = extent + int(rng.integers(3))
            extent += strides[AXES[axis]] * (counts[axis] - 1)
        offset, behind = rng.integers(0, 9, 2).tolist()
        entry = KVEntry("f32", head_dim=2, value_dim=3)
        sizes = {"num_layers": counts["L"], "num_blocks": counts["B"], "num_heads": counts["H"]}
        layout = CacheLayout.from_strides(
            **sizes, block_size=counts["N"], entry=entry, strides=strides, offset=offset, size=offset + extent + behind
        )
        memory = np.full(layout.nbytes, -1).astype(bytes_of("BLNHC", entry, COUNTS).dtype)
        for steps in itertools.product(*(range(counts[axis]) for axis in "LBHN")):
            owner = dict(zip(AXES.values(), steps, strict=True))
            first = 4 * (offset + sum(strides[axis] * i for axis, i in owner.items()))
            memory[first : first + 20] = (0, 0, *owner.values())
        check({"": layout}, memory)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", scenes.ONE_ARRAY)
def test_keys_and_values_that_lie_apart(name, blocks):
    entry = KVEntry("bf16", head_dim=4, value_dim=2)
    layout = scenes.apart(entry, name, num_layers=2, num_blocks=blocks, num_heads=2, block_size=3)
    memory = np.full(layout.nbytes, -1).astype(bytes_of("BLNHC", entry, COUNTS).dtype)
    planes = (layout.strides, layout.offset, 4), (layout.value_strides, layout.value_offset, 2)
    for (part, (strides, offset, count)), *steps in itertools.product(
        enumerate(planes), range(2), range(blocks), range(2), range(3)
    ):
        layer, block, head, token = steps
        element = offset + layer * strides.layer + block * strides.block + head * strides.head + token * strides.token
        owner = dict(zip(("layer", "block", "head", "token"), steps, strict=True))
        memory[2 * element : 2 * (element + count)] = (0, part, *(owner[axis] for axis in AXES.values()))
    seen = check({"": layout}, memory)
    assert {("", axis, i) for axis, count in (("block", blocks), ("token", 3)) for i in range(count)} <= seen
    rows = bands(described({"": layout}))
    assert [piece.label for row in rows for piece in row.pieces if piece.label in PLANES] in (
        [*PLANES],
        [*PLANES[::-1]],
    )


def test_keys_and_values_that_interleave_have_a_table_but_no_map():
    layout = CacheLayout.from_strides(
        num_layers=1, num_blocks=2, block_size=4, num_heads=2, entry=KVEntry("f32", 2), size=64,
        strides={"layer": 0, "block": 32, "token": 8, "head": 4},
        value_strides={"layer": 0, "block": 32, "token": 4, "head": 16}, value_offset=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="keys and values interleave in memory"):
        layout.draw()
    assert layout._repr_svg_() is None
    assert "(values of 8 bytes)" in str(layout)


def test_one_group_of_a_pack_is_shown_in_whole_blocks():
    rows = bands(described({"": PACKED["indexer"]}))
    assert [(row.pieces[0].start, row.pieces[-1].stop) for row in rows] == [
        (0, PACKED["indexer"].nbytes),
        (0, PACKED["indexer"].block_nbytes),
        (8 * 64 * 1152, 8 * 64 * 1152 + 64 * 132),
        (8 * 64 * 1152 + 64 * 128, 8 * 64 * 1152 + 64 * 132),
    ]


def test_parts_of_entries():
    def parts(entry):
        last = bands(described({"": CacheLayout(num_layers=1, num_blocks=1, block_size=2, entry=entry)}))[-1]
        return [(piece.label, piece.start, piece.stop) for piece in last.pieces]

    assert parts(MLAEntry("bf16")) == [("latent", 0, 1024), ("rope", 1024, 1152)]
    assert parts(MLAEntry("fp8")) == [("latent", 0, 512), ("rope", 512, 576)]
    assert parts(MLAEntry("fp8_ds_mla")) == [("latent", 0, 512), ("scales", 512, 528), ("rope", 528, 656)]
    assert parts(KVEntry("f32", head_dim=8, value_dim=4)) == [("K", 0, 32), ("V", 32, 48)]


def test_long_axes_are_elided():
    layout = CacheLayout(**BIG, order="LBNHC", block_padding=32)
    rows = bands(described({"": layout}))
    assert [row.title for row in rows] == ["buffer", "layer 0", "layer 0 · block 0", "layer 0 · block 0 · token 0"]
    blocks = rows[1].pieces
    assert len(blocks) < 12
    last = next(piece for piece in blocks if piece.label == "block 4,095")
    assert (last.start, last.stop) == (4095 * layout.strides.block * 2, (4095 * layout.strides.block + 64 * 576) * 2)
    assert all(a.stop == b.start for row in rows for a, b in itertools.pairwise(row.pieces))
    assert rows[0].pieces[-1].stop == layout.nbytes


def test_rectangles_are_to_scale():
    layout = make("BHLNC", KVEntry("bf16", head_dim=16), COUNTS, 64)
    figure, rows = draw(described({"": layout})), bands(described({"": layout}))
    drawn = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    pieces = [(piece, row) for row in rows for piece in row.pieces]
    assert len(drawn) == len(pieces)
    left, right = 0.3, figure.get_figwidth() - 0.3
    for patch, (piece, row) in zip(drawn, pieces, strict=True):
        low, high = row.pieces[0].start, row.pieces[-1].stop
        edges = np.interp([piece.start, piece.stop], [low, high], [left, right])
        np.testing.assert_allclose([patch.get_x(), patch.get_x() + patch.get_width()], edges, rtol=1e-12)
        assert bool(patch.get_hatch()) == (piece.kind == "padding")


PICTURES = {
    "big": {"": CacheLayout(**BIG)},
    "layers first": {"": CacheLayout(**BIG, order="LBNHC", block_padding=32)},
    "small": {"": make("BHLNC", KVEntry("bf16", head_dim=16), COUNTS, 64)},
    "packed": PACKED,
    "one of a pack": {"": PACKED["indexer"]},
    "values first": {"": scenes.apart(KVEntry("bf16", 16, 8), "values before keys", num_heads=2)},
}


@pytest.mark.parametrize("groups", PICTURES.values(), ids=PICTURES)
def test_labels_do_not_overlap(groups):
    figure = draw(described(groups))
    width, height = figure.bbox.size
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)
    for a, b in itertools.combinations(boxes, 2):
        # Lines of one label may touch: a box has room for descenders.
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 0 or down <= 3


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_saved_pictures_are_deterministic(tmp_path, suffix):
    layout = make("BLNHC", MLAEntry("fp8_ds_mla"), COUNTS | {"H": 1})
    settings = dict(rcParams)
    files = [tmp_path / f"{name}{suffix}" for name in ("one", "two")]
    for file in files:
        layout.draw(file)
    one, two = (file.read_bytes() for file in files)
    assert one == two
    assert dict(rcParams) == settings
    if suffix == ".svg":
        assert ET.fromstring(one).tag.endswith("svg")
        assert b"<dc:date>" not in one
        assert svg(described({"": layout})) == one.decode()
    else:
        assert one.startswith(b"\x89PNG")


def test_a_notebook_shows_the_map_and_describes_it():
    """As IPython expects it: the picture, and its metadata."""
    layout = CacheLayout(**BIG)
    picture, metadata = layout._repr_svg_()
    assert picture == svg(described({"": layout}))
    rows = bands(described({"": layout}))
    assert metadata["alt"].startswith(f"Memory map of {str(layout).partition(' (')[0]}. buffer: ")
    assert all(f"{row.title}: {row.note}." in metadata["alt"] for row in rows)


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'\.pdf'"):
        draw(described({"": CacheLayout(**BIG)}), tmp_path / "map.pdf")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        draw(described({"": CacheLayout(**BIG)}))
    assert svg(described({"": CacheLayout(**BIG)})) is None


def rows_of(text):
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_table():
    layout = CacheLayout(**BIG)
    text = table(described({"": layout}))
    assert text == str(layout)
    rows = rows_of(text)
    assert rows[0] == ["BLNHC, bfloat16, 17.2 GiB (18,421,383,168 bytes)"]
    axes = [row for row in rows if row[0] in AXES.values()]
    assert (
        axes
        == [
            ["block", "4,096", "2,248,704", "4,497,408", "4.3 MiB"],
            ["layer", "61", "36,864", "73,728", "72.0 KiB"],
            ["token", "64", "576", "1,152", "1.1 KiB"],
            ["head", "1", "576", "1,152", "1.1 KiB"],
        ]
        or text
    )
    assert ["alignment", "128 bytes"] in rows
    assert ["contiguous", "a block: yes, a layer: no"] in rows
    assert ["fingerprint", layout.fingerprint] in rows


def test_table_of_packed_groups():
    text = str(PACKED)
    assert max(map(len, text.splitlines())) <= 100
    rows = rows_of(text)
    assert ["latent:"] in rows
    assert ["offset", "589,824 elements, 589,824 bytes"] in rows[rows.index(["indexer:"]) :]
    assert rows[-1] == ["block with all groups: 657,408 bytes (642.0 KiB)"]
