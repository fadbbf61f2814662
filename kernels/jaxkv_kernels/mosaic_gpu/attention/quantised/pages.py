"""Copies whole entries of a page to shared memory: those of a tile lie one after the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing.row_view import row_view
from jaxkv_kernels.mosaic_gpu.attention.page_table import PageTable
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS


class EntryPages:
    """Pages of a cache of one head whose tokens are contiguous: one bulk copy per block that a tile lies in."""

    def __init__(self, kv_ref, table: PageTable, layer: Any):
        self._kv_ref, self._table, self._layer = kv_ref, table, layer
        self._view = row_view(table.pages)

    @staticmethod
    def of(buffer: jax.Array, pages) -> jax.Array:
        """The operand that pages are copied from; no copy."""
        return buffer.reshape(row_view(pages).shape)

    def look_up(self, request, first_token):
        """The blocks of a tile.  Call it one tile ahead, so that nothing waits for these loads."""
        return self._table.blocks(request, first_token)

    def fetch(self, found, first_token, into, full) -> None:
        """Starts the copies to `into` [elements of a tile].  Blocks outside the cache: block 0, masked later."""
        pages, rows = self._table.pages, self._table.copy_rows
        size = rows * pages.width
        for c, block in enumerate(found):
            token = lax.rem(first_token + c * rows, jnp.int32(pages.block_size))
            block = jnp.where(self._table.known(block), block, 0)
            *row, column = self._view.index(layer=self._layer, block=block, token=token)
            source = self._kv_ref.at[*row, pl.ds(column, size)]
            plgpu.copy_gmem_to_smem(source, into.at[pl.ds(c * size, size)], full, oob_mode=IN_BOUNDS)
