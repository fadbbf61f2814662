"""Entries whose values have scales by tile: their byte maps as constants of kernels, and encoding and decoding parts.

A part is one of the arrays that an entry stores, such as the latent.  Its values are e4m3 or e2m1 with a scale per tile
(float32, e8m0 or e4m3), or e4m3 or floats without scales.  `formats/scales.py` has the rules of the scales.  Kernels
that write and gather (`entries.py`) and kernels that attend (`attention.py`) use the same `load_part`.
"""

from dataclasses import dataclass, replace

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import Field
from jaxkv_kernels.formats.scales import NO_SCALES, RULES, ScaleRule
from jaxkv_kernels.triton.arithmetic import as_float32, rounded
from jaxkv_kernels.triton.codecs import (
    LARGEST_E2M1,
    LARGEST_E4M3,
    e4m3_scale,
    from_e2m1,
    from_e4m3,
    from_e8m0,
    in_halves,
    power_of_two_scale,
    to_e2m1,
    to_e4m3,
)
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import element_type
from jaxkv_kernels.triton.tiles import in_bytes, load_pieces, store_pieces


@dataclass(frozen=True)
class Part:
    """How a part of an entry is stored.  Offsets are in bytes, from the addresses that `TiledEntry` gives."""

    size: int
    """Values."""
    columns: int
    """The smallest power of two that is at least `size`."""
    stored: str
    """e4m3, e2m1x2 or float."""
    dtype: tl.dtype
    """The type of the stored elements: that of floats, or uint8."""
    first: int
    """The offset of the values."""
    tile: int = 0
    """Values that share a scale; 0 if there are no scales."""
    rule: ScaleRule = NO_SCALES
    """How scales are computed and stored."""
    scales: int = 0
    """The offset of the entry's scales."""
    num_scales: int = 0
    """Scales of the entry, in all parts."""
    first_tile: int = 0
    """The number of the part's first tile among all of the entry."""
    padding: tuple[int, int] = (0, 0)
    """Zeros that are stored with the part: their offset, and how many bytes."""


@dataclass(frozen=True)
class TiledEntry:
    """The byte map of an entry; a compile-time constant of kernels.

    `values` and `scales` are pages in bytes, by which `token_address` returns the addresses from which parts count
    their offsets.  They differ if pages are split, because then the tokens of each region have a stride of their own.
    """

    parts: tuple[Part, ...]
    values: Pages
    scales: Pages


def tiled_entry(entry: Entry, pages: Pages, itemsize: int) -> TiledEntry:
    """The byte map of an entry of a format in `RULES`, in a buffer whose elements have `itemsize` bytes."""
    rule, fields = RULES[entry.format], entry.fields(pages.block_size)
    arrays = [field for field in fields if "scales" not in field.name and field.name != "padding"]
    scales = next(field for field in fields if "scales" in field.name)
    padding = next(((field.offset, field.nbytes) for field in fields if field.name == "padding"), (0, 0))
    scaled = [size for size, field in zip(entry.sizes, arrays, strict=True) if field.dtype == rule.values]
    tile = sum(scaled) // scales.count
    parts, first_tile = [], 0
    for size, field in zip(entry.sizes, arrays, strict=True):
        quantised = field.dtype in ("e4m3", "e2m1x2")
        part = Part(
            size=size,
            columns=triton.next_power_of_2(size),
            stored=field.dtype if quantised else "float",
            dtype=element_type("uint8" if quantised else field.dtype),
            first=field.offset,
        )
        if field.dtype == rule.values:
            part = replace(
                part,
                tile=tile,
                rule=rule,
                scales=scales.offset,
                num_scales=scales.count,
                first_tile=first_tile,
                padding=padding if first_tile == 0 else (0, 0),
            )
            first_tile += size // tile
        parts.append(part)
    in_memory = in_bytes(pages, itemsize)
    return TiledEntry(tuple(parts), _stepped(in_memory, arrays[0]), _stepped(in_memory, scales))


def is_tiled(entry: Entry) -> bool:
    """Whether kernels use `store_part` and `load_part`.  Other formats in `RULES` have their own kernels, or none."""
    return entry.format in RULES and entry.format not in ("fp8_ds_mla", "indexer_fp8", "int8", "nvfp4")


def _stepped(pages: Pages, field: Field) -> Pages:
    """Pages in bytes, with the stride of a field from token to token if pages are split."""
    return pages if field.step is None else replace(pages, token_stride=field.step)


