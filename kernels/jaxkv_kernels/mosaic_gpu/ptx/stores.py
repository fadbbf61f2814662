"""Stores to shared and to device memory.

`quantised_tiles.py` has the mapping of lanes.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.conversions import Pairs
from jaxkv_kernels.mosaic_gpu.ptx.fragments import Lane, elements, permuted, words
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, i32, i64, ptx
from jaxkv_kernels.mosaic_gpu.ptx.loads import COLUMN_TILE, in_stage, row_and_chunk

STORE_SHARED = "st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
"""Stores 16 bytes to shared memory."""


def clear_head_values(ref, stage, width: int, row) -> None:
    """Zeroes one token's swizzled values."""
    lane = Lane()
    line = arith.addi(arith.muli(arith.shrui(row, c32(3)), c32(8 * width)), arith.shli(arith.andi(row, c32(7)), c32(7)))
    column = arith.muli(arith.shrui(lane.thread, c32(3)), c32(COLUMN_TILE))
    first = arith.addi(arith.addi(line, column), arith.shli(arith.andi(lane.thread, c32(7)), c32(4)))
    _clear(in_stage(ref, stage, width, first), lane.thread, width // 16)


def clear_entry(ref, stage, nbytes: int, row) -> None:
    """Zeroes one token's entry."""
    lane = Lane()
    first = arith.addi(arith.muli(row, c32(nbytes)), arith.shli(lane.thread, c32(4)))
    _clear(in_stage(ref, stage, nbytes, first), lane.thread, nbytes // 16)


def store_rows(ref, place, parts, rows: int) -> None:
    """Stores [128, 16] tiles of 16-bit values, transposed, to `ref`[place], where `ref` is [n, rows, 128 * tiles]."""
    lane = Lane()
    width = 128 * len(parts)
    row = arith.shli(lane.quad, c32(1))
    column = arith.addi(arith.shli(lane.warp, c32(5)), arith.shli(lane.row, c32(2)))
    first = arith.shli(arith.addi(arith.muli(row, c32(width)), column), c32(1))
    first = arith.addi(arith.muli(arith.extui(i64(), place), c64(2 * rows * width)), arith.extui(i64(), first))
    start = at(mgpu.utils.memref_ptr(ref), first)
    for group, part in enumerate(parts):
        for tile in range(rows // 8):
            pairs = [_word(part.registers[half, tile, 0, 0, low].flat[0]) for half in range(2) for low in range(2)]
            for odd in range(2):
                selector = c32(0x7632 if odd else 0x5410)
                both = [permuted(pairs[n], pairs[n + 1], selector) for n in (0, 2)]
                offset = 2 * ((8 * tile + odd) * width + 128 * group)
                ptx(f"st.global.v2.b32 [$0 + {offset}], {{$1, $2}};", start, *both)


def store_queries(refs, groups, stats, stage, raw, factor, inverse, first_row: int, pairs: Pairs) -> None:
    """Stores queries times their row's factor to arrays [stages, 16, 64 * `groups`] of 16-bit floats.

    Columns are in the same order as those of converted keys: `pairs` of every 8 columns.  `inverse` is stored to row
    `first_row` + `stage` of `stats`.
    """
    row, chunk = row_and_chunk()
    in_tile = arith.andi(row, c32(7))
    odd, quad = arith.andi(chunk, c32(1)), arith.shrui(chunk, c32(1))
    factor, inverse = (elements(x)[0] for x in (factor, inverse))
    vectors = [words(register) for register in raw.registers.flat]
    for ref, count in zip(refs, groups, strict=True):
        some, vectors = vectors[:count], vectors[count:]
        kind = str(ir.MemRefType(ref.type).element_type)
        row_tile = arith.muli(arith.shrui(row, c32(3)), c32(count * COLUMN_TILE))
        first = arith.addi(arith.muli(stage, c32(2 * count * COLUMN_TILE)), row_tile)
        first = arith.addi(first, arith.addi(arith.shli(in_tile, c32(7)), arith.shli(quad, c32(2))))
        base = mgpu.utils.memref_ptr(ref)
        for n in range(4):
            swizzled = arith.shli(arith.xori(arith.addi(arith.shli(odd, c32(2)), c32(n)), in_tile), c32(4))
            start = at(base, arith.addi(first, swizzled))
            for group in range(count):
                scaled = []
                for column in pairs[n]:
                    word = some[group][column // 2]
                    bits = arith.andi(word, c32(0xFFFF0000)) if column % 2 else arith.shli(word, c32(16))
                    scaled.append(arith.mulf(arith.bitcast(ir.F32Type.get(), bits), factor))
                pair = ptx(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", *scaled, result_types=i32())
                ptx(f"st.shared.b32 [$0 + {group * COLUMN_TILE}], $1;", start, pair)
    place = arith.addi(arith.shli(arith.addi(stage, c32(first_row)), c32(4)), row)
    start = at(mgpu.utils.memref_ptr(stats), arith.shli(place, c32(2)))
    ptx("st.shared.f32 [$0], $1;", start, inverse, predicate=arith.cmpi(arith.CmpIPredicate.eq, chunk, c32(0)))


def _clear(start, thread, lanes: int) -> None:
    """Zeroes 16 bytes at the address `start` of each of the first `lanes` lanes."""
    inside = arith.cmpi(arith.CmpIPredicate.ult, thread, c32(lanes))
    ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", start, c32(0), predicate=inside)


def _word(pair) -> Any:
    """Two 16-bit values as int32."""
    one = vector.bitcast(ir.VectorType.get((1,), i32()), pair)
    return vector.extract(one, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
