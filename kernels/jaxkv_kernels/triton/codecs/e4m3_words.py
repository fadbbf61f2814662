"""Decodes four e4m3 values at a time from 32-bit words, with far fewer instructions than for single values."""

import triton
import triton.language as tl

from jaxkv_kernels.triton.runtime.arithmetic import INTERPRETED

BIAS = tl.constexpr(2.0**120)
"""The exponent biases of e4m3 and bfloat16 are 7 and 127, so shifted bits are values 2**120 times too small."""


@triton.jit
def unpacked(words, DTYPE: tl.constexpr):
    """Decodes int32 words [N, W] of four e4m3 values each to DTYPE [N, 4 W].

    The first bytes of all words come first, then the second bytes, and so on.  In this order, all values stay in the
    thread that holds their word; in the order of memory, they would move between threads.  Values are exact, except for
    NaN, which becomes 480.  (A key with NaN still gives NaN, because jaxkv stores NaN as its scale.)
    """
    even, odd = _paired(words << 8), _paired(words)
    low = tl.join(_half(even, False, DTYPE), _half(even, True, DTYPE))
    high = tl.join(_half(odd, False, DTYPE), _half(odd, True, DTYPE))
    values = tl.join(low, high)  # [N, W, 2, 2]: byte b = 2 i + j is at [i, j]
    return values.permute(0, 2, 3, 1).reshape(words.shape[0], 4 * words.shape[1])


@triton.jit
def in_word_order(x):
    """x [M, 4 W] with its columns permuted to the order of `unpacked`."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return x.reshape(M, N // 4, 4).permute(0, 2, 1).reshape(M, N)


@triton.jit
def _paired(words):
    """Bytes 1 and 3 of each word as the bits of two bfloat16, which are 2**-120 times the e4m3 values."""
    return ((words >> 4) & 0x07F007F0) | (words & -0x7FFF8000)


@triton.jit
def _half(pairs, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    bits = (pairs >> 16 if HIGH else pairs).to(tl.int16)
    if tl.bfloat16 == DTYPE and not INTERPRETED:
        return bits.to(tl.bfloat16, bitcast=True) * BIAS
    # Convert by way of float16, whose subnormals are exact everywhere.  CPUs may flush those of float32 to zero.
    half = (bits & -0x8000) | ((bits & 0x7F0) << 3)
    return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)
