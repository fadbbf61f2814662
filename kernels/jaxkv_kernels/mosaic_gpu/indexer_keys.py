"""How tiles of 64 keys of 128 values reach shared memory, by the format of the entries.

`E4m3Keys` copies `indexer_fp8` pages as rows of 128 bytes: a row per key, followed by rows of scales.  `FloatKeys`
copies bf16 and f16 entries from pages of any strides.  Both store a tile to swizzled shared memory, in the layout that
wgmma reads.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.formats.bits import FP8, view_as
from jaxkv_kernels.mosaic_gpu.indexer_work import TILE
from jaxkv_kernels.mosaic_gpu.interpreter.paged import InterpretedRows
from jaxkv_kernels.mosaic_gpu.paged_tma import TokenRows, in_entries_dtype, origin_step
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS, swizzled

DIM = 128
BLOCKS = (32, 64, 128, 256)
"""Sizes of blocks of e4m3 keys."""
ROW_BYTES = 128
SCALE_BYTES = 4
SCALES_PER_ROW = ROW_BYTES // SCALE_BYTES


@dataclass(frozen=True)
class KeyRows:
    """A view [rows, elements of 128 bytes] of the buffer; pages begin at a row.

    A TMA copy of up to 64 consecutive rows is a tile of keys in the layout that wgmma reads.
    """

    shape: tuple[int, int]
    first: int
    layer: int
    block: int
    """`layer` and `block`: the number of rows from one layer, or one block, to the next."""

    def page(self, layer, block):
        """The first row of a page."""
        return self.first + layer * self.layer + block * self.block

    def of(self, buffer: jax.Array) -> jax.Array:
        """The view of `buffer`.  It is not a copy."""
        return buffer.reshape(self.shape)


def key_rows(pages: Pages, itemsize: int) -> KeyRows:
    """The view of a cache; raises ValueError with the reason if pages do not begin at rows of 128 bytes."""
    numbers = {"offset": pages.offset}
    numbers |= {"layer stride": pages.layer_stride} if pages.num_layers > 1 else {}
    numbers |= {"block stride": pages.block_stride} if pages.num_blocks > 1 else {}
    numbers["buffer size"] = pages.size
    rows = {}
    for name, elements in numbers.items():
        rows[name], rest = divmod(elements * itemsize, ROW_BYTES)
        if rest:
            raise ValueError(f"{name} of {elements * itemsize} bytes: supports multiples of {ROW_BYTES}")
    if rows["buffer size"] >= 2**31:
        raise ValueError(f"buffer of {rows['buffer size']} rows of {ROW_BYTES} bytes: supports fewer than 2**31")
    shape = rows["buffer size"], ROW_BYTES // itemsize
    return KeyRows(shape, rows["offset"], rows.get("layer stride", 0), rows.get("block stride", 0))


class KeyTiles(Protocol):
    """The operations on keys that `logits.py` needs.  `refs` are the kernel's references to `operands`."""

    copies: int
    """How many copies `fetch` starts per block: a tile lies in one block or several."""
    stage_bytes: int
    """Bytes of shared memory per tile."""

    @property
    def dtype(self) -> Any:
        """The dtype of the tiles."""

    def operands(self, buffer: jax.Array) -> list[jax.Array]:
        """The operands of the kernel through which keys are read."""

    def shared(self, stages: int) -> list[Any]:
        """Shared memory for `stages` tiles."""

    def install(self, refs) -> None:
        """Prepares copies; the producer calls this before its first copy."""

    def fetch(self, refs, shared, stage, first_row: int, rows: int, page, tile_in_block, full) -> None:
        """Starts the copies of `rows` keys of `page` (layer, block) to a stage, from row `first_row` of the tile on."""

    def tile(self, shared, stage) -> Any:
        """The keys [64, 128] of a stage."""

    def scales(self, shared, stage) -> Any:
        """The float32 scales of a tile's keys, a ROW array, or None if keys have no scales."""


