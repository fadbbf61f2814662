"""Loads tiles of keys and values from entries of any format, for use as operands of products."""

from dataclasses import dataclass

import triton
import triton.language as tl

from jaxkv_kernels.formats.latents.fp8_ds_mla import TILE
from jaxkv_kernels.triton.codecs.e2m1 import SCALE_TILE as E2M1_TILE
from jaxkv_kernels.triton.codecs.e2m1 import from_quarters, in_quarters, load_e2m1, unit
from jaxkv_kernels.triton.codecs.e4m3_pairs import halves, in_halves, load_pairs
from jaxkv_kernels.triton.codecs.int8_pairs import int8_halves
from jaxkv_kernels.triton.codecs.widen import widened
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import rounded

SCALE_TILE = tl.constexpr(TILE)
"""Values of an `fp8_ds_mla` entry that share a scale."""


@dataclass(frozen=True)
class EntryLoads:
    """How a kernel loads entries; a compile-time constant of the kernel.

    With `latents`, an entry is a latent and a rotary key: keys are both parts, and values are the latents.  Otherwise,
    an entry is a key and a value.
    """

    format: str
    latents: bool
    first: int
    """The number of values of the latent, or of the key."""
    second: int
    """The number of values of the rotary key, or of the value."""
    first_columns: int
    """Columns of one load of these values, a power of two.  A latent may take several loads."""
    second_columns: int
    stored: tl.dtype
    """The element type in memory; "uint8" for quantised entries."""
    dtype: tl.dtype
    """The type of the operands of products."""
    native: bool
    """Whether the GPU has instructions that convert e4m3."""
    even: bool
    """Whether all sizes and strides are even numbers of bytes."""
    second_at: int = 0
    """Bytes from the start of a plain or e4m3 entry to its value, which may lie apart."""

    @property
    def loads(self) -> int:
        """The number of loads for the first part."""
        return -(-self.first // self.first_columns)

    @property
    def ways(self) -> int:
        """How many tiles each load gives: column c is in tile c % ways (see `e4m3_pairs.py`, `e2m1.py`)."""
        if self.format == "nvfp4":
            return 4
        return 2 if self.format == "int8" or (self.latents and self.format == "fp8") else 1

    @property
    def unit(self) -> float:
        """How many times too small the tiles of keys and of values are."""
        return unit(self.dtype) if self.format == "nvfp4" else 1.0

    @property
    def per_token(self) -> bool:
        """Whether keys and values have a scale per token, by which scores and weights are multiplied."""
        return self.format == "int8"

    @property
    def value_tiles(self) -> int:
        """The number of tiles that hold the values."""
        return self.ways * (self.loads if self.latents else 1)

    @property
    def value_columns(self) -> int:
        """Columns of each tile of values."""
        return (self.first_columns if self.latents else self.second_columns) // self.ways


@triton.jit
def split_columns(x, WAYS: tl.constexpr):
    """Divides a tile of queries as loads of entries are divided (`ways`)."""
    if WAYS == 4:
        tiles = in_quarters(x)
    elif WAYS == 2:
        tiles = in_halves(x)
    else:
        tiles = (x,)
    return tiles


@triton.jit
def join_columns(x, WAYS: tl.constexpr):
    """The tile that `split_columns` divides into `x`."""
    if WAYS == 4:
        tile = from_quarters(x)
    elif WAYS == 2:
        tile = tl.interleave(x[0], x[1])
    else:
        tile = x[0]
    return tile


@triton.jit
def load_keys_and_values(entry, known, LOADS: tl.constexpr):
    """Tiles [n, columns] of the keys and of the values of the entries at byte pointers `entry` [n]; 0 if not `known`.

    Values of `fp8` and `int8` are returned as stored, others multiplied by their own scales.  The third result has the
    scales [n] of keys and of values if they are `per_token`, otherwise nothing.
    """
    factors = ()
    if LOADS.latents:
        NUM_LOADS: tl.constexpr = LOADS.loads
        values = ()
        for i in tl.static_range(NUM_LOADS):
            values += _latent_tile(entry, known, i * LOADS.first_columns, LOADS)
        # The rotary keys come first: their product is the first term of the scores.
        keys = _rope_tile(entry, known, LOADS) + values
    elif LOADS.format == "nvfp4":
        SCALES: tl.constexpr = (LOADS.first + LOADS.second) // 2
        keys = load_e2m1(
            entry, entry + SCALES, known,
            LOADS.first, LOADS.first_columns, LOADS.unit, LOADS.dtype, LOADS.native, LOADS.even,
        )  # fmt: skip
        values = load_e2m1(
            entry + LOADS.first // 2, entry + SCALES + LOADS.first // E2M1_TILE, known,
            LOADS.second, LOADS.second_columns, LOADS.unit, LOADS.dtype, LOADS.native, LOADS.even,
        )  # fmt: skip
    elif LOADS.format == "int8":
        keys = int8_halves(load_pairs(entry, known, LOADS.first, LOADS.first_columns, LOADS.even), LOADS.dtype)
        pairs = load_pairs(entry + LOADS.first, known, LOADS.second, LOADS.second_columns, LOADS.even)
        values = int8_halves(pairs, LOADS.dtype)
        scales = (entry + LOADS.first + LOADS.second).to(tl.pointer_type(tl.float32))
        factors += (tl.load(scales, mask=known, other=0.0), tl.load(scales + 1, mask=known, other=0.0))
    else:
        keys = (_plain_tile(entry, known, 0, LOADS.first, LOADS.first_columns, LOADS),)
        value = entry + tl.full((), LOADS.second_at, tl.int64)
        values = (_plain_tile(value, known, 0, LOADS.second, LOADS.second_columns, LOADS),)
    return keys, values, factors


@triton.jit
def _latent_tile(entry, known, FIRST: tl.constexpr, LOADS: tl.constexpr):
    """The values of latents from FIRST on: one tile, or two with `in_pairs`."""
    left: tl.constexpr = LOADS.first - FIRST
    COLUMNS: tl.constexpr = LOADS.first_columns
    if LOADS.format == "fp8_ds_mla":
        scales = (entry + LOADS.first).to(tl.pointer_type(tl.float32)) + FIRST // SCALE_TILE
        scale = load_pieces(scales, known, left // SCALE_TILE, COLUMNS // SCALE_TILE)
        scale = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], SCALE_TILE))
        scale = tl.reshape(scale, (scale.shape[0], COLUMNS))
        found = (widened(load_pieces(entry + FIRST, known, left, COLUMNS), scale, LOADS.dtype, LOADS.native),)
    elif LOADS.ways == 2:
        found = halves(load_pairs(entry + FIRST, known, left, COLUMNS, LOADS.even), LOADS.dtype, LOADS.native)
    else:
        found = (_plain_tile(entry, known, FIRST, left, COLUMNS, LOADS),)
    return found


