"""What one lane does with e2m1 values and their scales (`rows.py`): MLIR and inline PTX.

The sign, two bits of exponent and one of mantissa, moved to their places in a float16, are 2**-14 times the e2m1 value;
so are subnormals.  Such values are then multiplied by their scale, which is e4m3.  Products are multiples of 2**-24,
with up to six significant bits, so float16 represents all of them exactly.
"""

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.attention.quantised.lanes import Pairs, in_stage
from jaxkv_kernels.mosaic_gpu.ptx.fragments import WARP_ROWS, Lane, as_pair, fragmented, registers_of, words
from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, i32, ptx

UNIT = 2.0**14
"""What converted values must be multiplied by."""
PAIRS: Pairs = ((0, 4), (1, 5), (2, 6), (3, 7))
"""The values, of 8 in a word, in each of the four words of `CONVERT`."""
CONVERT = (
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
JOIN_SCALES = "mad.lo.u32 $0, $2, 256, $1;"
"""Two bytes, each in a word, as the first bytes of a word.  A `prmt` would take time of the unit that is busiest."""
CONVERT_SCALES = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }"
"""Two e4m3 values, the first bytes of a word, as a pair of float16."""
LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{$0, $1}}, [$2 + {offset}];"
"""Loads 16 bytes of each of 16 tokens: of tokens 2 `quad` + {0, 1}, and 8 more, the four values from 4 `row` on."""


def load_keys(ref, stage, nbytes: int, scales_at: int, group: int) -> list[list[Any]]:
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


def convert_keys(raw, layout) -> Any:
    """A float16 [64, 64] tile of keys, for four products of 16 columns each, from loaded words."""
    registers = registers_of(layout, (64, 64))
    for half, register in enumerate(raw.registers.flat):
        *values, scale, _ = words(register)
        scale = ptx(CONVERT_SCALES, scale, result_types=i32())
        for n, word in enumerate(values):
            for pair, both in enumerate(ptx(CONVERT, word, scale, result_types=[i32()] * 4)):
                registers[0, 4 * n + pair, 0, 0, half, 0, 0, 0, 0] = as_pair(both, ir.F16Type.get())
    return fragmented(registers, layout)


def load_of_tokens(ref, stage, nbytes: int, values_at: int, scales_at: int, step: int, groups: int) -> list[list[Any]]:
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


def convert_values(raw, layout, group: int) -> Any:
    """A float16 [128, 16] tile, values by tokens, from loaded words."""
    *values, first, second = words(raw.registers.flat[group])
    registers = registers_of(layout, (128, 16))
    for pair, (word, scales) in enumerate(zip(values, (first, second), strict=True)):
        scales = ptx(CONVERT_SCALES, scales, result_types=i32())
        for column, value in enumerate(ptx(CONVERT, word, scales, result_types=[i32()] * 4)):
            tile, half = divmod(column, 2)
            registers[tile, pair, 0, 0, half, 0, 0, 0, 0] = as_pair(value, ir.F16Type.get())
    return fragmented(registers, layout)


def _load_scale(start, offset: int) -> Any:
    return ptx(f"ld.shared.u8 $0, [$1 + {offset}];", start, result_types=i32(), has_side_effects=True)
