"""Arithmetic on float32 values in registers, with the rounding of each operation chosen: products, sums, division."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, f32, i32, ptx

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
