"""A block table in the hands of a kernel."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.mosaic_gpu.attention.token_rows import divided

TILE = 64
"""Tokens of a tile of keys."""


def copies_of(pages: Pages) -> int:
    """How many copies fetch a tile: one a page that it lies in."""
    return TILE // min(pages.block_size, TILE)


@dataclass(frozen=True)
class PageTable:
    """Where the tokens of requests are, by a table [B, M] in device memory."""

    ref: Any
    pages: Pages

    @property
    def copy_rows(self) -> int:
        """Tokens a copy."""
        return TILE // copies_of(self.pages)

    def block(self, b, token):
        """What the table holds for a token of request b."""
        column = jnp.minimum(divided(token, self.pages.block_size), self.ref.shape[1] - 1)
        return self.ref[b, column]

    def known(self, block):
        """Whether it is a block of the cache."""
        return (block >= 0) & (block < self.pages.num_blocks)

    def blocks(self, b, first_token):
        """The blocks of a tile, copy by copy, as the table has them.

        They are not used here: the loads proceed until their first use.
        """
        return tuple(self.block(b, first_token + c * self.copy_rows) for c in range(copies_of(self.pages)))

    def without_unknown(self, b, first_token, token, x, fill):
        """A tile `x`, with `fill` at tokens of blocks that are not the cache's; `token` [64, 64] are its tokens."""
        fill = jnp.asarray(fill, x.dtype)
        for c in range(copies_of(self.pages)):  # one at a time: registers are scarce where this is called
            low = first_token + c * self.copy_rows
            high = low + jnp.where(self.known(self.block(b, low)), 0, self.copy_rows)
            x = jnp.where(token < low, x, jnp.where(token < high, fill, x))
        return x
