"""Tiles of quantised keys and values of one KV head: swizzled, and stored separately."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.paging.keys import Columns, PagedKeys
from jaxkv_kernels.mosaic_gpu.attention.paging.page_table import PageTable, copies_per_tile
from jaxkv_kernels.mosaic_gpu.attention.paging.token_rows import token_rows
from jaxkv_kernels.mosaic_gpu.attention.quantised import lanes
from jaxkv_kernels.mosaic_gpu.attention.quantised.tiles import GROUP, KEY_GROUP, Tiles, words
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled

ROOM = 160 * 1024
"""Bytes of shared memory for tiles."""
SWIZZLED = plgpu.RefType(swizzled(1, dtype=jnp.uint8).transforms)


@dataclass(frozen=True)
class KVTiles(Tiles):
    """What tiles of keys and values have in common, whatever the format of their entries."""

    entry: KVEntry

    @property
    def query_dtypes(self):
        """The queries are one float16 array."""
        return (jnp.dtype(jnp.float16),)

    @property
    def query_groups(self):
        """The groups of 64 columns of a head's queries."""
        return (self.entry.head_dim // KEY_GROUP,)

    @property
    def value_groups(self):
        """The groups of 128 columns of a head's values."""
        return self.entry.value_dim // GROUP

    def stages(self, most, consumers):
        """How many tiles fit in shared memory."""
        return min(most, ROOM // (consumers * TILE * self.entry.nbytes) * consumers)

    def operand(self, buffer: jax.Array, pages) -> jax.Array:
        """The kernel operand that pages are copied from.  It is a view of `buffer`, not a copy."""
        return token_rows(pages).of(buffer)

    def loader(self, ref, table: PageTable, layer, head):
        """The loader of the tiles of a layer and head."""
        return PagedKeys(ref, token_rows(table.pages), table, layer, head)


class HeadTiles(KVTiles):
    """Tiles of `fp8` entries: two references, keys uint8 [stages, 64, D] and values [stages, 64, Dv]."""

    def raw_types(self, stages: int):
        """The types of the shared memory for keys and values."""
        return tuple(swizzled(stages, TILE, width, dtype=jnp.uint8) for width in self.entry.sizes)

    def copies(self, pages) -> int:
        """The number of copies that fetch a tile: two per block that it lies in."""
        return 2 * copies_per_tile(pages)

    def parts(self, raw, stage, full):
        """The keys and the values of an entry: two ranges of its columns, which are copied separately."""
        firsts = (0, self.entry.head_dim)
        return tuple(
            Columns(first, width, ref.at[stage], full)
            for ref, first, width in zip(raw, firsts, self.entry.sizes, strict=True)
        )

    def load_keys(self, raw, stage, group):
        """Loads 64 columns of keys, from the first reference of `raw`."""
        held = words(8)

        @plgpu.inline_mgpu(arg_types=(SWIZZLED, SCALAR), return_type=held)
        def load(_, ref, stage):
            found = lanes.load_head_keys(ref, stage.registers.item(), self.entry.head_dim, group)
            return array(found, held.layout)

        return load(raw[0], stage)

    def load_values(self, raw, stage, step):
        """Loads the values of 16 tokens, from the second reference of `raw`."""

        @plgpu.inline_mgpu(arg_types=(SWIZZLED, SCALAR), return_type=self._values)
        def load(_, ref, stage):
            found = lanes.load_head_values(ref, stage.registers.item(), self.entry.value_dim, step)
            return array(found, self._values.layout)

        return load(raw[1], stage)

    def _clear_token(self, raw, stage, row):
        @plgpu.inline_mgpu(arg_types=(SWIZZLED, SCALAR, SCALAR))
        def clear(_, ref, stage, row):
            lanes.clear_head_values(ref, stage.registers.item(), self.entry.value_dim, row.registers.item())

        clear(raw[1], stage, row)
