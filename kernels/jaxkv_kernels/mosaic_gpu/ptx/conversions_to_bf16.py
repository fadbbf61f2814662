"""Converts e4m3 values of tiles in shared memory to bf16, by way of registers.

Lanes take the chunks of 16 bytes that `conversions_in_place.py` describes, without bank conflicts.  A chunk becomes
eight words.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.conversions_in_place import (
    WARP_ROWS,
    Lane,
    load_chunk,
    load_half,
    load_rope,
    place_of_rope,
    places_of_half,
    store_chunks,
)
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, f32, i32, ptx
from jaxkv_kernels.mosaic_gpu.ptx.loads import COLUMN_TILE
from jaxkv_kernels.mosaic_gpu.ptx.stores import STORE_SHARED

_CONVERT = (
    "{{ .reg .b16 low, high, a, b; .reg .b32 x, y; .reg .f32 p, q; mov.b32 {{low, high}}, $2;"
    " cvt.rn.f16x2.e4m3x2 x, low; cvt.rn.f16x2.e4m3x2 y, high;"
    " mov.b32 {{a, b}}, x; cvt.f32.f16 p, a; cvt.f32.f16 q, b; {0} cvt.rn.bf16x2.f32 $0, q, p;"
    " mov.b32 {{a, b}}, y; cvt.f32.f16 p, a; cvt.f32.f16 q, b; {0} cvt.rn.bf16x2.f32 $1, q, p; }}"
)
EXACT = _CONVERT.format("")
"""Four e4m3 values as bf16, which represents them exactly."""
SCALED = _CONVERT.format("mul.rn.f32 p, p, $3; mul.rn.f32 q, q, $3;")
"""Four e4m3 values times a float32 scale, rounded once to bf16."""
LOAD_SCALE = "ld.shared.f32 $0, [$1 + {offset}];"


def convert_half(raw, offset: int, scales, half, row_nbytes: int) -> list[list[ir.Value]]:
    """The lane's chunks of [64, 256] e4m3 values at `offset` bytes, as bf16.

    With `scales`, rows of `row_nbytes` bytes that begin with four float32 scales, values are multiplied by the two of
    `half`: one for every 128 columns.
    """
    chunks = load_half(raw, offset)
    if scales is None:
        return [_converted(EXACT, chunk) for chunk in chunks]
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.odd)
    group = arith.addi(arith.shli(half, c32(1)), arith.shrui(lane.column_tile, c32(1)))
    place = arith.addi(arith.muli(row, c32(row_nbytes)), arith.shli(group, c32(2)))
    start = at(mgpu.utils.memref_ptr(scales), place)
    loads = [LOAD_SCALE.format(offset=2 * n * row_nbytes) for n in range(len(chunks))]
    factors = [ptx(load, start, result_types=f32(), has_side_effects=True) for load in loads]
    return [_converted(SCALED, chunk, factor) for chunk, factor in zip(chunks, factors, strict=True)]


def store_half(into, start, column_nbytes: int, row_nbytes: int, chunks: list[list[ir.Value]]) -> None:
    """Stores what `convert_half` returned from byte `start`, a register, on: see `places_of_half`."""
    for (place, offset), chunk in zip(places_of_half(column_nbytes, row_nbytes), chunks, strict=True):
        store_chunks(into, arith.addi(start, place), offset, chunk)


def convert_rope(raw) -> list[list[ir.Value]]:
    """The lane's chunks of [64, 64] e4m3 values, as bf16."""
    return [_converted(EXACT, chunk) for chunk in load_rope(raw, 0)]


def store_rope(into, chunks: list[list[ir.Value]]) -> None:
    """Stores what `convert_rope` returned to a swizzled [64, 64] tile."""
    start = place_of_rope()
    for n, chunk in enumerate(chunks):
        store_chunks(into, start, n * COLUMN_TILE, chunk)


def load_wide_rope(raw, offset: int, row_nbytes: int) -> list[list[ir.Value]]:
    """Four chunks of the 64 bf16 values at byte `offset` of each row; eight lanes have those of a row."""
    row, chunk = _place_of_wide_rope()
    place = arith.addi(arith.muli(row, c32(row_nbytes)), arith.shli(chunk, c32(4)))
    start = at(mgpu.utils.memref_ptr(raw), place)
    return [load_chunk(start, offset + 4 * n * row_nbytes) for n in range(WARP_ROWS // 4)]


def store_wide_rope(into, chunks: list[list[ir.Value]]) -> None:
    """Stores what `load_wide_rope` returned to a swizzled [64, 64] tile."""
    row, chunk = _place_of_wide_rope()
    in_row = arith.shli(arith.xori(chunk, arith.andi(row, c32(3))), c32(4))
    start = arith.addi(arith.shli(row, c32(7)), in_row)
    for n, words in enumerate(chunks):
        # Rows 4n more: bit 2 of the row is XORed into the chunk as well.
        place = arith.xori(start, c32(64)) if n % 2 else start
        ptx(STORE_SHARED.format(offset=n * 512), at(mgpu.utils.memref_ptr(into), place), *words)


def _place_of_wide_rope() -> tuple[ir.Value, ir.Value]:
    """The first of the lane's rows, and its chunk of each."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.phase)
    return row, arith.andi(lane.lane, c32(7))


def _converted(code: str, chunk: list[ir.Value], *scale) -> list[ir.Value]:
    return [value for word in chunk for value in ptx(code, word, *scale, result_types=[i32()] * 2)]
