"""The flat buffer as rows of tokens, so that one TMA copy fetches a tile of a page."""

from dataclasses import dataclass

import jax

from jaxkv_kernels.addressing.pages import Pages

TILE_ROWS, TILE_COLUMNS = 8, 64
"""TMA copies whole tiles of the swizzled memory that wgmma reads (16-bit elements)."""
RAW_COLUMNS = 16
"""Bytes: TMA's addresses are multiples of it."""


@dataclass(frozen=True)
class Step:
    """How far one step along an axis of the cache leads in the view; one of the three, or none."""

    blocks: int = 0
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True)
class TokenRows:
    """A view [blocks, rows, token_stride]: token t of a page lies in the t-th row from the page's first."""

    shape: tuple[int, int, int]
    layer: Step
    head: Step
    first_row: int
    first_column: int
    unit: int
    """Columns are multiples of it."""

    def index(self, layer, block, token, head=0):
        """Indices of the rows from `token` on, a multiple of 8, of a page."""
        from jax.experimental import pallas as pl

        row = layer * self.layer.rows + head * self.head.rows + self.first_row + token
        return layer * self.layer.blocks + head * self.head.blocks + block, pl.multiple_of(row, TILE_ROWS)

    def column(self, layer, head=0):
        """The first column of a page's entries."""
        from jax.experimental import pallas as pl

        column = layer * self.layer.columns + head * self.head.columns + self.first_column
        return pl.multiple_of(column, self.unit)

    def of(self, buffer: jax.Array) -> jax.Array:
        """The view; no copy."""
        return buffer.reshape(self.shape)


def token_rows(pages: Pages, columns: int = TILE_COLUMNS) -> TokenRows:
    """The view, of entries that begin at multiples of `columns`; ValueError with the reason if the strides allow none.

    Bytes, which are copied to shared memory without a swizzle, begin at multiples of RAW_COLUMNS.
    """
    token, block = pages.token_stride, pages.block_stride
    if pages.block_size == 1:
        token = block if pages.num_blocks > 1 else pages.width
    axes = {"layer": (pages.num_layers, pages.layer_stride), "head": (pages.num_heads, pages.head_stride)}
    named = {f"{axis} stride": stride for axis, (count, stride) in axes.items() if count > 1 and stride > token}
    for name, extent in {"block stride": block, **named, "buffer size": pages.size}.items():
        if extent % token:
            raise ValueError(
                f"{name} {extent} is not a multiple of the token stride {token}: pages are not rows of tokens"
            )
    if pages.size % block:
        raise ValueError(f"buffer size {pages.size} is not a multiple of the block stride {block}")
    steps, last_column = {}, pages.offset % token
    for axis, (count, stride) in axes.items():
        if count == 1:
            steps[axis] = Step()
        elif stride < token:
            steps[axis] = Step(columns=stride)
            last_column += (count - 1) * stride
        elif stride < block:
            steps[axis] = Step(rows=stride // token)
        elif stride % block:
            raise ValueError(f"{axis} stride {stride} is not a multiple of the block stride {block}")
        else:
            steps[axis] = Step(blocks=stride // block)
    first_row, first_column = pages.offset // token, pages.offset % token
    last_row = first_row + pages.block_size + sum((count - 1) * steps[axis].rows for axis, (count, _) in axes.items())
    if last_row > block // token:
        raise ValueError(f"pages end at row {last_row} of a block of {block // token}: entries of blocks interleave")
    if last_column + pages.width > token:
        raise ValueError(f"offset {pages.offset} breaks entries across rows of {token} elements")
    numbers = {"rows a block": (block // token, TILE_ROWS), "first row": (first_row, TILE_ROWS)}
    numbers |= {"columns a row": (token, columns), "first column": (first_column, columns)}
    for axis, step in steps.items():
        numbers |= {f"rows a {axis}": (step.rows, TILE_ROWS), f"columns a {axis}": (step.columns, columns)}
    for name, (number, tile) in numbers.items():
        if number % tile:
            reason = f"TMA copies tiles of 8 rows by {columns} columns"
            raise ValueError(f"{name} {number} is not a multiple of {tile}: {reason}")
    shape = pages.size // block, block // token, token
    return TokenRows(shape, steps["layer"], steps["head"], first_row, first_column, columns)
