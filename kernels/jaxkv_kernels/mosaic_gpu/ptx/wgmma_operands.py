"""Register operands of wgmma from quantised entries in shared memory: loads, conversions to float16, and clears.

`quantised_tiles.py` has the mapping of lanes.

Of e2m1 values, the sign, two bits of exponent and one of mantissa, moved to their places in a float16, are 2**-14 times
the value; so are subnormals.  They are then multiplied by their scale, which is e4m3.  Products are multiples of
2**-24, with up to six significant bits, so float16 represents all of them exactly.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.fragments import (
    WARP_ROWS,
    Lane,
    as_pair,
    fragmented,
    permuted,
    registers_of,
    words,
)
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.ptx.memory import COLUMN_TILE, LOAD_SHARED

Pairs = tuple[tuple[int, int], ...]
"""The columns, of 8, in each of four words."""
IN_ORDER: Pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
E2M1_UNIT = 2.0**14
"""What converted values must be multiplied by."""
E2M1_PAIRS: Pairs = ((0, 4), (1, 5), (2, 6), (3, 7))
"""The values, of 8 in a word, in each of the four words of `E2M1_TO_F16`."""
E2M1_TO_F16 = (
    "{ .reg .b32 low, high, t;"
    " shl.b32 low, $4, 4; shl.b32 t, $4, 1; lop3.b32 low, low, t, 0x80808080, 0xE4;"
    " shr.b32 t, $4, 3; lop3.b32 high, $4, t, 0x80808080, 0xE4;"
    " shl.b32 t, low, 8; and.b32 t, t, 0x8E008E00; mul.rn.f16x2 $0, t, $5;"
    " shl.b32 t, high, 8; and.b32 t, t, 0x8E008E00; mul.rn.f16x2 $1, t, $5;"
    " and.b32 t, low, 0x8E008E00; mul.rn.f16x2 $2, t, $5;"
    " and.b32 t, high, 0x8E008E00; mul.rn.f16x2 $3, t, $5; }"
)
"""Eight e2m1 values of a word, times a pair of float16 scales, as four words of two float16 values.

The first byte of each half of `low` and `high` has the bits of values 0 and 1 in the places of float16, the second byte
those of values 2 and 3, with other bits between them, which are masked at the end."""
E4M3_SCALES_TO_F16 = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }"
"""Two e4m3 values, the first bytes of a word, as a pair of float16."""

JOIN_SCALES = "mad.lo.u32 $0, $2, 256, $1;"
"""Two bytes, each in a word, as the first bytes of a word.  A `prmt` would take time of the unit that is busiest."""
LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{$0, $1}}, [$2 + {offset}];"
"""Loads 16 bytes of each of 16 tokens: of tokens 2 `quad` + {0, 1}, and 8 more, the four values from 4 `row` on."""


def load_entry_keys(ref, stage, nbytes: int, group: int, *, wide: bool) -> list[Any]:
    """Loads keys: of the lane's two rows, 16 bytes from column 64 * `group` on, or (`wide`) 32 of bf16 rotary keys."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row)
    per_lane = 32 if wide else 16
    first = arith.addi(arith.muli(row, c32(nbytes)), arith.muli(lane.quad, c32(per_lane)))
    start = _in_stage(ref, stage, nbytes, first)
    offsets = [8 * half * nbytes + (nbytes - 128 if wide else 64 * group) for half in range(2)]
    return [
        ptx(LOAD_SHARED.format(offset=offset + chunk), start, result_types=[i32()] * 4, has_side_effects=True)
        for offset in offsets
        for chunk in range(0, per_lane, 16)
    ]