@dataclass(frozen=True)
class E4m3Keys:
    """Keys of `indexer_fp8` entries: e4m3 values with a scale per key."""

    view: KeyRows
    block_size: int
    raw: Any
    """The dtype of the buffer."""
    interpret: bool

    dtype = FP8
    copies = 2
    stage_bytes = TILE * (DIM + SCALE_BYTES)

    def operands(self, buffer):
        """The rows of the buffer; for the interpreter, which has no views of another dtype, as e4m3 and as float32."""
        rows = self.view.of(buffer)
        return [view_as(rows, FP8), view_as(rows, jnp.float32)] if self.interpret else [rows]

    def shared(self, stages):
        """Shared memory for values, and for scales."""
        if self.interpret:
            rows = TILE // SCALES_PER_ROW
            return [plgpu.SMEM((stages, TILE, DIM), FP8), plgpu.SMEM((stages, rows, SCALES_PER_ROW), jnp.float32)]
        width = self.view.shape[1]
        return [
            plgpu.RefUnion(
                plgpu.SMEM((stages, TILE, width), self.raw, transforms=(plgpu.SwizzleTransform(128),)),
                swizzled(stages, TILE, DIM, dtype=FP8),
            ),
            plgpu.RefUnion(
                plgpu.SMEM((stages, TILE // SCALES_PER_ROW, width), self.raw), plgpu.SMEM((stages, TILE), jnp.float32)
            ),
        ]

    def install(self, refs):
        """Does nothing."""

    def fetch(self, refs, shared, stage, first_row, rows, page, tile_in_block, full):
        """Starts one copy of values and one of scales."""
        (key_ref, scale_ref), (k, s) = (refs, shared) if self.interpret else (refs * 2, [both[0] for both in shared])
        first = self.view.page(*page)
        values = key_ref.at[pl.ds(first + tile_in_block * TILE, rows)]
        plgpu.copy_gmem_to_smem(values, k.at[stage, pl.ds(first_row, rows)], full)
        row, count = first + self.block_size + tile_in_block * (TILE // SCALES_PER_ROW), rows // SCALES_PER_ROW
        to = s.at[stage, pl.ds(first_row // SCALES_PER_ROW, count)]
        plgpu.copy_gmem_to_smem(scale_ref.at[pl.ds(row, count)], to, full, oob_mode=IN_BOUNDS)

    def tile(self, shared, stage):
        """The e4m3 keys of a stage."""
        return (shared[0] if self.interpret else shared[0][1]).at[stage]

    def scales(self, shared, stage):
        """The scales of a stage, which are powers of two."""
        if self.interpret:
            return shared[1][stage].reshape(TILE)
        return plgpu.load(shared[1][1].at[stage], layout=ROW)


@dataclass(frozen=True)
class FloatKeys:
    """Keys of bf16 and f16 entries, at any strides that are multiples of 16 bytes."""

    view: TokenRows
    dtype: Any

    copies = 1
    stage_bytes = TILE * DIM * 2

    def operands(self, buffer):
        """The buffer, viewed in the entries' dtype."""
        return [self.view.of(view_as(buffer, self.dtype))]

    def shared(self, stages):
        """Shared memory for values."""
        return [swizzled(stages, TILE, DIM, dtype=self.dtype)]

    def install(self, refs):
        """Makes copies address the buffer by its strides."""
        self.view.install(refs[0])

    def fetch(self, refs, shared, stage, first_row, rows, page, tile_in_block, full):
        """Starts one copy."""
        layer, block = page
        origin, row = self.view.index(layer, block, tile_in_block * TILE)
        source = refs[0].at[origin, pl.ds(row, rows), self.view.columns(0, DIM, origin)]
        plgpu.copy_gmem_to_smem(source, shared[0].at[stage, pl.ds(first_row, rows)], full)

    def tile(self, shared, stage):
        """The keys of a stage, in the dtype of the entries."""
        return shared[0].at[stage]

    def scales(self, shared, stage):
        """Returns None, because these keys have no scales."""
        return None


def key_tiles(entry, pages: Pages, buffer: jax.Array, *, interpret: bool) -> KeyTiles:
    """The `KeyTiles` of a cache of `entry`."""
    if entry.quantised:
        view = key_rows(pages, buffer.dtype.itemsize)
        return E4m3Keys(view, pages.block_size, buffer.dtype, interpret)
    _, pages = in_entries_dtype(buffer, pages, entry.dtype)
    return FloatKeys((InterpretedRows if interpret else TokenRows)(pages, origin_step(pages)), entry.dtype)
