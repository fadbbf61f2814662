"""Rows of queries and of results between device memory, registers and shared memory, with operands swapped.

`quantised_tiles.py` has the mapping of lanes.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.fragments import (
    LANES,
    Lane,
    elements,
    fragmented,
    permuted,
    registers_of,
    words,
)
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, i32, i64, ptx
from jaxkv_kernels.mosaic_gpu.ptx.memory import COLUMN_TILE
from jaxkv_kernels.mosaic_gpu.ptx.wgmma_operands import Pairs


def load_queries(refs, place, rows: int) -> Any:
    """Loads eight of every 64 columns of row `thread` // 8 of entry `place` of arrays [n, rows, width]."""
    row, chunk = _row_and_chunk()
    inside = arith.cmpi(arith.CmpIPredicate.ult, row, c32(rows))
    place = arith.extui(i64(), place)
    found = []
    for ref in refs:
        groups = ir.MemRefType(ref.type).shape[-1] // 64
        width = 128 * groups
        first = arith.addi(arith.muli(row, c32(width)), arith.shli(chunk, c32(4)))
        first = arith.addi(arith.muli(place, c64(rows * width)), arith.extui(i64(), first))
        start = at(mgpu.utils.memref_ptr(ref), first)
        for group in range(groups):
            load = (
                "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
                f"@p ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {128 * group}]; }}"
            )
            flag = arith.extui(i32(), inside)
            found.append(ptx(load, start, flag, result_types=[i32()] * 4, has_side_effects=True))
    return found


def largest(raw, layout) -> Any:
    """Per lane, the largest magnitude of its row of bf16 queries, as float32."""
    most: Any = c32(0)
    for word in elements(raw):
        most = ptx("max.u16x2 $0, $1, $2;", most, arith.andi(word, c32(0x7FFF7FFF)), result_types=i32())
    most = arith.maxui(arith.shrui(most, c32(16)), arith.andi(most, c32(0xFFFF)))
    for distance in (1, 2, 4):
        shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
        most = arith.maxui(most, ptx(shuffle, most, result_types=i32(), has_side_effects=True, convergent=True))
    f32 = ir.F32Type.get()
    registers = registers_of(layout, (LANES,))
    value = arith.bitcast(f32, arith.shli(most, c32(16)))
    registers.flat[0] = vector.from_elements(ir.VectorType.get((1,), f32), [value])
    return fragmented(registers, layout)


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
    row, chunk = _row_and_chunk()
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


def _row_and_chunk() -> tuple[Any, Any]:
    """The row of queries and the chunk of that row that the lane loads; eight lanes share a row."""
    thread = Lane().thread
    return arith.shrui(thread, c32(3)), arith.andi(thread, c32(7))


def _word(pair) -> Any:
    """Two 16-bit values as int32."""
    one = vector.bitcast(ir.VectorType.get((1,), i32()), pair)
    return vector.extract(one, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
