"""Tiles of quantised MLA entries: whole entries, one after the other; values are the first 512 columns of keys."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import row_view
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.paging.keys import Columns
from jaxkv_kernels.mosaic_gpu.attention.paging.page_table import PageTable, copies_per_tile
from jaxkv_kernels.mosaic_gpu.attention.quantised import lanes
from jaxkv_kernels.mosaic_gpu.attention.quantised.tiles import GROUP, KEY_GROUP, PLAIN, Array, Tiles, words
from jaxkv_kernels.mosaic_gpu.runtime.elements import array
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, SCALAR
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT, ROPE


@dataclass(frozen=True)
class LatentTiles(Tiles):
    """Tiles of `fp8` or `fp8_ds_mla` entries: one reference, uint8 [stages, bytes of a tile]."""

    entry: MLAEntry

    @property
    def query_groups(self):
        """The groups of 64 columns of the latent queries, and of the rotary queries."""
        return LATENT // KEY_GROUP, ROPE // KEY_GROUP

    @property
    def value_groups(self):
        """The groups of 128 columns of a latent."""
        return LATENT // GROUP

    @property
    def scaled(self):
        """Whether tokens have scales of their own, as in `fp8_ds_mla`: a group of 128 latents has one.

        Rotary keys are bf16 in that case.
        """
        return self.entry.format == "fp8_ds_mla"

    @property
    def weight_groups(self):
        """The groups of 128 latents, if they have scales."""
        return self.value_groups if self.scaled else 1

    @property
    def score_groups(self):
        """The groups of 128 latents, if they have scales, and the rotary part."""
        return self.value_groups + 1 if self.scaled else 1

    def score_group(self, key_group):
        """Two groups of 64 columns share a scale."""
        return key_group * KEY_GROUP // GROUP if self.scaled else 0

    def is_wide(self, key_group):
        """The rotary part of `fp8_ds_mla` is bf16."""
        return self.scaled and key_group == self.key_groups - 1

    @property
    def query_dtypes(self):
        """Latent queries are float16.  Rotary queries have the dtype of rotary keys."""
        return jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16 if self.scaled else jnp.float16)

    @property
    def scales_at(self) -> int:
        """The byte of an entry at which its scales begin."""
        return next(part.offset for part in self.entry.fields() if part.name == "scales")

    @property
    def _swapped(self):
        return self.entry.nbytes % 128 == 64

    def raw_types(self, stages: int):
        """The type of the shared memory for entries."""
        return (plgpu.SMEM((stages, TILE * self.entry.nbytes), jnp.uint8),)

    def copies(self, pages) -> int:
        """The number of copies that fetch a tile: one per block that it lies in."""
        return copies_per_tile(pages)

    def operand(self, buffer: jax.Array, pages) -> jax.Array:
        """The kernel operand that pages are copied from.  It is a view of `buffer`, not a copy."""
        return buffer.reshape(row_view(pages).shape)

    def loader(self, ref, table: PageTable, layer, head):
        """The loader of the tiles of a layer."""
        del head
        return EntryPages(ref, table, layer)

    def parts(self, raw, stage, full):
        """Returns the only part: whole entries."""
        return (Columns(0, self.entry.nbytes, raw[0].at[stage], full),)

    def load_keys(self, raw, stage, group):
        """Loads 64 columns of keys.  The last group is the rotary part."""
        wide = self.is_wide(group)
        held = words(16 if wide else 8)

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=held)
        def load(_, ref, stage):
            found = lanes.load_entry_keys(ref, stage.registers.item(), self.entry.nbytes, group, wide=wide)
            return array(found, held.layout)

        return load(raw[0], stage)

    def load_values(self, raw, stage, step):
        """Loads the latents of 16 tokens, from the same bytes as keys."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=self._values)
        def load(_, ref, stage):
            nbytes, swapped = self.entry.nbytes, self._swapped
            found = lanes.load_of_tokens(
                ref, stage.registers.item(), nbytes, step, groups=self.value_groups, swapped=swapped
            )
            return array(found, self._values.layout)

        return load(raw[0], stage)

    def load_scales(self, raw, stage):
        """Loads the scales of a tile, one per token and 128 latents."""
        if not self.scaled:
            return [], []
        types = [Array((TILE,), jnp.dtype(jnp.float32), layout=ROW)] * self.value_groups

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=types)
        def load(_, ref, stage):
            return lanes.load_scales(
                ref, stage.registers.item(), self.entry.nbytes, self.scales_at, ROW, self.value_groups
            )

        scales = load(raw[0], stage)
        return scales, scales

    def _clear_token(self, raw, stage, row):
        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR))
        def clear(_, ref, stage, row):
            lanes.clear_entry(ref, stage.registers.item(), self.entry.nbytes, row.registers.item())

        clear(raw[0], stage, row)


class EntryPages:
    """Copies tiles of entries from pages with contiguous tokens, by one bulk copy per block that a tile lies in."""

    def __init__(self, kv_ref, table: PageTable, layer):
        self._kv_ref, self._table, self._layer = kv_ref, table, layer
        self._view = row_view(table.pages)

    def look_up(self, request, first_token):
        """The blocks that a tile lies in.  Call it one tile ahead, so that nothing waits for these loads."""
        return self._table.blocks(request, first_token)

    def fetch(self, found, first_token, entries: Columns) -> None:
        """Starts the copies of a tile."""
        width = self._table.pages.width
        size = self._table.copy_rows * width
        for first_row, block, token in self._table.copies(found, first_token):
            *row, column = self._view.index(layer=self._layer, block=block, token=token)
            source = self._kv_ref.at[*row, pl.ds(column, size)]
            into = entries.into.at[pl.ds(first_row * width, size)]
            plgpu.copy_gmem_to_smem(source, into, entries.full, oob_mode=IN_BOUNDS)