@triton.jit
def store_part(values, entry, scales, keep, PART: tl.constexpr, NATIVE: tl.constexpr):
    """Encodes a part [n, PART.columns] of any float dtype, and stores it where `keep` [n] is True.

    `entry` and `scales` [n] are the addresses by the pages of `TiledEntry`.
    """
    SIZE: tl.constexpr = PART.size
    COLUMNS: tl.constexpr = PART.columns
    TILE: tl.constexpr = PART.tile
    place = entry + PART.first
    if TILE:
        ROWS: tl.constexpr = values.shape[0]
        tiles = tl.reshape(as_float32(values), (ROWS, COLUMNS // TILE, TILE))
        if PART.stored == "e4m3":
            scale, inverse = power_of_two_scale(tiles, PART.rule.smallest_exponent, keep[:, None, None], LARGEST_E4M3)
            stored = tl.reshape(to_e4m3(tiles * inverse[:, :, None], NATIVE), (ROWS, COLUMNS))
            store_pieces(place, stored, keep, SIZE, COLUMNS)
        else:
            if PART.rule.stored == "e4m3":
                scale, value = e4m3_scale(tiles, keep[:, None, None], PART.rule.round_up, NATIVE)
            else:
                value, _ = power_of_two_scale(tiles, PART.rule.smallest_exponent, keep[:, None, None], LARGEST_E2M1)
                scale = value
            low, high = in_halves(tl.reshape(to_e2m1(tiles, value[:, :, None]), (ROWS, COLUMNS)))
            store_pieces(place, (low | (high << 4)).to(tl.uint8), keep, SIZE // 2, COLUMNS // 2)
        if PART.rule.stored == "e8m0":
            scale = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        at, mask = _scale_places(scales, keep, 0, COLUMNS // TILE, PART)
        tl.store(at.to(tl.pointer_type(scale.dtype)), scale, mask=mask)
        if PART.padding[1]:
            PADDING: tl.constexpr = triton.next_power_of_2(PART.padding[1])
            zeros = tl.zeros((ROWS, PADDING), tl.uint8)
            store_pieces(scales + PART.padding[0], zeros, keep, PART.padding[1], PADDING)
    elif PART.stored == "e4m3":
        store_pieces(place, to_e4m3(as_float32(values), NATIVE), keep, SIZE, COLUMNS)
    else:
        store_pieces(place.to(tl.pointer_type(PART.dtype)), rounded(values, PART.dtype), keep, SIZE, COLUMNS)


@triton.jit
def load_part(
    entry, scales, known, FIRST: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, NATIVE: tl.constexpr
):
    """Values from FIRST on of a part, [n, COLUMNS]: floats as they are stored, and others in float32.

    They are 0 past the part's last value, and in rows where `known` [n] is False.  `entry` and `scales` [n] are the
    addresses by the pages of `TiledEntry`.
    """
    LEFT: tl.constexpr = PART.size - FIRST
    place = entry + PART.first
    if PART.stored == "e2m1x2":
        pairs = load_pieces(place + FIRST // 2, known, LEFT // 2, COLUMNS // 2)
        values = from_e2m1(pairs, _load_scales(scales, known, FIRST, COLUMNS, 2, PART, NATIVE))
    elif PART.stored == "e4m3":
        values = from_e4m3(load_pieces(place + FIRST, known, LEFT, COLUMNS), NATIVE)
        if PART.tile:
            values *= _load_scales(scales, known, FIRST, COLUMNS, 1, PART, NATIVE)
    else:
        values = load_pieces(place.to(tl.pointer_type(PART.dtype)) + FIRST, known, LEFT, COLUMNS)
    return values


@triton.jit
def _load_scales(
    scales, known, FIRST: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, PART: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The scales of values from FIRST on in float32: one for each element, of PACKED values, [n, COLUMNS // PACKED]."""
    TILES: tl.constexpr = COLUMNS // PART.tile
    at, mask = _scale_places(scales, known, FIRST, TILES, PART)
    if PART.rule.stored == "float32":
        scale = tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    elif PART.rule.stored == "e8m0":
        scale = from_e8m0(tl.load(at, mask=mask, other=0))
    else:
        scale = from_e4m3(tl.load(at, mask=mask, other=0), NATIVE)
    ROWS: tl.constexpr = scale.shape[0]
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, TILES, PART.tile // PACKED))
    return tl.reshape(scale, (ROWS, COLUMNS // PACKED))


@triton.jit
def _scale_places(scales, keep, FIRST: tl.constexpr, TILES: tl.constexpr, PART: tl.constexpr):
    """Pointers to the bytes of the scales of TILES tiles, and which of these there are, [n, TILES] each."""
    tile = tl.arange(0, TILES)[None, :]
    mask = keep[:, None] & (tile < (PART.size - FIRST) // PART.tile)
    number = tile + (PART.first_tile + FIRST // PART.tile)
    if PART.rule.columns > 1:
        number = PART.num_scales // PART.rule.columns * (number % PART.rule.columns) + number // PART.rule.columns
    return scales[:, None] + PART.scales + number * PART.rule.itemsize, mask
