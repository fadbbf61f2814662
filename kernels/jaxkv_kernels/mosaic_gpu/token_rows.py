"""The flat buffer as pages of tokens, so that one TMA copy fetches a tile of a page."""

from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxkv_kernels.addressing import Buffer, Pages, dtype_of
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.mosaic_gpu.runtime.strided import restride

TILE_ROWS, TILE_COLUMNS = 8, 64
"""TMA copies whole tiles of the swizzled memory that wgmma reads (16-bit elements)."""
ALIGNMENT = 16
"""Bytes: addresses and sizes of bulk copies, and origins and strides of views, are multiples of it."""


@dataclass(frozen=True)
class TokenRows:
    """A view [origins, tokens, width] of the buffer: if a page begins at an origin, row t of the origin is its token t.

    Keys and values that lie apart have a view each, of one buffer or of an array each.

    Every multiple of `step` elements is an origin, so that a page may begin wherever the strides put it.  Rows of
    different origins overlap, so only TMA copies can address the view (`install`).
    """

    pages: Pages
    step: int
    """Elements from one origin to the next.  The offset and all strides between pages are multiples of it."""
    second: bool = False
    """Whether the kernel has another view of the same buffer: `restride` distinguishes operands by their shapes."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Origins, tokens per page, elements per entry."""
        return self.pages.size // self.step, self.pages.block_size, self.pages.width

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of the axes of `shape`, in elements."""
        return self.step, self.pages.token_stride, 1

    def index(self, layer, block, token, head=0):
        """The origin of a page, and the row of `token`, a multiple of 8."""
        origin = self.pages.offset // self.step
        indices = {"layer": layer, "block": block, "head": head}
        for axis, (count, stride) in _origin_axes(self.pages).items():
            origin = origin + indices[axis] * (stride // self.step if count > 1 else 0)
        return origin, pl.multiple_of(token, TILE_ROWS)

    def columns(self, first: int, count: int, origin):
        """Columns of a row, for `.at`.  Those past its end are copied as zeros."""
        # Traced, since Pallas checks constants against the shape of the operand.
        return pl.ds(pl.multiple_of(first + (origin - origin), TILE_COLUMNS), count)

    def of(self, buffer: jax.Array) -> jax.Array:
        """The operand of a kernel; no copy."""
        return buffer.reshape((1, -1, self.step) if self.second else (-1, 1, self.step))

    def install(self, ref) -> None:
        """Makes the TMA copies of a kernel address `ref`, its operand, by this view."""
        restride(ref, self.shape, self.strides)

    def start(self, ref, origin, row):
        """A reference to the first element of a row of the first operand, for instructions that take an address."""
        return ref.at[origin, 0, pl.ds(row * self.pages.token_stride, 1)]


def origin_step(pages: Pages) -> int:
    """Elements from one origin to the next.  It also divides the size, because the operand has a row per origin."""
    return gcd(pages.size, pages.offset, *(stride for count, stride in _origin_axes(pages).values() if count > 1))


def in_entries_dtype[B: Buffer](buffer: B, pages: Pages, dtype: Any) -> tuple[B, Pages]:
    """The buffer as elements of `dtype`, the entries' own, and the pages in such elements; no copy."""
    resized = pages.resized(dtype_of(buffer).itemsize, jnp.dtype(dtype).itemsize)
    return jax.tree.map(lambda array: view_as(array, dtype), buffer), resized


def _origin_axes(pages: Pages) -> dict[str, tuple[int, int]]:
    """(count, stride) of the axes along which pages lie."""
    return {
        "layer": (pages.num_layers, pages.layer_stride),
        "block": (pages.num_blocks, pages.block_stride),
        "head": (pages.num_heads, pages.head_stride),
    }
