"""Products and conversions, in words that Triton's interpreter gets right as well.

It multiplies bf16 values as if they were integers, and cuts off what does not fit where it makes bf16 of float32.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
IEEE = tl.constexpr("ieee")
"""Triton 3.6 takes no plain string for the default of a constant."""


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = IEEE):
    """`acc` + a [M, K] @ b [K, N], float32 [M, N].

    PRECISION is of float32 factors: "ieee" takes all their bits, but no tensor cores, and Triton has all factors of a
    thread in registers; "tf32x3" takes 22 bits of each, as two tf32 numbers, and fewer registers where tiles are large.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """`x` as DTYPE: bfloat16, float16 or float32, to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE and x.dtype != tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, even)  # NaN stays NaN
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
