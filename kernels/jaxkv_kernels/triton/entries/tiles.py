"""Tiles of rows: the number of rows per program, and moving rows between arrays and registers."""

from typing import Any

import triton
import triton.language as tl

WARPS = 4
VALUES = 2048
"""Values per tile, 16 per thread: two loads of 16 bytes for values of 2 bytes."""


def tile_shape(sizes) -> dict[str, Any]:
    """Constants for rows whose parts have `sizes` values: ROWS per program and COLUMNS of each tile, powers of two."""
    columns = tuple(triton.next_power_of_2(max(size, 1)) for size in sizes)
    return {"ROWS": max(1, VALUES // max(columns)), "COLUMNS": columns}


@triton.jit
def load_rows(array, row, COUNT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads rows `row` [n] of `array` [COUNT, SIZE] as a tile [n, COLUMNS]."""
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < COUNT)[:, None] & (column < SIZE)
    return tl.load(array + row.to(tl.int64)[:, None] * SIZE + column, mask=mask)


@triton.jit
def store_rows(array, row, tile, COUNT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores a tile [n, COLUMNS] to rows `row` [n] of `array` [COUNT, SIZE]."""
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < COUNT)[:, None] & (column < SIZE)
    tl.store(array + row.to(tl.int64)[:, None] * SIZE + column, tile, mask=mask)


@triton.jit
def load_pieces(place, keep, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads SIZE elements from each of the pointers `place` [n] as a tile [n, COLUMNS].

    The tile is 0 past SIZE, and in rows where `keep` [n] is False.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    mask = keep[:, None] if SIZE >= COLUMNS else keep[:, None] & (column < SIZE)
    return tl.load(place[:, None] + column, mask=mask, other=0)


@triton.jit
def store_pieces(place, tile, keep, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores SIZE elements of each row of a tile [n, COLUMNS] to the pointers `place` [n], where `keep` [n] is True."""
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(place[:, None] + column, tile, mask=keep[:, None] & (column < SIZE))
