"""Loads quantised entries from shared memory to registers, as operands of wgmma, and queries from device memory.

`quantised_tiles.py` has the mapping of lanes.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.fragments import WARP_ROWS, Lane, fragmented, registers_of
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, i32, i64, ptx

COLUMN_TILE = 1024
"""Bytes of 8 rows by 64 columns of 16 bits, which the swizzle permutes."""

LOAD_SHARED = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
"""Loads 16 bytes of shared memory."""
JOIN_SCALES = "mad.lo.u32 $0, $2, 256, $1;"
"""Two bytes, each in a word, as the first bytes of a word.  A `prmt` would take time of the unit that is busiest."""
LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{$0, $1}}, [$2 + {offset}];"
"""Loads 16 bytes of each of 16 tokens: of tokens 2 `quad` + {0, 1}, and 8 more, the four values from 4 `row` on."""


def load_entry_keys(ref, stage, nbytes: int, group: int, *, wide: bool) -> list[tuple[ir.Value, ...]]:
    """Loads keys: of the lane's two rows, 16 bytes from column 64 * `group` on, or (`wide`) 32 of bf16 rotary keys."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row)
    per_lane = 32 if wide else 16
    first = arith.addi(arith.muli(row, c32(nbytes)), arith.muli(lane.quad, c32(per_lane)))
    start = in_stage(ref, stage, nbytes, first)
    offsets = [8 * half * nbytes + (nbytes - 128 if wide else 64 * group) for half in range(2)]
    return [
        ptx(LOAD_SHARED.format(offset=offset + chunk), start, result_types=[i32()] * 4, has_side_effects=True)
        for offset in offsets
        for chunk in range(0, per_lane, 16)
    ]


def load_scales(ref, stage, nbytes: int, offset: int, layout, count: int) -> list[ir.Value]:
    """`count` float32 arrays [64], up to four: the scales at `offset`, a multiple of 16, of each entry."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row)
    start = in_stage(ref, stage, nbytes, arith.muli(row, c32(nbytes)))
    f32 = ir.F32Type.get()
    found = [
        ptx(LOAD_SHARED.format(offset=offset + 8 * half * nbytes), start, result_types=[f32] * 4, has_side_effects=True)
        for half in range(2)
    ]
    arrays = []
    for group in range(count):
        registers = registers_of(layout, (64,))
        for half in range(2):
            registers[0, 0, half, 0, 0] = vector.from_elements(ir.VectorType.get((1,), f32), [found[half][group]])
        arrays.append(fragmented(registers, layout))
    return arrays


def load_of_tokens(
    ref, stage, nbytes: int, step: int, *, offset: int = 0, groups: int, swapped: bool, narrow: bool = False
) -> list[list[ir.Value]]:
    """Loads values: per 128 columns, a word (four values) of each of tokens 16 `step` + 2 `quad` + {0, 1, 8, 9}.

    They begin at byte `offset` of an entry.  `swapped`: odd quads load the second token of a pair first, which halves
    the bank conflicts of 576-byte entries.  `narrow`: values have 64 columns, which the last two warps load again.
    """
    lane = Lane()
    warp = arith.andi(lane.warp, c32(1)) if narrow else lane.warp
    token = arith.addi(arith.shli(lane.quad, c32(1)), c32(16 * step))
    column = arith.addi(arith.shli(warp, c32(5)), arith.shli(lane.row, c32(2)))
    first = arith.addi(arith.muli(token, c32(nbytes)), column)
    odd = arith.muli(arith.andi(lane.quad, c32(1)), c32(nbytes if swapped else 0))
    starts = [in_stage(ref, stage, nbytes, arith.addi(first, odd))]
    starts.append(in_stage(ref, stage, nbytes, arith.subi(arith.addi(first, c32(nbytes)), odd)))
    return [
        [_load_word(start, offset + 128 * group + 8 * pair * nbytes) for pair in range(2) for start in starts]
        for group in range(groups)
    ]


def load_head_keys(ref, stage, width: int, group: int) -> list[tuple[ir.Value, ...]]:
    """Loads 16 bytes of each of the lane's two rows, from column 64 * `group` on, of swizzled [stages, 64, `width`]."""
    lane = Lane()
    first = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS * width)), arith.shli(lane.row, c32(7)))
    chunk = arith.xori(arith.xori(lane.quad, lane.row), c32(4 * (group % 2)))
    start = in_stage(ref, stage, width, arith.addi(first, arith.shli(chunk, c32(4))))
    offsets = [group // 2 * COLUMN_TILE + 8 * half * width for half in range(2)]
    return [
        ptx(LOAD_SHARED.format(offset=offset), start, result_types=[i32()] * 4, has_side_effects=True)
        for offset in offsets
    ]


def load_head_values(ref, stage, width: int, step: int, *, narrow: bool) -> list[list[ir.Value]]:
    """Loads swizzled values: per 128 columns, one word (four values) from each of four tokens.

    They are the tokens that `load_of_tokens` loads, for the same `step`.  `narrow`: values are the last 64 of 128
    columns, which the last two warps load again.
    """
    lane = Lane()
    warp = arith.addi(arith.andi(lane.warp, c32(1)), c32(2)) if narrow else lane.warp
    chunk = arith.addi(arith.shli(warp, c32(1)), arith.shrui(lane.row, c32(2)))
    byte = arith.shli(arith.andi(lane.row, c32(3)), c32(2))
    starts = []
    for odd in range(2):
        token = arith.addi(arith.shli(lane.quad, c32(1)), c32(odd))
        swizzled = arith.shli(arith.xori(chunk, token), c32(4))
        first = arith.addi(arith.addi(arith.shli(token, c32(7)), swizzled), byte)
        starts.append(in_stage(ref, stage, width, arith.addi(first, c32(16 * step * width))))
    return [
        [_load_word(start, group * COLUMN_TILE + 8 * pair * width) for pair in range(2) for start in starts]
        for group in range(width // 128)
    ]


def load_queries(refs, place, rows: int) -> list[tuple[ir.Value, ...]]:
    """Loads eight of every 64 columns of row `thread` // 8 of entry `place` of arrays [n, rows, width]."""
    row, chunk = row_and_chunk()
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


def load_e2m1_keys(ref, stage, nbytes: int, scales_at: int, group: int) -> list[list[ir.Value]]:
    """Loads 64 columns of keys: of each of the lane's two rows, two words of 8 values, and their scale, as a pair.

    The pair is there twice, because registers are loaded in vectors of four.
    """
    lane = Lane()
    row = arith.muli(arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row), c32(nbytes))
    start = in_stage(ref, stage, nbytes, arith.addi(row, arith.shli(lane.quad, c32(3))))
    scale = in_stage(ref, stage, nbytes, arith.addi(row, lane.quad))
    found = []
    for half in range(2):
        offset = 8 * half * nbytes
        load = f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {offset + 32 * group}];"
        values = ptx(load, start, result_types=[i32()] * 2, has_side_effects=True)
        own = _load_scale(scale, offset + scales_at + 4 * group)
        pair = ptx(JOIN_SCALES, own, own, result_types=i32())
        found.append([*values, pair, pair])
    return found


