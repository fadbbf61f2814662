"""Loaders: where an attention kernel's keys and values come from, and how they reach shared memory.

A schedule chooses the stages and barriers; a loader knows how keys lie in device memory.  Loaders that copy columns of
pages by TMA have the interface of `Keys`.  `quantised_tiles.py` has one for whole entries, and one for keys and values
that lie apart, and `gather_keys.py` one for slots.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.mosaic_gpu.interpreter.token_rows import InterpretedTokenRows
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import prefetch_to_l2
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.token_rows import TokenRows, origin_step


class Columns(NamedTuple):
    """Some columns of a tile of keys, and where they go."""

    first: int
    """Counted from the entry's first value."""
    count: int
    into: Any
    """Shared memory [64, count]."""
    full: Any
    """The barrier that completes when they have landed."""


class Keys(Protocol):
    """A loader of tiles of 64 keys, used by the producer warpgroup."""

    def look_up(self, request, first_token):
        """Loads what `fetch` needs to find a tile.  Call it one tile ahead, so that nothing waits for these loads."""

    def fetch(self, found, first_token, *parts: Columns, **copy) -> None:
        """Starts the copies of a tile that was looked up; `copy` are options of the copies (multicast)."""

    def prefetch(self, found, first_token, *, interpret: bool) -> None:
        """Prefetches a tile that was looked up to the L2 cache."""


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


def token_rows(pages: Pages, *, second: bool = False) -> TokenRows:
    """The view of a buffer of the entries' dtype, for the GPU or the interpreter; `second` is that of `TokenRows`."""
    return (InterpretedTokenRows if interpreting.value else TokenRows)(pages, origin_step(pages), second)


class PagedKeys:
    """Keys in the pages of a cache, copied by TMA as they are."""

    def __init__(self, kv_ref, view: TokenRows, table: PageTable, layer, head: Any = 0):
        self._kv_ref, self._view, self._table = kv_ref, view, table
        self._layer, self._head = layer, head
        view.install(kv_ref)

    def look_up(self, request, first_token):
        """The blocks of a tile."""
        return self._table.blocks(request, first_token)

    def fetch(self, found, first_token, *parts: Columns, **copy) -> None:
        """Starts one TMA copy per element of `parts` and block that the tile lies in."""
        rows = self._table.copy_rows
        for first_row, block, token in self._table.copies(found, first_token):
            for first, count, into, full in parts:
                origin, row = self._view.index(self._layer, block, token, self._head)
                source = self._kv_ref.at[origin, pl.ds(row, rows), self._view.columns(first, count, origin)]
                plgpu.copy_gmem_to_smem(source, into.at[pl.ds(first_row, rows)], full, **copy)

    def prefetch(self, found, first_token, *, interpret: bool) -> None:
        """Prefetches whole entries, as one run of bytes per block: for pages with contiguous tokens."""
        nbytes = self._table.copy_rows * self._table.pages.width * self._kv_ref.dtype.itemsize
        for _, block, token in self._table.copies(found, first_token):
            start = self._view.start(self._kv_ref, *self._view.index(self._layer, block, token, self._head))
            prefetch_to_l2(start, nbytes, interpret=interpret)
