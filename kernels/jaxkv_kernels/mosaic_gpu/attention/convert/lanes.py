"""What one lane does in a conversion: MLIR and inline PTX.

A lane loads chunks of 16 bytes of e4m3 values and stores each as two chunks of float16.  Eight lanes share a phase of a
shared-memory access.  They take four neighbouring chunks of an even row, and four of the next row.  As float16, the
128-byte swizzle spreads the even (or odd) chunks of an even row over one half of the banks, and those of an odd row
over the other half.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.gather.lanes import (
    COLUMN_TILE,
    LOAD,
    STORE,
    THREADS,
    c32,
    c64,
    i32,
    i64,
    ptx,
)
from jaxkv_kernels.mosaic_gpu.attention.gather.lanes import _at as at
from jaxkv_kernels.mosaic_gpu.attention.gather.lanes import _wide as wide
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT

WARP_ROWS = TILE // 4
"""Rows of a tile that a warp converts."""
CONVERT = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
"""Four e4m3 values to float16."""


def one_per_lane(x, layout) -> Any:
    """A register as an array of one value per lane."""
    held = np.empty((1,), dtype=object)
    held[0] = vector.from_elements(ir.VectorType.get((1,), i32()), [x])
    return mgpu.FragmentedArray(_registers=held, _layout=layout.to_mgpu(), _is_signed=True)


def value(array) -> Any:
    """The register of an array of one value per lane, or of one value."""
    register = array.registers.item()
    if not isinstance(register.type, ir.VectorType):
        return register
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))


class Lane:
    """Where the calling lane stands.

    The compiler cannot know that it is the same each time.  It would otherwise keep all that follows from it, such as
    addresses, in registers that loads on their way need.
    """

    def __init__(self):
        thread = arith.remui(mgpu.utils.thread_idx(), c32(THREADS))
        thread = ptx("mov.b32 $0, $1;", thread, result_types=i32(), has_side_effects=True)
        self.lane = arith.andi(thread, c32(31))
        self.warp = arith.shrui(thread, c32(5))
        self.phase = arith.shrui(self.lane, c32(3))
        self.odd = arith.andi(arith.shrui(self.lane, c32(2)), c32(1))
        """The row, of two."""
        self.chunk = arith.andi(self.lane, c32(3))
        """Of four chunks."""

    @property
    def column_tile(self) -> Any:
        """Of a half's four column tiles of 64 values: one for the even row, its neighbour for the odd one."""
        return arith.xori(self.phase, self.odd)


def load_block(cache, table, request, tile) -> Any:
    """The table's entry for the calling warp's rows of a tile."""
    columns = ir.MemRefType(table.type).shape[1]
    token = arith.addi(arith.shli(tile, c32(6)), arith.muli(Lane().warp, c32(WARP_ROWS)))
    column = arith.minui(arith.divui(token, c32(cache.pages.block_size)), c32(columns - 1))
    first = arith.muli(arith.extui(i64(), request), c64(4 * columns))
    place = at(at(mgpu.utils.memref_ptr(table), first), wide(arith.shli(column, c32(2))))
    return ptx("ld.global.nc.b32 $0, [$1];", place, result_types=i32(), has_side_effects=True)


def first_row(cache, kv, block, tile, layer) -> Any:
    """Where the first of the calling warp's rows of a tile begins; in an unknown block, of block 0."""
    pages = cache.pages
    # The same in all lanes.  The compiler moves other arithmetic on it up to the load, and waits there.
    first_lane = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    block = ptx(first_lane, block, result_types=i32(), has_side_effects=True, convergent=True)
    known = arith.cmpi(arith.CmpIPredicate.ult, block, c32(pages.num_blocks))
    block = arith.select(known, block, c32(0))
    token = arith.addi(arith.shli(tile, c32(6)), arith.muli(Lane().warp, c32(WARP_ROWS)))
    token = arith.remui(token, c32(pages.block_size))
    # Tokens of a block are within 2**31 bytes: 32 bits, where a product in 64 would take more registers.
    in_block = wide(arith.muli(token, c32(cache.token_bytes)))
    offset = arith.addi(_times(block, pages.block_stride * cache.itemsize), in_block)
    if pages.num_layers > 1:
        offset = arith.addi(offset, _times(layer, pages.layer_stride * cache.itemsize))
    return at(at(mgpu.utils.memref_ptr(kv), offset), c64(pages.offset * cache.itemsize))