def load_e2m1_of_tokens(
    ref, stage, nbytes: int, values_at: int, scales_at: int, step: int, groups: int
) -> list[list[ir.Value]]:
    """Loads values of 16 tokens: per 128 columns, two words of four values of each of two tokens, and their scales.

    The tokens are 16 `step` + 2 `quad` + {0, 1}, and 8 more.
    """
    lane = Lane()
    own = arith.addi(arith.andi(lane.lane, c32(15)), c32(16 * step))
    start = arith.addi(arith.muli(own, c32(nbytes)), arith.shli(lane.warp, c32(4)))
    start = in_stage(ref, stage, nbytes, start)
    token = arith.muli(arith.addi(arith.shli(lane.quad, c32(1)), c32(16 * step)), c32(nbytes))
    tile = arith.addi(arith.shli(lane.warp, c32(1)), arith.shrui(lane.row, c32(2)))
    scale = in_stage(ref, stage, nbytes, arith.addi(token, tile))
    found = []
    for group in range(groups):
        load = LOAD_TRANSPOSED.format(offset=values_at + 64 * group)
        values = ptx(load, start, result_types=[i32()] * 2, has_side_effects=True, convergent=True)
        scales = [_load_scale(scale, scales_at + 8 * group + nbytes * n) for n in (0, 1, 8, 9)]
        pairs = [ptx(JOIN_SCALES, *scales[n : n + 2], result_types=i32()) for n in (0, 2)]
        found.append([*values, *pairs])
    return found


def _load_word(start, offset: int) -> ir.Value:
    return ptx(f"ld.shared.b32 $0, [$1 + {offset}];", start, result_types=i32(), has_side_effects=True)


def row_and_chunk() -> tuple[Any, Any]:
    """The row of queries and the chunk of that row that the lane loads; eight lanes share a row."""
    thread = Lane().thread
    return arith.shrui(thread, c32(3)), arith.andi(thread, c32(7))


def in_stage(ref, stage, nbytes: int, offset) -> ir.Value:
    """The address `offset` bytes after the beginning of a stage of 64 entries of `nbytes` bytes each."""
    return at(mgpu.utils.memref_ptr(ref), arith.addi(arith.muli(stage, c32(64 * nbytes)), offset))


def _load_scale(start, offset: int) -> ir.Value:
    return ptx(f"ld.shared.u8 $0, [$1 + {offset}];", start, result_types=i32(), has_side_effects=True)