@triton.jit
def _rope_tile(entry, known, LOADS: tl.constexpr):
    """The rotary keys: one tile, or two with `in_pairs`."""
    COLUMNS: tl.constexpr = LOADS.second_columns
    if LOADS.format == "fp8_ds_mla":
        ropes = (entry + LOADS.first + 4 * (LOADS.first // SCALE_TILE)).to(tl.pointer_type(tl.bfloat16))
        found = (rounded(load_pieces(ropes, known, LOADS.second, COLUMNS), LOADS.dtype),)
    elif LOADS.ways == 2:
        pairs = load_pairs(entry + LOADS.first, known, LOADS.second, COLUMNS, LOADS.even)
        found = halves(pairs, LOADS.dtype, LOADS.native)
    else:
        found = (_plain_tile(entry, known, LOADS.first, LOADS.second, COLUMNS, LOADS),)
    return found


@triton.jit
def _plain_tile(entry, known, FIRST: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, LOADS: tl.constexpr):
    """SIZE values, from FIRST on, of entries whose elements have type `stored`."""
    values = load_pieces(entry.to(tl.pointer_type(LOADS.stored)) + FIRST, known, SIZE, COLUMNS)
    return widened(values, None, LOADS.dtype, LOADS.native) if LOADS.format == "fp8" else rounded(values, LOADS.dtype)
