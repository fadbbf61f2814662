"""Conversions of values of a lane, and the scales of quantised formats.

A chunk is eight values, packed in order into words of 4 bytes.  Its values are converted by way of float32, which holds
every value of the stored dtypes exactly.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.float32 import Divisor, scaled
from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, f32, i32, ptx

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
MAGNITUDE, INFINITY, NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
"""Bits of float32 values: a mask of all bits but the sign, infinity, a NaN."""
WIDEN = {
    "bfloat16": "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
    "float16": "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
    "e4m3": (
        "{ .reg .b16 a, b, c, d; .reg .b32 x, y; mov.b32 {a, b}, $4; "
        "cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; "
        "cvt.f32.f16 $3, d; }"
    ),
    "int8": "{ .reg .s32 x; "
    + " ".join(f"bfe.s32 x, $4, {8 * n}, 8; cvt.rn.f32.s32 ${n}, x;" for n in range(4))
    + " }",
}
"""The float32 values of a word."""
E2M1_PAIRS = (
    "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 t, t, 0x80808080; "
    "shl.b32 $0, $2, 2; lop3.b32 $0, $0, 0x1C1C1C1C, t, 0xEA; and.b32 t, $2, 0x80808080; "
    "shr.b32 $1, $2, 2; lop3.b32 $1, $1, 0x1C1C1C1C, t, 0xEA; }"
)
"""The e2m1 values of a word as e4m3 values of 2**-6 times theirs: the even ones, then the odd ones."""
TO_E2M1 = (
    "{ .reg .pred small, middle, number; .reg .f32 size, factor; .reg .b32 first, sign; "
    "abs.f32 size, $1; setp.num.f32 number, size, size; min.f32 size, size, 0f40C00000; "
    "setp.lt.f32 small, size, 0f40000000; setp.lt.f32 middle, size, 0f40800000; "
    "selp.f32 factor, 0f3F800000, 0f3F000000, middle; selp.f32 factor, 0f40000000, factor, small; "
    "selp.b32 first, 2, 4, middle; selp.b32 first, 0, first, small; "
    "mul.rn.f32 size, size, factor; cvt.rni.s32.f32 $0, size; add.s32 $0, $0, first; "
    "selp.b32 $0, $0, 0, number; mov.b32 sign, $2; shr.b32 sign, sign, 28; lop3.b32 $0, sign, 8, $0, 0xEA; }"
)
"""The code of $1 rounded to e2m1, with the sign of $2; NaN becomes 0.

