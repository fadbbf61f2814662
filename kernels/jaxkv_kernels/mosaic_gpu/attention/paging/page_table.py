"""Device-side: a block table, and the blocks that a tile of keys lies in."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv


def copies_per_tile(pages: Pages) -> int:
    """How many copies fetch a tile: one per block that it lies in."""
    return TILE // min(pages.block_size, TILE)


@dataclass(frozen=True)
class PageTable:
    """A block table [B, M] in device memory."""

    ref: Any
    pages: Pages

    @property
    def copy_rows(self) -> int:
        """Tokens per copy."""
        return TILE // copies_per_tile(self.pages)

    def block(self, request, token):
        """The table's entry for a token of a request."""
        column = jnp.minimum(floordiv(token, self.pages.block_size), self.ref.shape[1] - 1)
        return self.ref[request, column]

    def known(self, block):
        """Whether `block` is a block of the cache."""
        return (block >= 0) & (block < self.pages.num_blocks)

    def blocks(self, request, first_token):
        """The table's entries for a tile, one per copy.

        They are only loaded here, not used: a caller that looks up a tile ahead does not wait for the loads.
        """
        return tuple(self.block(request, first_token + c * self.copy_rows) for c in range(copies_per_tile(self.pages)))

    def copies(self, found, first_token):
        """Yields where each copy of a tile begins: the row in the tile, the block, and the token within the block.

        `found` is what `blocks` returned.  Block 0 stands in for blocks outside the cache, whose tokens are masked
        later.
        """
        for c, block in enumerate(found):
            first_row = c * self.copy_rows
            token = lax.rem(first_token + first_row, jnp.int32(self.pages.block_size))
            yield first_row, jnp.where(self.known(block), block, 0), token

    def known_copies(self, request, first_token):
        """Yields the row in a tile where each copy begins, and whether its block is in the cache."""
        for c in range(copies_per_tile(self.pages)):  # one at a time: registers are scarce where this is called
            row = c * self.copy_rows
            yield row, self.known(self.block(request, first_token + row))

    def mask_unknown(self, request, first_token, token, x, fill):
        """A tile `x`, with `fill` at tokens of unknown blocks; `token`, of the same shape, has each element's token."""
        fill = jnp.asarray(fill, x.dtype)
        for row, known in self.known_copies(request, first_token):
            low = first_token + row
            high = low + jnp.where(known, 0, self.copy_rows)
            x = jnp.where(token < low, x, jnp.where(token < high, fill, x))
        return x
