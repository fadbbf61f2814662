"""Random entries and layouts: those of serving engines, and strides of any kind."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

import jaxkv
from jaxkv.testing.named_layouts import keys_may_lie_apart
from jaxkv_kernels.formats.entries import Entry

Sizes = dict[str, Any]
"""`num_layers`, `num_blocks`, `block_size`, `num_heads` and `entry` of a layout."""

MOST_BYTES = 2**25
"""Largest cache, in bytes.  Every call fills the cache again, so calls on small caches are fast."""


def pick(rng: np.random.Generator, *choices) -> Any:
    """One of `choices`, which may have any types."""
    return choices[rng.integers(len(choices))]


SIZES: dict[type[Entry], tuple[tuple[int, ...], ...]] = {
    jaxkv.IndexerEntry: ((128,), (128,), (64,), (32,)),
    jaxkv.KVEntry: ((128, 128), (64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (10, 4), (32, 16), (12, 4)),
    jaxkv.MLAEntry: (
        *((512, 64), (512, 64), (512, 64), (448, 64), (256, 64)),
        *((512, 0), (256, 32), (128, 8), (128, 32), (64, 64), (64, 0)),
    ),
}
"""Those of real models, and small ones.  Each format can store the first of them."""

SMALL: dict[type[Entry], tuple[tuple[int, ...], ...]] = {
    jaxkv.IndexerEntry: ((8,), (32,), (128,)),
    jaxkv.KVEntry: tuple(product((4, 10, 12, 16, 32), (2, 4, 16, 48))),
    jaxkv.MLAEntry: tuple(product((8, 20, 64, 128, 256), (2, 8, 16, 32, 64))),
}
"""Small sizes, some of which each format can store."""

AXES = {"layer": "num_layers", "block": "num_blocks", "token": "block_size", "head": "num_heads"}
"""The size of each axis that has a stride."""

STATES = (
    jaxkv.StateEntry({"conv": ((4, 64), "float32"), "ssm": ((4, 16, 16), "float32")}),
    jaxkv.StateEntry({"conv": ((3, 20), "bfloat16"), "ssm": ((2, 8, 5), "float32"), "count": ((), "float16")}),
    jaxkv.StateEntry({"sums": ((7,), "float16")}),
)


def draw_entry(rng: np.random.Generator, kinds: Sequence[type[Entry]], sizes=SIZES) -> Entry:
    """An entry of one of `kinds`, in any of its formats, with one of `sizes` that the format can store.

    Some values have another format than their keys.
    """
    kind = pick(rng, *kinds)
    if kind is jaxkv.StateEntry:
        return pick(rng, *STATES)
    form, values = pick(rng, *kind.formats), {}
    if kind is jaxkv.KVEntry and not rng.integers(4):
        values = {"value_format": pick(rng, *kind.formats)}
    return pick(rng, *(entry for each in sizes[kind] if (entry := _entry(kind, form, each, **values))))


def draw_state(rng: np.random.Generator) -> jaxkv.StateEntry:
    """States of one to three small arrays of any rank."""
    arrays = {}
    for number in range(rng.integers(1, 4)):
        shape = tuple(rng.integers(1, 6, rng.integers(4)).tolist())
        arrays[f"a{number}"] = shape, pick(rng, "float32", "bfloat16", "float16")
    return jaxkv.StateEntry(arrays)


def draw_delta_state(rng: np.random.Generator) -> jaxkv.StateEntry:
    """States of the gated delta rule, as `decode_delta_rule` expects them."""
    key_heads, keys, values = pick(rng, 1, 2), pick(rng, 1, 5, 16, 64, 128), pick(rng, 1, 6, 16, 48, 128)
    heads = key_heads * pick(rng, 1, 2, 3)
    conv = pick(rng, 1, 2, 3), 2 * key_heads * keys + heads * values
    dtypes = (pick(rng, "float32", "float32", "bfloat16", "float16") for _ in range(2))
    arrays = {"conv": conv, "delta": (heads, keys, values)}
    return jaxkv.StateEntry({name: (shape, dtype) for (name, shape), dtype in zip(arrays.items(), dtypes, strict=True)})


def draw_entry_beside(rng: np.random.Generator, first: jaxkv.MLAEntry) -> jaxkv.MLAEntry:
    """An entry that sparse attention can read beside `first`: of the same sizes, with values of the same size."""
    others = (_entry(jaxkv.MLAEntry, form, first.sizes) for form in jaxkv.MLAEntry.formats)
    return pick(rng, first, *(x for x in others if isinstance(x, jaxkv.MLAEntry) and x.value_dim == first.value_dim))


def _entry(kind: type[Entry], form: str, sizes: tuple[int, ...], **values: str) -> Entry | None:
    """An entry of these sizes; None if the format cannot store them."""
    try:
        return kind(form, *sizes, **values)
    except ValueError:
        return None


def draw_layout(rng: np.random.Generator, entry: Entry, most: int | None = None) -> jaxkv.CacheLayout:
    """A layout for `entry` of at most `most` bytes, by default `MOST_BYTES`."""
    heads = 1 if entry.one_head else pick(rng, 1, 2, 4, 8)
    layout = _layout(rng, entry, heads)
    while layout.nbytes > (most or MOST_BYTES):
        layout = _layout(rng, entry, heads)
    return layout


def _layout(rng: np.random.Generator, entry: Entry, heads: int) -> jaxkv.CacheLayout:
    """A layout in any of the six orders, padded or not, a group of a `PackedLayout`, or explicit strides.

    The latter have gaps, or keys and values in planes of their own.
    """
    sizes: Sizes = {
        "num_layers": pick(rng, 1, 2, 3, 4),
        "num_blocks": pick(rng, 2, 5, 12, 24, 64),
        "block_size": pick(rng, 1, 3, 16, 32, 61, 64, 64, 64, 128),
        "num_heads": heads,
        "entry": entry,
    }
    kind = pick(rng, "order", "order", "packed", "gaps", "planes")
    if kind == "packed":
        return draw_group(rng, sizes)
    dtype = pick(rng, None, None, "uint8")
    itemsize = entry.dtype.itemsize if dtype is None else 1
    if kind == "order" or entry.split:  # the tokens of a split page must be adjacent
        padding = pick(rng, 0, 0, 16, 48) // itemsize
        if rng.random() < 0.2:
            padding = 3 * entry.nbytes // itemsize
        return jaxkv.CacheLayout(**sizes, order=pick(rng, *jaxkv.ORDERS), block_padding=padding, dtype=dtype)
    if kind == "planes" and keys_may_lie_apart(entry):
        return _planes(rng, sizes, dtype, itemsize)
    unit = 16 // itemsize
    token = heads * entry.nbytes // itemsize + unit * int(rng.integers(3))
    layer = token * (sizes["block_size"] + int(rng.integers(2)))
    offset = unit * int(rng.integers(3))
    block = layer * sizes["num_layers"] + pick(rng, 0, offset, token)
    strides = {"layer": layer, "block": block, "head": entry.nbytes // itemsize, "token": token}
    size = offset + block * sizes["num_blocks"]
    return jaxkv.CacheLayout.from_strides(**sizes, strides=strides, offset=offset, size=size, dtype=dtype)


def _planes(rng: np.random.Generator, sizes: Sizes, dtype, itemsize: int) -> jaxkv.CacheLayout:
    """Keys and values of a layer, or of a block, in planes, in either order, or all in an array each.

    Each has heads or tokens first.  Keys, and values, are contiguous, or padded to 16 bytes.
    """
    heads, tokens, blocks = (sizes[name] for name in ("num_heads", "block_size", "num_blocks"))
    unit = pick(rng, 1, 16 // itemsize)
    planes, pages = [], []
    for fields in sizes["entry"].planes:
        row = sum(field.nbytes for field in fields) // itemsize
        row += -row % unit
        heads_in_tokens = rng.integers(2)
        token = row * heads if heads_in_tokens else row
        planes.append({"token": token, "head": row if heads_in_tokens else token * tokens})
        pages.append(token * tokens * (1 if heads_in_tokens else heads))
    in_block, values_first, two_arrays = rng.integers(2, size=3)
    if two_arrays:
        for plane, page in zip(planes, pages, strict=True):
            plane |= {"block": page, "layer": page * blocks}
        size, value_size = (page * blocks * sizes["num_layers"] for page in pages)
        return jaxkv.CacheLayout.from_strides(
            **sizes, strides=planes[0], size=size, value_strides=planes[1], value_size=value_size, dtype=dtype
        )
    steps = 1 if in_block else blocks
    for plane, page in zip(planes, pages, strict=True):
        plane["block"] = sum(pages) if in_block else page
        plane["layer"] = sum(pages) * blocks
    offset, value_offset = (pages[1] * steps, 0) if values_first else (0, pages[0] * steps)
    return jaxkv.CacheLayout.from_strides(
        **sizes, strides=planes[0], offset=offset, value_strides=planes[1], value_offset=value_offset,
        size=sum(pages) * blocks * sizes["num_layers"], dtype=dtype,
    )  # fmt: skip


def draw_group(rng: np.random.Generator, sizes: Sizes) -> jaxkv.CacheLayout:
    """A group of a `PackedLayout`: before, between or behind others, or alone."""
    rate = pick(rng, 1, 1, 2, 4)
    own = jaxkv.Group(sizes["num_layers"], sizes["entry"], sizes["num_heads"], rate=rate)
    table = pick(rng, "", "", "keys")  # of keys that share the blocks, or have their own
    others = {
        "keys": jaxkv.Group(2, jaxkv.IndexerEntry(), table=table),
        "more": jaxkv.Group(1, jaxkv.MLAEntry("bf16", 24, 8)),
    }
    names = rng.permutation(["own", *others])[: rng.integers(1, 4)].tolist()
    groups = {name: others.get(name, own) for name in dict.fromkeys([*names, "own"])}
    tables = {group.table: sizes["block_size"] * rate for group in groups.values()}
    if "keys" in tables:
        tables["keys"] = pick(rng, 1, 16, 64, 128)
    blocks = {"num_blocks": sizes["num_blocks"], "block_size": tables}
    order = pick(rng, "BLNHC", "BLHNC", "BHLNC")
    return jaxkv.PackedLayout(groups=groups, order=order, dtype=pick(rng, None, "uint8"), **blocks)["own"]


def draw_strides(rng: np.random.Generator, entry: Entry, sizes: Sizes | None = None) -> jaxkv.CacheLayout:
    """A small layout of explicit strides, any that do not overlap; `sizes` are random by default."""
    sizes = sizes or {
        "num_layers": int(rng.integers(1, 5)),
        "num_blocks": int(rng.integers(2, 7)),
        "block_size": pick(rng, 1, 3, 16, 61, 64),
        "num_heads": 1 if entry.one_head else int(rng.integers(1, 4)),
        "entry": entry,
    }
    dtype = pick(rng, None, "uint8")
    itemsize = entry.dtype.itemsize if dtype is None else 1
    strides = pick(rng, _nested, _interleaved)
    return strides(rng, sizes, dtype, entry.nbytes // itemsize, max(entry.alignment // itemsize, 1))


def _nested(rng: np.random.Generator, sizes: Sizes, dtype, width: int, unit: int) -> jaxkv.CacheLayout:
    """The axes in any order, with gaps, behind an offset, nonsense where an axis has length 1."""
    counts, one_run = {axis: sizes[name] for axis, name in AXES.items()}, sizes["entry"].split
    axes = rng.permutation(list(AXES)).tolist()
    if one_run:  # a page of a split entry
        axes = ["token", *(axis for axis in axes if axis != "token")]
    extent, strides = width, {}
    for axis in axes:
        if counts[axis] == 1:
            strides[axis] = pick(rng, 0, -5, 1, 10**9)
            continue
        gap = 0 if axis == "token" and one_run else pick(rng, 0, 0, 1, 5)
        strides[axis] = extent + gap * unit
        extent += (counts[axis] - 1) * strides[axis]
        extent = -(-extent // unit) * unit
    offset = unit * int(rng.integers(10))
    size = offset + extent + int(rng.integers(4))
    return jaxkv.CacheLayout.from_strides(**sizes, strides=strides, offset=offset, size=size, dtype=dtype)


def _interleaved(rng: np.random.Generator, sizes: Sizes, dtype, width: int, unit: int) -> jaxkv.CacheLayout:
    """Of two axes that are not one of tokens, the steps lie between each other's; the rest nests."""
    counts = {axis: sizes[name] for axis, name in AXES.items()}
    extent = counts["token"] * (-(-width // unit) * unit)
    inner, outer, *rest = rng.permutation(["layer", "block", "head"]).tolist()
    # Step (i, j) is at extent * (i * n + j * (n + 1)) = extent * ((i + j) * n + j), and j is less than n.
    n = max(counts[outer], 2)
    strides = {"token": extent // counts["token"], inner: n * extent, outer: (n + 1) * extent}
    extent += (counts[inner] - 1) * strides[inner] + (counts[outer] - 1) * strides[outer]
    for axis in rest:
        strides[axis] = extent
        extent *= counts[axis]
    offset = unit * int(rng.integers(10))
    return jaxkv.CacheLayout.from_strides(**sizes, strides=strides, offset=offset, size=offset + extent, dtype=dtype)
