"""Converts tiles of e4m3 values in shared memory to float16, in place.

A lane loads chunks of 16 bytes of e4m3 values and stores each as two chunks of float16.  Eight lanes share a phase of a
shared-memory access.  They take four consecutive chunks of an even row, and four of the next row: of the neighbouring
column tile, or the four below if a row has only four.  As bytes, which are not swizzled, the eight lie in different
banks.  As float16, the 128-byte swizzle spreads the even (or odd) chunks of an even row over one half of the banks, and
those of an odd row over the other half.
"""

from collections.abc import Iterator

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.conversions import E4M3_TO_F16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.ptx.loads import COLUMN_TILE, LOAD_SHARED
from jaxkv_kernels.mosaic_gpu.ptx.stores import STORE_SHARED
from jaxkv_kernels.mosaic_gpu.sizes import HALF, TILE

WARP_ROWS = TILE // 4
"""Rows of a tile that a warp converts."""


class Lane:
    """The position of the calling lane."""

    def __init__(self):
        thread = arith.remui(mgpu.utils.thread_idx(), c32(LANES))
        self.lane = arith.andi(thread, c32(31))
        self.warp = arith.shrui(thread, c32(5))
        self.phase = arith.shrui(self.lane, c32(3))
        self.odd = arith.andi(arith.shrui(self.lane, c32(2)), c32(1))
        """The lane's row, of two."""
        self.chunk = arith.andi(self.lane, c32(3))
        """The lane's chunk, of four."""

    @property
    def column_tile(self) -> ir.Value:
        """The lane's column tile, of the four of 64 values in a half; even and odd rows use neighbouring ones."""
        return arith.xori(self.phase, self.odd)


def load_half(raw, offset: int) -> list[list[ir.Value]]:
    """The lane's chunks of [64, 256] bytes at `offset`: the words of one chunk per pair of its warp's rows."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.odd)
    chunk = arith.addi(arith.shli(lane.column_tile, c32(2)), lane.chunk)
    start = at(mgpu.utils.memref_ptr(raw), _sum(arith.muli(row, c32(HALF)), arith.shli(chunk, c32(4))))
    return [load_chunk(start, offset + 2 * n * HALF) for n in range(WARP_ROWS // 2)]


def store_half(into, offset: int, chunks: list[list[ir.Value]]) -> None:
    """Stores what `load_half` returned as float16 to a swizzled [64, 256] tile at `offset`."""
    for (place, at_row), chunk in zip(places_of_half(COLUMN_TILE, HALF // 64 * COLUMN_TILE), chunks, strict=True):
        _store_converted(into, place, offset + at_row, chunk)


def places_of_half(column_nbytes: int, row_nbytes: int) -> Iterator[tuple[ir.Value, int]]:
    """Where the lane's chunks of `load_half` belong as 16-bit values: the place in a row, and bytes to be added.

    From a swizzled tile of 8 rows by 64 columns to the next are `column_nbytes` in the row, and `row_nbytes` to the
    next row.
    """
    lane = Lane()
    start = _sum(
        arith.muli(lane.warp, c32(2 * row_nbytes)),
        arith.muli(lane.column_tile, c32(column_nbytes)),
        _in_row(lane, lane.odd),
    )
    for n in range(WARP_ROWS // 2):
        # Rows 2n and 2n + 1: bits 1 and 2 of the row are XORed into the chunk as well.
        in_tile, pair = divmod(n, 4)
        yield arith.xori(start, c32(pair * 32)), in_tile * row_nbytes + pair * 256


def load_rope(raw, offset: int) -> list[list[ir.Value]]:
    """The lane's chunks of [64, 64] bytes at `offset`: one per eight of its warp's rows."""
    lane = Lane()
    start = at(mgpu.utils.memref_ptr(raw), _sum(arith.shli(lane.warp, c32(10)), arith.shli(lane.lane, c32(4))))
    return [load_chunk(start, offset + n * 8 * 64) for n in range(WARP_ROWS // 8)]


def store_rope(into, offset: int, chunks: list[list[ir.Value]]) -> None:
    """Stores what `load_rope` returned as float16 to a swizzled [64, 64] tile at `offset`."""
    start = place_of_rope()
    for n, chunk in enumerate(chunks):
        _store_converted(into, start, offset + n * COLUMN_TILE, chunk)


def place_of_rope() -> ir.Value:
    """Where the lane's first chunk of `load_rope` belongs as 16-bit values; the next is COLUMN_TILE bytes further."""
    lane = Lane()
    row = _sum(arith.shli(lane.phase, c32(1)), lane.odd)
    return _sum(arith.muli(lane.warp, c32(2 * COLUMN_TILE)), _in_row(lane, row))


def _in_row(lane: Lane, row) -> ir.Value:
    """Bytes from a column tile to the first chunk that a lane stores of `row`, below 8."""
    return _sum(arith.shli(row, c32(7)), arith.shli(arith.xori(arith.shli(lane.chunk, c32(1)), row), c32(4)))


def load_chunk(start, offset: int) -> list[ir.Value]:
    """The words of 16 bytes of shared memory."""
    return list(ptx(LOAD_SHARED.format(offset=offset), start, result_types=[i32()] * 4, has_side_effects=True))


def _store_converted(into, place, offset: int, chunk: list[ir.Value]) -> None:
    """Stores 16 e4m3 values to the chunk at `place` and to its neighbour."""
    values = [value for word in chunk for value in ptx(E4M3_TO_F16, word, result_types=[i32()] * 2)]
    store_chunks(into, place, offset, values)


def store_chunks(into, place, offset: int, words: list[ir.Value]) -> None:
    """Stores eight words to the chunk at `place` and to its neighbour."""
    for swap, four in ((0, words[:4]), (16, words[4:])):
        start = arith.xori(place, c32(swap)) if swap else place
        ptx(STORE_SHARED.format(offset=offset), at(mgpu.utils.memref_ptr(into), start), *four)


def _sum(*terms) -> ir.Value:
    first, *others = terms
    for term in others:
        first = arith.addi(first, term)
    return first
