"""Converts words of quantised values, in registers, to float16 register operands of wgmma.

Of e2m1 values, the sign, two bits of exponent and one of mantissa, moved to their places in a float16, are 2**-14 times
the value; so are subnormals.  They are then multiplied by their scale, which is e4m3.  Products are multiples of
2**-24, with up to six significant bits, so float16 represents all of them exactly.
"""

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.fragments import Lane, as_pair, fragmented, permuted, registers_of, words
from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, i32, ptx

E4M3_TO_F16 = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
"""Converts a word of four e4m3 values to two words of two float16 values each."""
INT8_TO_F16 = (
    "{ .reg .b32 x, offset; xor.b32 x, $2, 0x80808080; mov.b32 offset, 0x64806480; "
    "prmt.b32 $0, x, 0x64646464, 0x4140; sub.rn.f16x2 $0, $0, offset; "
    "prmt.b32 $1, x, 0x64646464, 0x4342; sub.rn.f16x2 $1, $1, offset; }"
)
"""Converts a word of four int8 values to two words of two float16 values each.

A byte of 128 more than the value is the low byte of a float16 between 1,024 (0x6400) and 2,048, from which 1,152
(0x6480) is subtracted."""

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