Codes 0 to 4 are the multiples of 0.5 up to 2, 4 to 6 those of 1 from 2 to 4, 6 and 7 those of 2 from 4 to 6.
"""
NARROW = {
    "bfloat16": "cvt.rn.bf16x2.f32 $0, $2, $1;",
    "float16": "cvt.rn.f16x2.f32 $0, $2, $1;",
    "e4m3": (
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
        "mov.b32 $0, {a, b}; }"
    ),
}
"""A word of float32 values, rounded to nearest even; e4m3 saturates."""
PER_WORD = {"e4m3": 4, "int8": 4, "bfloat16": 2, "float16": 2}


def widen(words: list[Any], dtype: str) -> list[Any]:
    """The float32 values of a chunk of `dtype`."""
    if dtype == "e2m1x2":
        (word,) = words
        pairs = [widen([pair], "e4m3") for pair in ptx(E2M1_PAIRS, word, result_types=[i32()] * 2)]
        return scaled([value for both in zip(*pairs, strict=True) for value in both], mgpu.c(64.0, f32()))
    if dtype == "float32":
        return [arith.bitcast(f32(), word) for word in words]
    each = PER_WORD[dtype]
    return [value for word in words for value in ptx(WIDEN[dtype], word, result_types=[f32()] * each)]


def narrow(values: list[Any], dtype: str) -> list[Any]:
    """A chunk of `dtype`, rounded from float32 values."""
    if dtype == "int8":  # NaN becomes 0
        whole = [ptx("cvt.rni.s32.f32 $0, $1;", value, result_types=i32()) for value in values]
        return [_joined(whole[n : n + 4], 8) for n in range(0, len(values), 4)]
    if dtype == "float32":
        return [arith.bitcast(i32(), value) for value in values]
    each = PER_WORD[dtype]
    return [ptx(NARROW[dtype], *values[n : n + each], result_types=i32()) for n in range(0, len(values), each)]


def narrow_e2m1(values: list[Any], signs: list[Any]) -> list[Any]:
    """A chunk of e2m1, rounded from float32 values, with the signs of others: one word."""
    codes = [ptx(TO_E2M1, value, sign, result_types=i32()) for value, sign in zip(values, signs, strict=True)]
    return [_joined(codes, 4)]


def _joined(fields: list[Any], bits: int) -> Any:
    """A word of the lowest `bits` bits of each of `fields`, the first lowest."""
    word = arith.andi(fields[0], c32((1 << bits) - 1))
    for n, field in enumerate(fields[1:], 1):
        word = arith.ori(word, arith.shli(arith.andi(field, c32((1 << bits) - 1)), c32(bits * n)))
    return word


def largest(values: list[Any]) -> Any:
    """The bits of the largest magnitude.  Bits are ordered like magnitudes; those of a NaN are above all others."""
    found = c32(0)
    for value in values:
        found = arith.maxui(found, arith.andi(arith.bitcast(i32(), value), c32(MAGNITUDE)))
    return found


def power_of_two_scale(amax, smallest_exponent: int, largest: float = 448.0) -> tuple[Any, Any]:
    """The scale for a largest magnitude, as bits, and its inverse, as float32.  `amax` has the magnitude's bits.

    The formula is that of `jaxkv_kernels.formats.bits.power_of_two_scale`.
    """
    of_largest = int(np.float32(largest).view(np.int32))
    fraction = c32(of_largest & 0x7FFFFF)
    above = arith.cmpi(arith.CmpIPredicate.ugt, arith.andi(amax, c32(0x7FFFFF)), fraction)
    exponent = arith.addi(arith.subi(arith.shrui(amax, c32(23)), c32(of_largest >> 23)), arith.extui(i32(), above))
    exponent = arith.maxsi(exponent, c32(smallest_exponent & 0xFFFFFFFF))
    broken = arith.cmpi(arith.CmpIPredicate.ugt, amax, c32(INFINITY))

    def power(biased):
        return arith.select(broken, c32(NAN), arith.shli(biased, c32(23)))

    inverse = power(arith.subi(c32(127), exponent))
    return power(arith.addi(c32(127), exponent)), arith.bitcast(f32(), inverse)


def quotient_scale(amax, largest: float, least: float) -> Any:
    """amax / largest as float32, rounded once, at least `least`.  `amax` has the magnitude's bits."""
    divisor = Divisor(mgpu.c(largest, f32()), wide=True)
    (found,) = divisor.quotients([arith.bitcast(f32(), amax)])
    return ptx("max.NaN.f32 $0, $1, $2;", found, mgpu.c(least, f32()), result_types=f32())


def e4m3_scale(amax, *, round_up: bool) -> tuple[Any, Any]:
    """amax / 6 as e4m3, nearest or rounded up, from 2**-9 to 448: the byte in a word, and the float32 value."""
    exact = quotient_scale(amax, 6.0, 2.0**-9)
    zero = mgpu.c(0.0, f32())
    (byte,) = narrow([exact, zero, zero, zero], "e4m3")
    if round_up:
        (nearest, *_) = widen([byte], "e4m3")
        below = arith.andi(
            arith.cmpf(arith.CmpFPredicate.OLT, nearest, exact),
            arith.cmpf(arith.CmpFPredicate.OLT, exact, mgpu.c(448.0, f32())),
        )
        byte = arith.addi(byte, arith.extui(i32(), below))
    return byte, widen([byte], "e4m3")[0]


def scale_of_byte(byte, stored: str) -> Any:
    """The bits of the float32 scale whose e8m0 or e4m3 byte a word holds."""
    if stored == "e4m3":
        return arith.bitcast(i32(), widen([byte], "e4m3")[0])
    nan = arith.shrui(arith.addi(byte, c32(1)), c32(8))
    return arith.ori(arith.shli(byte, c32(23)), arith.shli(nan, c32(22)))
