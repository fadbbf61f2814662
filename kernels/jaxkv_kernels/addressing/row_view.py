"""The flat buffer as rows of fewer than 2**31 elements.

JAX indexes with int32 by default, and large caches have more than 2**31 elements.  Therefore the buffer is reshaped to
rows, which is free, and an entry is addressed by its row and its first column.

- `row_view` has one row per block if the buffer is block-major, and one row per layer, or per layer and block, if it is
  layer-major.  Each entry lies within one row.
- `piece_view` is for strides that do not divide the size of the buffer.  Its rows have some other length that does, and
  an entry may cross rows.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd, isqrt
from typing import Any

import numpy as np

from jaxkv_kernels.addressing.pages import Pages

ROW_LIMIT = 2**31

MOST_COLUMNS, LARGEST_TRIED = 2**30, 2**20
"""For `PieceView`: rows are shorter than MOST_COLUMNS; divisors of the size are searched up to LARGEST_TRIED."""

AXES = ("layer", "block", "head", "token", "part")


@dataclass(frozen=True)
class RowView:
    """The buffer reshaped to `shape`, and how the index in it depends on each axis of the cache."""

    shape: tuple[int, ...]
    origin: tuple[int, ...]
    """The start of entry (0, 0, 0, 0, 0): one index per leading axis, then the column."""
    steps: dict[str, tuple[int, ...]]
    """What one step along an axis adds to the index."""
    window: int
    """Elements moved at once: one entry."""

    def index(self, **indices) -> tuple[Any, ...]:
        """The start of the entry at `layer`, `block`, `head` and `token` (and of which `part`, where these lie apart).

        The result is one index per leading axis, then the column.

        Indices are int32 integers or arrays.
        """
        place = list(self.origin)
        for axis, i in indices.items():
            for dimension, step in enumerate(self.steps.get(axis, ())):
                if step:
                    place[dimension] = place[dimension] + i * step
        return tuple(place)


def row_view(pages: Pages) -> RowView:
    """The coarsest view whose rows have fewer than 2**31 elements; ValueError if the strides allow none."""
    axes = _axes(pages)
    row, column = pages.size, pages.offset
    shape, origin, split = [], [], []
    while axes and (not shape or row >= ROW_LIMIT):
        stride, _, axis = axes[0]
        inside = column % stride + sum(s * (n - 1) for s, n, _ in axes[1:]) + pages.width
        if row % stride or inside > stride or row // stride >= ROW_LIMIT:
            break
        axes.pop(0)
        shape.append(row // stride)
        origin.append(column // stride)
        split.append(axis)
        row, column = stride, column % stride
    if row >= ROW_LIMIT:
        strides = dict(zip(AXES, _strides(pages), strict=True))
        raise ValueError(
            f"a buffer of {pages.size} elements with strides {strides} and offset {pages.offset} cannot be viewed as "
            f"rows of fewer than 2**31 elements: outer strides must divide the size"
        )
    steps: dict[str, tuple[int, ...]] = {axis: (0,) * len(shape) + (stride,) for stride, _, axis in axes}
    steps |= {axis: tuple(int(i == j) for j in range(len(shape) + 1)) for i, axis in enumerate(split)}
    return RowView((*shape, row), (*origin, column), steps, pages.width)


@dataclass(frozen=True)
class PieceView:
    """The buffer reshaped to `shape`.  Entries may cross rows, but consist of pieces that do not."""

    shape: tuple[int, int]
    window: int
    """Elements moved at once: one piece.  An entry is several pieces of this length."""
    pages: Pages

    def index(self, **indices) -> tuple[Any, Any]:
        """Rows and columns [..., pieces] where the pieces of the entries at `layer`, `block`, `head` and `token` begin.

        The indices must be int32 arrays [..., 1], which broadcast over the pieces of an entry.
        """
        pages, (_, length) = self.pages, self.shape
        starts = divmod(pages.offset + np.arange(0, pages.width, self.window), length)
        row, column = (start.astype(np.int32) for start in starts)
        # Multiply an index by its step a few bits at a time, and carry from columns to rows in between, so that columns
        # stay below 2**31.
        digits = 31 - length.bit_length()
        for stride, count, axis in _axes(pages):
            for low in range(0, (count - 1).bit_length(), digits):
                digit = indices[axis] >> low & (1 << digits) - 1
                rows, columns = divmod(stride << low, length)
                column = column + digit * columns
                row, column = row + digit * rows + column // length, column % length
        return row, column


@cache
def piece_view(pages: Pages) -> PieceView:
    """The view with the longest pieces, then the shortest rows; ValueError if no rows divide the buffer."""
    unit = gcd(pages.width, pages.offset, *(stride for stride, _, _ in _axes(pages)))
    length = max(_row_lengths(pages.size), key=lambda length: (gcd(length, unit), -length))
    return PieceView((pages.size // length, length), gcd(length, unit), pages)


def entry_view(pages: Pages) -> RowView | PieceView:
    """The `row_view` if the strides allow one, otherwise the `piece_view`."""
    try:
        return row_view(pages)
    except ValueError:
        return piece_view(pages)


def _axes(pages: Pages) -> list[tuple[int, int, str]]:
    """(stride, count, axis) of the axes of more than one step, outermost in memory first."""
    counts = (pages.num_layers, pages.num_blocks, pages.num_heads, pages.block_size, pages.num_parts)
    return sorted(((s, n, a) for s, n, a in zip(_strides(pages), counts, AXES, strict=True) if n > 1), reverse=True)


def _strides(pages: Pages) -> tuple[int, ...]:
    return pages.layer_stride, pages.block_stride, pages.head_stride, pages.token_stride, pages.part_stride


def _row_lengths(size: int) -> list[int]:
    """Divisors of `size` such that `PieceView` can count rows and columns in int32; ValueError if there are none.

    Below 2**40 elements, only a size with a prime factor above 2**31 has none.
    """
    found = []
    if size < MOST_COLUMNS * ROW_LIMIT:
        divisors = np.arange(1, min(isqrt(size), LARGEST_TRIED) + 1)
        divisors = divisors[size % divisors == 0].tolist()
        found = [n for n in {*divisors, *(size // n for n in divisors)} if n < MOST_COLUMNS and size // n < ROW_LIMIT]
    if not found:
        unit = max(512, 2 ** (size // ROW_LIMIT).bit_length())
        raise ValueError(
            f"a buffer of {size} elements cannot be divided into fewer than 2**31 rows of fewer than 2**30 elements "
            f"each, in which int32 indices reach its entries: expected another size, such as {-(-size // unit) * unit}"
        )
    return found
