"""e4m3 values as pairs of bytes, which are decoded without an exchange through shared memory.

The GPU converts two e4m3 values at a time, and loads operands of products from shared memory in units of 16 bits, which
is one pair.  A tile of pairs becomes two tiles: the values of even columns and those of odd columns.  Each value stays
in the thread, and at the index, of its pair, so that both tiles can be used as operands directly.
"""

import triton
import triton.language as tl

from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import rounded

CONVERT = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
"""PTX that converts a register with two pairs to one register with the even values and one with the odd values."""


@triton.jit
def load_pairs(place, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Loads SIZE bytes from each of the pointers `place` [n] as int16 [n, COLUMNS // 2].

    The first byte of a pair is the low one.

    Bytes past SIZE are 0, and so are rows where `known` [n] is False.  EVEN must only be set if all pointers and SIZE
    are even.
    """
    if EVEN:
        pairs = load_pieces(place.to(tl.pointer_type(tl.int16)), known, SIZE // 2, COLUMNS // 2)
    else:
        first = 2 * tl.arange(0, COLUMNS // 2)[None, :]
        low = tl.load(place[:, None] + first, mask=known[:, None] & (first < SIZE), other=0)
        high = tl.load(place[:, None] + first + 1, mask=known[:, None] & (first + 1 < SIZE), other=0)
        pairs = low.to(tl.int16) | (high.to(tl.int16) << 8)
    return pairs


@triton.jit
def halves(pairs, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Decodes the low bytes and the high bytes of int16 [n, m] to two tiles DTYPE [n, m].

    float16 represents every e4m3 value exactly.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            CONVERT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        bits = pairs.to(tl.int32)
        low, high = _half(((bits & 0x80) << 8) | ((bits & 0x7F) << 7)), _half((bits & 0x8000) | ((bits >> 1) & 0x3F80))
    return rounded(low, DTYPE), rounded(high, DTYPE)


@triton.jit
def _half(bits):
    """The e4m3 values whose `bits` are shifted to the positions of float16, which makes them 2**8 times too small."""
    small = bits.to(tl.int16).to(tl.float16, bitcast=True)
    # e4m3's NaN has the largest bit pattern, which is 1.875 as float16.  Multiplied by 36864 it overflows to inf, and
    # inf * 0 is NaN.  The next lower pattern, 1.75, does not overflow and adds 0.
    return small * 256.0 + small * 36864.0 * 0.0


@triton.jit
def in_halves(x):
    """Splits x [n, 2 m] into its even and its odd columns, each [n, m], to match the tiles of `halves`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