def load_half(cache, first, half: int) -> list[Any]:
    """The lane's chunks of half a latent: words of one per pair of its warp's rows."""
    lane = Lane()
    chunk = arith.addi(arith.shli(lane.column_tile, c32(2)), lane.chunk)
    start = at(first, wide(_sum(arith.muli(lane.odd, c32(cache.token_bytes)), arith.shli(chunk, c32(4)))))
    return _loads(start, [half * HALF + 2 * n * cache.token_bytes for n in range(WARP_ROWS // 2)])


def store_half(into, offset: int, chunks: list[Any]) -> None:
    """Stores what `load_half` returned as float16 to a swizzled [64, 256] tile at `offset`."""
    lane = Lane()
    row_tile = HALF // 64 * COLUMN_TILE
    start = _sum(
        arith.muli(lane.warp, c32(2 * row_tile)),
        arith.muli(lane.column_tile, c32(COLUMN_TILE)),
        _in_row(lane, lane.odd),
    )
    for n, chunk in enumerate(chunks):
        # Rows 2n and 2n + 1: bits 1 and 2 of the row are also exclusive-ored into the chunk.
        in_tile, pair = divmod(n, 4)
        _store_converted(into, arith.xori(start, c32(pair * 32)), offset + in_tile * row_tile + pair * 256, chunk)


def load_rope(cache, first) -> list[Any]:
    """The lane's chunks of rotary keys: one per eight of its warp's rows."""
    lane = Lane()
    row = arith.shrui(lane.lane, c32(2))
    start = at(first, wide(_sum(arith.muli(row, c32(cache.token_bytes)), arith.shli(lane.chunk, c32(4)))))
    return _loads(start, [LATENT + 8 * n * cache.token_bytes for n in range(WARP_ROWS // 8)])


def store_rope(into, offset: int, chunks: list[Any]) -> None:
    """Stores what `load_rope` returned as float16 to a swizzled [64, 64] tile at `offset`."""
    lane = Lane()
    row = _sum(arith.shli(lane.phase, c32(1)), lane.odd)
    start = _sum(arith.muli(lane.warp, c32(2 * COLUMN_TILE)), _in_row(lane, row))
    for n, chunk in enumerate(chunks):
        _store_converted(into, start, offset + n * COLUMN_TILE, chunk)


def _in_row(lane: Lane, row) -> Any:
    """Bytes from a column tile to the first chunk that a lane stores of `row`, below 8."""
    return _sum(arith.shli(row, c32(7)), arith.shli(arith.xori(arith.shli(lane.chunk, c32(1)), row), c32(4)))


def _loads(start, offsets) -> list[Any]:
    found = [ptx(LOAD.format(offset=n), start, result_types=[i32()] * 4, has_side_effects=True) for n in offsets]
    ptx("bar.warp.sync 0xffffffff;", convergent=True)
    return found


def _times(x, factor: int) -> Any:
    """A product in 64 bits."""
    return arith.muli(wide(x), c64(factor))


def _store_converted(into, place, offset: int, chunk: list[Any]) -> None:
    """Stores 16 e4m3 values to the chunk at `place` and to its neighbour."""
    values = [value for word in chunk for value in ptx(CONVERT, word, result_types=[i32()] * 2)]
    for swap, four in ((0, values[:4]), (16, values[4:])):
        start = arith.xori(place, c32(swap)) if swap else place
        ptx(STORE.format(offset=offset), at(mgpu.utils.memref_ptr(into), start), *four)


def _sum(*terms) -> Any:
    first, *others = terms
    for term in others:
        first = arith.addi(first, term)
    return first
