"""A block table in the hands of a kernel."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.token_rows import divided
from jaxkv_kernels.pages import Pages

TILE = 64
"""Tokens of a tile of keys."""


@dataclass(frozen=True)
class PageTable:
    """Where the tokens of requests are, by a table [B, M] in device memory."""

    ref: Any
    pages: Pages

    @property
    def copy_rows(self) -> int:
        """Tokens of a tile that lie in one page."""
        return min(self.pages.block_size, TILE)

    @property
    def copies(self) -> int:
        """Copies that fetch a tile."""
        return TILE // self.copy_rows

    def block(self, b, token):
        """The block of a token of request b, and whether it is one of the cache."""
        column = jnp.minimum(divided(token, self.pages.block_size), self.ref.shape[1] - 1)
        block = self.ref[b, column]
        return block, (block >= 0) & (block < self.pages.num_blocks)

    def safe_blocks(self, b, first_token):
        """The blocks of a tile, copy by copy; block 0 for those that are not the cache's."""
        found = [self.block(b, first_token + c * self.copy_rows) for c in range(self.copies)]
        return tuple(jnp.where(known, block, 0) for block, known in found)

    def without_unknown(self, b, first_token, token, x, fill):
        """A tile `x`, with `fill` at tokens of blocks that are not the cache's; `token` [64, 64] are its tokens."""
        fill = jnp.asarray(fill, x.dtype)
        for c in range(self.copies):
            low = first_token + c * self.copy_rows
            high = low + jnp.where(self.block(b, low)[1], 0, self.copy_rows)
            x = jnp.where(token < low, x, jnp.where(token < high, fill, x))
        return x