def load_head_keys(ref, stage, width: int, group: int) -> list[Any]:
    """Loads 16 bytes of each of the lane's two rows, from column 64 * `group` on, of swizzled [stages, 64, `width`]."""
    lane = Lane()
    first = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS * width)), arith.shli(lane.row, c32(7)))
    chunk = arith.xori(arith.xori(lane.quad, lane.row), c32(4 * (group % 2)))
    start = _in_stage(ref, stage, width, arith.addi(first, arith.shli(chunk, c32(4))))
    offsets = [group // 2 * COLUMN_TILE + 8 * half * width for half in range(2)]
    return [
        ptx(LOAD_SHARED.format(offset=offset), start, result_types=[i32()] * 4, has_side_effects=True)
        for offset in offsets
    ]


def convert_keys(raw, layout, convert: str, *, wide: bool) -> Any:
    """Converts loaded words to a [64, 64] tile of keys, for four products of 16 columns each.

    `convert` is PTX that converts a word to two.

    Word s of a row has columns of product s; if `wide`, words 2 s and 2 s + 1 do.  Their order is in
    `quantised_tiles.py`.
    """
    vectors = [words(register) for register in raw.registers.flat]
    registers = registers_of(layout, (64, 64))
    for half in range(2):
        for step in range(4):
            if wide:
                row = vectors[2 * half] + vectors[2 * half + 1]
                pairs = row[2 * step : 2 * step + 2]
            else:
                pairs = ptx(convert, vectors[half][step], result_types=[i32()] * 2)
            for high, pair in enumerate(pairs):
                kind = ir.BF16Type if wide else ir.F16Type
                registers[0, 2 * step + high, 0, 0, half, 0, 0, 0, 0] = as_pair(pair, kind.get())
    return fragmented(registers, layout)


def load_scales(ref, stage, nbytes: int, offset: int, layout, count: int) -> list[Any]:
    """`count` float32 arrays [64], up to four: the scales at `offset`, a multiple of 16, of each entry."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row)
    start = _in_stage(ref, stage, nbytes, arith.muli(row, c32(nbytes)))
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
    ref, stage, nbytes: int, step: int, *, offset: int = 0, groups: int, swapped: bool
) -> list[list[Any]]:
    """Loads values: per 128 columns, a word (four values) of each of tokens 16 `step` + 2 `quad` + {0, 1, 8, 9}.

    They begin at byte `offset` of an entry.  `swapped`: odd quads load the second token of a pair first, which halves
    the bank conflicts of 576-byte entries.
    """
    lane = Lane()
    token = arith.addi(arith.shli(lane.quad, c32(1)), c32(16 * step))
    column = arith.addi(arith.shli(lane.warp, c32(5)), arith.shli(lane.row, c32(2)))
    first = arith.addi(arith.muli(token, c32(nbytes)), column)
    odd = arith.muli(arith.andi(lane.quad, c32(1)), c32(nbytes if swapped else 0))
    starts = [_in_stage(ref, stage, nbytes, arith.addi(first, odd))]
    starts.append(_in_stage(ref, stage, nbytes, arith.subi(arith.addi(first, c32(nbytes)), odd)))
    return [
        [_load_word(start, offset + 128 * group + 8 * pair * nbytes) for pair in range(2) for start in starts]
        for group in range(groups)
    ]


def load_head_values(ref, stage, width: int, step: int) -> list[list[Any]]:
    """Loads swizzled values: per 128 columns, one word (four values) from each of four tokens.

    They are the tokens that `load_of_tokens` loads, for the same `step`.
    """
    lane = Lane()
    chunk = arith.addi(arith.shli(lane.warp, c32(1)), arith.shrui(lane.row, c32(2)))
    byte = arith.shli(arith.andi(lane.row, c32(3)), c32(2))
    starts = []
    for odd in range(2):
        token = arith.addi(arith.shli(lane.quad, c32(1)), c32(odd))
        swizzled = arith.shli(arith.xori(chunk, token), c32(4))
        first = arith.addi(arith.addi(arith.shli(token, c32(7)), swizzled), byte)
        starts.append(_in_stage(ref, stage, width, arith.addi(first, c32(16 * step * width))))
    return [
        [_load_word(start, group * COLUMN_TILE + 8 * pair * width) for pair in range(2) for start in starts]
        for group in range(width // 128)
    ]


def convert_values(raw, layout, group: int, convert: str, *, swapped: bool) -> Any:
    """A float16 [128, 16] tile, values by tokens, from loaded words."""
    tokens = words(raw.registers.flat[group])
    low, high = c32(0x5140), c32(0x7362)
    if swapped:
        odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(Lane().quad, c32(1)), c32(0))
        low, high = arith.select(odd, c32(0x1504), low), arith.select(odd, c32(0x3726), high)
    registers = registers_of(layout, (128, 16))
    for pair in range(2):
        for tile, selector in enumerate((low, high)):
            together = permuted(tokens[2 * pair], tokens[2 * pair + 1], selector)
            for half, values in enumerate(ptx(convert, together, result_types=[i32()] * 2)):
                registers[tile, pair, 0, 0, half, 0, 0, 0, 0] = as_pair(values, ir.F16Type.get())
    return fragmented(registers, layout)


def load_e2m1_keys(ref, stage, nbytes: int, scales_at: int, group: int) -> list[list[Any]]:
    """Loads 64 columns of keys: of each of the lane's two rows, two words of 8 values, and their scale, as a pair.

    The pair is there twice, because registers are loaded in vectors of four.
    """
    lane = Lane()
    row = arith.muli(arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row), c32(nbytes))
    start = _in_stage(ref, stage, nbytes, arith.addi(row, arith.shli(lane.quad, c32(3))))
    scale = _in_stage(ref, stage, nbytes, arith.addi(row, lane.quad))
    found = []
    for half in range(2):
        offset = 8 * half * nbytes
        load = f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {offset + 32 * group}];"
        values = ptx(load, start, result_types=[i32()] * 2, has_side_effects=True)
        own = _load_scale(scale, offset + scales_at + 4 * group)
        pair = ptx(JOIN_SCALES, own, own, result_types=i32())
        found.append([*values, pair, pair])
    return found


def convert_e2m1_keys(raw, layout) -> Any:
    """A float16 [64, 64] tile of keys, for four products of 16 columns each, from loaded words."""
    registers = registers_of(layout, (64, 64))
    for half, register in enumerate(raw.registers.flat):
        *values, scale, _ = words(register)
        scale = ptx(E4M3_SCALES_TO_F16, scale, result_types=i32())
        for n, word in enumerate(values):
            for pair, both in enumerate(ptx(E2M1_TO_F16, word, scale, result_types=[i32()] * 4)):
                registers[0, 4 * n + pair, 0, 0, half, 0, 0, 0, 0] = as_pair(both, ir.F16Type.get())
    return fragmented(registers, layout)


def load_e2m1_of_tokens(
    ref, stage, nbytes: int, values_at: int, scales_at: int, step: int, groups: int
) -> list[list[Any]]:
    """Loads values of 16 tokens: per 128 columns, two words of four values of each of two tokens, and their scales.

    The tokens are 16 `step` + 2 `quad` + {0, 1}, and 8 more.
    """
    lane = Lane()
    own = arith.addi(arith.andi(lane.lane, c32(15)), c32(16 * step))
    start = arith.addi(arith.muli(own, c32(nbytes)), arith.shli(lane.warp, c32(4)))
    start = _in_stage(ref, stage, nbytes, start)
    token = arith.muli(arith.addi(arith.shli(lane.quad, c32(1)), c32(16 * step)), c32(nbytes))
    tile = arith.addi(arith.shli(lane.warp, c32(1)), arith.shrui(lane.row, c32(2)))
    scale = _in_stage(ref, stage, nbytes, arith.addi(token, tile))
    found = []
    for group in range(groups):
        load = LOAD_TRANSPOSED.format(offset=values_at + 64 * group)
        values = ptx(load, start, result_types=[i32()] * 2, has_side_effects=True, convergent=True)
        scales = [_load_scale(scale, scales_at + 8 * group + nbytes * n) for n in (0, 1, 8, 9)]
        pairs = [ptx(JOIN_SCALES, *scales[n : n + 2], result_types=i32()) for n in (0, 2)]
        found.append([*values, *pairs])
    return found


def convert_e2m1_values(raw, layout, group: int) -> Any:
    """A float16 [128, 16] tile, values by tokens, from loaded words."""
    *values, first, second = words(raw.registers.flat[group])
    registers = registers_of(layout, (128, 16))
    for pair, (word, scales) in enumerate(zip(values, (first, second), strict=True)):
        scales = ptx(E4M3_SCALES_TO_F16, scales, result_types=i32())
        for column, value in enumerate(ptx(E2M1_TO_F16, word, scales, result_types=[i32()] * 4)):
            tile, half = divmod(column, 2)
            registers[tile, pair, 0, 0, half, 0, 0, 0, 0] = as_pair(value, ir.F16Type.get())
    return fragmented(registers, layout)


def clear_head_values(ref, stage, width: int, row) -> None:
    """Zeroes one token's swizzled values."""
    lane = Lane()
    line = arith.addi(arith.muli(arith.shrui(row, c32(3)), c32(8 * width)), arith.shli(arith.andi(row, c32(7)), c32(7)))
    column = arith.muli(arith.shrui(lane.thread, c32(3)), c32(COLUMN_TILE))
    first = arith.addi(arith.addi(line, column), arith.shli(arith.andi(lane.thread, c32(7)), c32(4)))
    _clear(_in_stage(ref, stage, width, first), lane.thread, width // 16)


def clear_entry(ref, stage, nbytes: int, row) -> None:
    """Zeroes one token's entry."""
    lane = Lane()
    first = arith.addi(arith.muli(row, c32(nbytes)), arith.shli(lane.thread, c32(4)))
    _clear(_in_stage(ref, stage, nbytes, first), lane.thread, nbytes // 16)


def _load_word(start, offset: int) -> Any:
    return ptx(f"ld.shared.b32 $0, [$1 + {offset}];", start, result_types=i32(), has_side_effects=True)


def _in_stage(ref, stage, nbytes: int, offset) -> Any:
    """The address `offset` bytes after the beginning of a stage of 64 entries of `nbytes` bytes each."""
    return at(mgpu.utils.memref_ptr(ref), arith.addi(arith.muli(stage, c32(64 * nbytes)), offset))


def _load_scale(start, offset: int) -> Any:
    return ptx(f"ld.shared.u8 $0, [$1 + {offset}];", start, result_types=i32(), has_side_effects=True)


def _clear(start, thread, lanes: int) -> None:
    """Zeroes 16 bytes at the address `start` of each of the first `lanes` lanes."""
    inside = arith.cmpi(arith.CmpIPredicate.ult, thread, c32(lanes))
    ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", start, c32(0), predicate=inside)
