"""Values of a lane as float32: conversions from and to the stored dtypes, arithmetic, and scales of quantised formats.

A chunk is eight values, packed in order into words of 4 bytes.  Float32 holds every value of the stored dtypes exactly.
Arithmetic is inline PTX, which fixes the rounding of each operation.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, f32, i32, ptx

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
RECIPROCAL = (
    "{ .reg .f32 y, e; rcp.approx.ftz.f32 y, $1; neg.f32 e, $1; fma.rn.f32 e, e, y, 0f3F800000; "
    "fma.rn.f32 $0, y, e, y; }"
)
"""1 / $1, correctly rounded if the exponent of $1 is not extreme, in the steps that ptxas takes for `rcp.rn`."""
DIVIDE = (
    "{{ .reg .f32 q, r; .reg .b32 s, t; mul.rn.f32 q, $1, $3; mov.b32 s, q; "
    "neg.f32 r, q; fma.rn.f32 r, r, $2, $1; fma.rn.f32 q, r, $3, q; min.xorsign.abs.f32 q, q, {limit}; "
    "neg.f32 r, q; fma.rn.f32 r, r, $2, $1; fma.rn.f32 q, r, $3, q; "
    "mov.b32 t, q; lop3.b32 t, t, s, 0x80000000, 0xD8; mov.b32 $0, t; }}"
)
"""$1 / $2, where $3 is the rounded reciprocal of $2 (`quotients`)."""
LIMIT, WIDE_LIMIT = "0f44000000", "0f71800000"
"""512 and 2**100."""


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


def scaled(values: list[Any], factor) -> list[Any]:
    """`values` times a factor."""
    return [_product(value, factor) for value in values]


def multiplied_and_added(values: list[Any], factor, before: list[Any]) -> list[Any]:
    """`before` plus values times a factor."""
    return [
        ptx("fma.rn.f32 $0, $1, $2, $3;", value, factor, other, result_types=f32())
        for value, other in zip(values, before, strict=True)
    ]


def negated(x) -> Any:
    """A float32 value times -1."""
    return ptx("neg.f32 $0, $1;", x, result_types=f32())


def sums_of_products(a: list[Any], b: list[Any], c: list[Any], d: list[Any]) -> list[Any]:
    """a * b + c * d of float32 values, each product and each sum rounded."""
    return [
        ptx("add.rn.f32 $0, $1, $2;", _product(*first), _product(*second), result_types=f32())
        for first, second in zip(zip(a, b, strict=True), zip(c, d, strict=True), strict=True)
    ]


class Divisor:
    """A float32 number by which values are divided, rounded once, to become e4m3.

    The quotient is computed from the reciprocal and corrected twice.  After the first correction it is off by less than
    one unit in the last place.  The second rounds correctly (Markstein), because the remainders are exact, unless the
    quotient is too small for e4m3.  A quotient beyond 512 is limited to 512 before the second correction, whose
    remainder would overflow; it saturates in e4m3 anyway.  The sign is that of the first quotient, because the
    correction of a zero loses it.

    This needs a divisor that is far from the ends of float32's range.  So values and divisor are first multiplied by a
    power of two that brings the divisor near 1; if that overflows or underflows, so does the quotient in e4m3.
    Instead of dividing by 0, inf or NaN, values are multiplied by the reciprocal.

    With `wide`, quotients up to 2**100 are correct, and larger ones at least as large.
    """

    def __init__(self, value, *, wide: bool = False):
        self._divide = DIVIDE.format(limit=WIDE_LIMIT if wide else LIMIT)
        one, exponent = mgpu.c(1.0, f32()), _exponent(value)
        zero = arith.cmpf(arith.CmpFPredicate.OEQ, value, mgpu.c(0.0, f32()))
        special = arith.ori(zero, arith.cmpi(arith.CmpIPredicate.eq, exponent, c32(255)))
        power = _power_of_two(arith.minsi(arith.maxsi(arith.subi(c32(254), exponent), c32(1)), c32(253)))
        reciprocal = ptx("rcp.approx.ftz.f32 $0, $1;", value, result_types=f32())
        self._factor = arith.select(special, reciprocal, power)
        self._value = arith.select(special, one, _product(value, power))
        self._reciprocal = ptx(RECIPROCAL, self._value, result_types=f32())

    def quotients(self, values: list[Any]) -> list[Any]:
        """`values` divided by the divisor."""
        return [
            ptx(self._divide, value, self._value, self._reciprocal, result_types=f32())
            for value in scaled(values, self._factor)
        ]


def _product(a, b) -> Any:
    return ptx("mul.rn.f32 $0, $1, $2;", a, b, result_types=f32())


def _exponent(x) -> Any:
    """The exponent of a float32 number, with its bias of 127."""
    return arith.andi(arith.shrui(arith.bitcast(i32(), x), c32(23)), c32(255))


def _power_of_two(biased) -> Any:
    """2**(biased - 127)."""
    return arith.bitcast(f32(), arith.shli(biased, c32(23)))


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
