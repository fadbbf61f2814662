"""e4m3 values in pairs: the GPU converts two at a time, and loads operands of products in units of 16 bits.

A tile of pairs becomes two tiles, of the even and of the odd columns, each value in the thread and at the place of its
pair: they are operands where the pairs are, without a way through shared memory.
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
"""Of two pairs, a register of each tile."""


@triton.jit
def load_pairs(place, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """SIZE bytes from each of the pointers `place` [n] as int16 [n, COLUMNS // 2], the first of a pair low.

    0 past them, and where not known.  EVEN: all of `place` are, and so is SIZE.
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
    """int16 [n, m] to the values of the low and of the high bytes, each DTYPE [n, m]; float16 has them exactly."""
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
    """float16 of the bits of e4m3 values moved to float16's places, 2**8 times too small; the largest is NaN."""
    small = bits.to(tl.int16).to(tl.float16, bitcast=True)
    # 1.875 * 36864 is infinite, and times 0 NaN; 1.75 * 36864 is not.
    return small * 256.0 + small * 36864.0 * 0.0


@triton.jit
def in_halves(x):
    """[n, 2 m] to its even and its odd columns, each [n, m]: where `halves` has those of pairs."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
