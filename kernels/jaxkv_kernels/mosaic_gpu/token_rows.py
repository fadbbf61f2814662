"""The flat buffer as rows of tokens, so that one TMA copy fetches a tile of a page."""

from dataclasses import dataclass

import jax
from jax import lax

from jaxkv_kernels.pages import Pages


@dataclass(frozen=True)
class TokenRows:
    """A view [blocks, rows, token_stride]: token t of a page of a layer lies in row `first_row + t`."""

    shape: tuple[int, int, int]
    layer_blocks: int
    """Steps along the first axis a layer."""
    layer_rows: int
    """Steps along the second axis a layer."""
    first_row: int
    first_column: int

    def index(self, layer, block, token):
        """Indices of the rows from `token` on, a multiple of 8, of a page."""
        from jax.experimental import pallas as pl

        row = layer * self.layer_rows + self.first_row + token
        return layer * self.layer_blocks + block, pl.multiple_of(row, 8)

    def of(self, buffer: jax.Array) -> jax.Array:
        """The view; no copy."""
        return buffer.reshape(self.shape)


def token_rows(pages: Pages) -> TokenRows:
    """The view; ValueError with the reason where the strides allow none."""
    token, block, layer = pages.token_stride, pages.block_stride, pages.layer_stride
    if pages.block_size == 1:
        token = block if pages.num_blocks > 1 else pages.width
    named = {"block stride": block, "layer stride": layer, "buffer size": pages.size}
    for name, extent in named.items():
        if extent % token:
            raise ValueError(f"{name} {extent} is no multiple of the token stride {token}: pages are no rows of tokens")
    if pages.size % block:
        raise ValueError(f"buffer size {pages.size} is no multiple of the block stride {block}")
    outer = pages.num_layers > 1 and layer >= block
    if outer and layer % block:
        raise ValueError(f"layer stride {layer} is no multiple of the block stride {block}")
    rows = layer // token if pages.num_layers > 1 and not outer else 0
    first_row, first_column = pages.offset // token, pages.offset % token
    if rows % 8 or first_row % 8:
        raise ValueError(f"a layer's page begins at row {rows} or {first_row}: TMA tiles begin at multiples of 8 rows")
    if first_row >= block // token or first_column + pages.width > token:
        raise ValueError(f"offset {pages.offset} breaks entries across rows of {token} elements")
    return TokenRows(
        (pages.size // block, block // token, token), layer // block if outer else 0, rows, first_row, first_column
    )


def divided(a, b: int):
    """`a // b` of non-negative integers, as the kernels take it."""
    return lax.div(a, a.dtype.type(b))
