"""Converts tiles of e4m3 values in shared memory to float16, in place.

A lane loads chunks of 16 bytes of e4m3 values and stores each as two chunks of float16.  Eight lanes share a phase of a
shared-memory access.  They take four consecutive chunks of an even row, and four of the next row: of the neighbouring
column tile, or the four below if a row has only four.  As bytes, which are not swizzled, the eight lie in different
banks.  As float16, the 128-byte swizzle spreads the even (or odd) chunks of an even row over one half of the banks, and
those of an odd row over the other half.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.barriers import Peer, store_16_bytes
from jaxkv_kernels.mosaic_gpu.ptx.conversions import E4M3_TO_F16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.ptx.loads import COLUMN_TILE, LOAD_SHARED
from jaxkv_kernels.mosaic_gpu.sizes import HALF

WARPS = 4
"""Each converts consecutive rows."""


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


def load_half(raw, offset: int, shift, rows: int) -> list[list[ir.Value]]:
    """The lane's chunks of [`rows`, 256] bytes: the words of one chunk per pair of its warp's rows.

    They begin at byte `offset`, an int, plus `shift`, a register.
    """
    lane, warp_rows = Lane(), rows // WARPS
    row = arith.addi(arith.muli(lane.warp, c32(warp_rows)), lane.odd)
    chunk = arith.addi(arith.shli(lane.column_tile, c32(2)), lane.chunk)
    start = at(mgpu.utils.memref_ptr(raw), _sum(shift, arith.muli(row, c32(HALF)), arith.shli(chunk, c32(4))))
    return [_load(start, offset + 2 * n * HALF) for n in range(warp_rows // 2)]


def store_half(into, offset: int, shift, rows: int, chunks: list[list[ir.Value]], peer: Peer | None) -> None:
    """Stores what `load_half` returned as float16 to swizzled rows of 256 values, which begin at the same byte."""
    lane = Lane()
    row_tile = HALF // 64 * COLUMN_TILE
    start = _sum(
        arith.muli(lane.warp, c32(rows // (8 * WARPS) * row_tile)),
        arith.muli(lane.column_tile, c32(COLUMN_TILE)),
        _in_row(lane, lane.odd),
    )
    for n, chunk in enumerate(chunks):
        # Rows 2n and 2n + 1: bits 1 and 2 of the row are XORed into the chunk as well.
        in_tile, pair = divmod(n, 4)
        own = arith.xori(start, c32(pair * 32))
        _store_converted(into, shift, own, offset + in_tile * row_tile + pair * 256, chunk, peer)


def load_rope(raw, offset: int, shift, rows: int) -> list[list[ir.Value]]:
    """The lane's chunks of [`rows`, 64] bytes, as in `load_half`: one per eight of its warp's rows."""
    lane, warp_rows = Lane(), rows // WARPS
    own = _sum(arith.muli(lane.warp, c32(64 * warp_rows)), arith.shli(lane.lane, c32(4)))
    start = at(mgpu.utils.memref_ptr(raw), _sum(shift, own))
    return [_load(start, offset + n * 8 * 64) for n in range(warp_rows // 8)]


def store_rope(into, offset: int, shift, rows: int, chunks: list[list[ir.Value]], peer: Peer | None) -> None:
    """Stores what `load_rope` returned as float16 to swizzled rows of 64 values, which begin at the same byte."""
    lane = Lane()
    row = _sum(arith.shli(lane.phase, c32(1)), lane.odd)
    start = _sum(arith.muli(lane.warp, c32(rows // (8 * WARPS) * COLUMN_TILE)), _in_row(lane, row))
    for n, chunk in enumerate(chunks):
        _store_converted(into, shift, start, offset + n * COLUMN_TILE, chunk, peer)


def _in_row(lane: Lane, row) -> ir.Value:
    """Bytes from a column tile to the first chunk that a lane stores of `row`, below 8."""
    return _sum(arith.shli(row, c32(7)), arith.shli(arith.xori(arith.shli(lane.chunk, c32(1)), row), c32(4)))


def _load(start, offset: int) -> list[ir.Value]:
    return list(ptx(LOAD_SHARED.format(offset=offset), start, result_types=[i32()] * 4, has_side_effects=True))


def _store_converted(into, shift, start, offset: int, chunk: list[ir.Value], peer: Peer | None) -> None:
    """Stores 16 e4m3 values to the chunk at byte `offset` + `shift` + `start`, and to its neighbour."""
    values = [value for word in chunk for value in ptx(E4M3_TO_F16, word, result_types=[i32()] * 2)]
    for swap, four in ((0, values[:4]), (16, values[4:])):
        own = arith.xori(start, c32(swap)) if swap else start
        store_16_bytes(at(mgpu.utils.memref_ptr(into), _sum(shift, own)), offset, four, peer)


def _sum(*terms) -> ir.Value:
    """The sum of the terms that are not None."""
    first, *others = (term for term in terms if term is not None)
    for term in others:
        first = arith.addi(first, term)
    return first
