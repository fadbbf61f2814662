"""Tiles of quantised keys and values of one KV head whose tokens have scales: whole entries, one after the other.

TMA copies the words of an entry as one contiguous range.  With 128 + 128 values, an entry takes an odd number of
16-byte units: 17 for `int8`, 9 for `nvfp4`.  Lanes that read the same columns of successive tokens therefore rarely use
the same banks of shared memory.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.formats.nvfp4 import TILE as SCALE_TILE
from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.paging.keys import Columns
from jaxkv_kernels.mosaic_gpu.attention.paging.page_table import copies_per_tile
from jaxkv_kernels.mosaic_gpu.attention.quantised import e2m1, lanes
from jaxkv_kernels.mosaic_gpu.attention.quantised.heads import KVTiles
from jaxkv_kernels.mosaic_gpu.attention.quantised.tiles import GROUP, KEY_GROUP, PLAIN, Array, N, words
from jaxkv_kernels.mosaic_gpu.runtime.elements import array
from jaxkv_kernels.mosaic_gpu.runtime.ptx import INT8_TO_F16
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, SCALAR, WGMMA


class RowTiles(KVTiles):
    """Tiles of whole entries: one reference, uint32 [stages, 64, words of an entry]."""

    @property
    def dtype(self):
        """Words: TMA copies at most 256 elements of a row."""
        return jnp.dtype(jnp.uint32)

    @property
    def scales_at(self) -> int:
        """The byte of an entry at which its scales begin."""
        return next(part.offset for part in self.entry.fields() if part.name == "K scales")

    @property
    def values_at(self) -> int:
        """The byte of an entry at which its values begin."""
        return next(part.offset for part in self.entry.fields() if part.name == "V")

    @property
    def _words(self) -> int:
        return self.entry.nbytes // self.dtype.itemsize

    def raw_types(self, stages: int):
        """The type of the shared memory for entries."""
        return (plgpu.SMEM((stages, TILE, self._words), self.dtype),)

    def copies(self, pages) -> int:
        """The number of copies that fetch a tile: one per block that it lies in."""
        return copies_per_tile(pages)

    def parts(self, raw, stage, full):
        """Returns the only part: whole entries."""
        return (Columns(0, self._words, raw[0].at[stage], full),)

    def _clear_token(self, raw, stage, row):
        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR))
        def clear(_, ref, stage, row):
            lanes.clear_entry(ref, stage.registers.item(), self.entry.nbytes, row.registers.item())

        clear(raw[0], stage, row)


class Int8Tiles(RowTiles):
    """Tiles of `int8` entries, whose tokens have a scale of keys and one of values."""

    @property
    def scaled(self):
        """Scores are multiplied by the scales of keys, and weights by those of values."""
        return True

    @property
    def _convert(self):
        return INT8_TO_F16

    def load_keys(self, raw, stage, group):
        """Loads 64 columns of keys, with which entries begin."""
        held = words(8)

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=held)
        def load(_, ref, stage):
            found = lanes.load_entry_keys(ref, stage.registers.item(), self.entry.nbytes, group, wide=False)
            return array(found, held.layout)

        return load(raw[0], stage)

    def load_values(self, raw, stage, step):
        """Loads the values of 16 tokens."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=self._values)
        def load(_, ref, stage):
            found = lanes.load_of_tokens(
                ref, stage.registers.item(), self.entry.nbytes, step,
                offset=self.values_at, groups=self.value_groups, swapped=False,
            )  # fmt: skip
            return array(found, self._values.layout)

        return load(raw[0], stage)

    def load_scales(self, raw, stage):
        """Loads the scales of a tile: of keys, and of values."""
        types = [Array((TILE,), jnp.dtype(jnp.float32), layout=ROW)] * 2

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=types)
        def load(_, ref, stage):
            return lanes.load_scales(ref, stage.registers.item(), self.entry.nbytes, self.scales_at, ROW, 2)

        keys, values = load(raw[0], stage)
        return [keys], [values]


class Nvfp4Tiles(RowTiles):
    """Tiles of `nvfp4` entries, whose scales are multiplied into keys and values as these are converted."""

    @property
    def unit(self):
        """What conversion by way of e4m3 leaves to do."""
        return e2m1.UNIT

    @property
    def _pairs(self):
        return e2m1.PAIRS

    def load_keys(self, raw, stage, group):
        """Loads 64 columns of keys, and their scales."""
        held = words(8)

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=held)
        def load(_, ref, stage):
            found = e2m1.load_keys(ref, stage.registers.item(), self.entry.nbytes, self.scales_at, group)
            return array(found, held.layout)

        return load(raw[0], stage)

    def load_values(self, raw, stage, step):
        """Loads the values of 16 tokens, and their scales."""
        scales_at = self.scales_at + self.entry.head_dim // SCALE_TILE

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=self._values)
        def load(_, ref, stage):
            found = e2m1.load_of_tokens(
                ref, stage.registers.item(), self.entry.nbytes, self.values_at, scales_at, step, self.value_groups
            )
            return array(found, self._values.layout)

        return load(raw[0], stage)

    def convert_keys(self, loaded, group):
        """Converts what `load_keys` returned to a float16 operand [64, 64]."""

        @plgpu.inline_mgpu(
            arg_types=(words(8).layout,), return_type=Array((TILE, KEY_GROUP), jnp.dtype(jnp.float16), layout=WGMMA)
        )
        def convert(_, loaded):
            return e2m1.convert_keys(loaded, WGMMA)

        return convert(loaded)

    def convert_values(self, loaded, group):
        """Converts a group of what `load_values` returned to a float16 operand [128, 16], columns by tokens."""

        @plgpu.inline_mgpu(
            arg_types=(self._values.layout,), return_type=Array((GROUP, N), jnp.dtype(jnp.float16), layout=WGMMA)
        )
        def convert(_, loaded):
            return e2m1.convert_values(loaded, WGMMA, group)

        return convert(loaded)
