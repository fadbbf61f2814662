"""e2m1 values, four per 16-bit word, times a scale of e4m3 for every 16 of them.

A tile of words becomes four tiles: the values of columns 0, 4, 8 and so on, of columns 1, 5, 9, and so on.  Each value
stays in the thread, and at the index, of its word, so that the tiles can be used as operands directly, as those of
`e4m3_pairs.py`.
"""

import triton
import triton.language as tl

from jaxkv_kernels.formats.nvfp4 import TILE
from jaxkv_kernels.triton.codecs.e4m3 import from_e4m3
from jaxkv_kernels.triton.codecs.e4m3_pairs import in_halves, load_pairs
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import INTERPRETED, rounded

SCALE_TILE = tl.constexpr(TILE)
"""Values that share a scale."""
SCALE_UNIT = tl.constexpr(2.0**118)
"""See `unit`."""


def unit(dtype) -> float:
    """What tiles of `dtype` (of Triton) must be multiplied by: they are as many times too small.

    In the places where a bfloat16 has the lowest bits of its exponent and the highest one of its fraction, the bits of
    an e2m1 value are 2**-126 times that value; for float16, it is 2**-14 times.  For bfloat16, scales are multiplied by
    2**118, for which the largest scale, 448, leaves room.  Products of values and scales are exact.
    """
    return {tl.bfloat16: 2.0**8, tl.float16: 2.0**14, tl.float32: 1.0}[dtype]


def _multiply(dtype: str, shifts: tuple[int, ...], mask: int) -> tl.constexpr:
    """PTX that converts the four values of each of two words, `$4`, and multiplies them by two scales, `$5`.

    `shifts`: by how much the magnitude of each value is shifted to the left, to the bits of `mask`.
    """
    lines = [".reg .b32 sign, size, zero;", "mov.b32 zero, 0x80008000;"]
    for n, shift in enumerate(shifts):
        lines += [
            f"shl.b32 sign, $4, {12 - 4 * n};",
            f"{'shl' if shift > 0 else 'shr'}.b32 size, $4, {abs(shift)};",
            f"and.b32 size, size, {mask:#x};",
            "lop3.b32 size, sign, 0x80008000, size, 0xEA;",
            f"fma.rn.{dtype}x2 ${n}, size, $5, zero;",
        ]
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


TO_BFLOAT16 = _multiply("bf16", (6, 2, -2, -6), 0x01C001C0)
OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r")
TO_FLOAT16 = _multiply("f16", (9, 5, 1, -3), 0x0E000E00)


@triton.jit
def load_e2m1(
    values, scales, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr,
    NATIVE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Four tiles DTYPE [n, COLUMNS // 4] of SIZE values, from bytes at `values` [n] with scales at `scales` [n].

    Values past SIZE are 0, and so are rows where `known` [n] is False.  Tiles must be multiplied by UNIT, which is
    `unit(DTYPE)`.  EVEN must only be set if all pointers are even.
    """
    words = load_pairs(values, known, SIZE // 2, COLUMNS // 2, EVEN)
    scale = from_e4m3(load_pieces(scales, known, SIZE // SCALE_TILE, COLUMNS // SCALE_TILE), NATIVE)
    if tl.bfloat16 == DTYPE and not INTERPRETED:
        found = tl.inline_asm_elementwise(
            TO_BFLOAT16, OPERANDS, [words, _spread(scale * SCALE_UNIT, tl.bfloat16)], dtype=(tl.bfloat16,) * 4,
            is_pure=True, pack=2,
        )  # fmt: skip
    elif tl.float16 == DTYPE and not INTERPRETED:
        found = tl.inline_asm_elementwise(
            TO_FLOAT16, OPERANDS, [words, _spread(scale, tl.float16)], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )
    else:
        scale = _spread(scale * (1 / UNIT), tl.float32)
        bits = words.to(tl.int32)
        found = ()
        for n in tl.static_range(4):
            found += (rounded(_value(bits >> 4 * n) * scale, DTYPE),)
    return found


@triton.jit
def _spread(scale, DTYPE: tl.constexpr):
    """Scales [n, tiles] as DTYPE, for each word of their tile: [n, words]."""
    WORDS: tl.constexpr = SCALE_TILE // 4
    scale = tl.broadcast_to(rounded(scale, DTYPE)[:, :, None], (scale.shape[0], scale.shape[1], WORDS))
    return tl.reshape(scale, (scale.shape[0], scale.shape[1] * WORDS))


@triton.jit
def _value(code):
    """The e2m1 values of the lowest four bits of int32 numbers, as float32."""
    # Shifted by 9, the exponent and mantissa bits are those of a float16, 2**14 times too small.
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def in_quarters(x):
    """Splits x [n, 4 m] into four tiles [n, m], to match those of `load_e2m1`."""
    even, odd = in_halves(x)
    first, third = in_halves(even)
    second, fourth = in_halves(odd)
    return first, second, third, fourth


@triton.jit
def from_quarters(x):
    """The tile [n, 4 m] that `in_quarters` splits into the tiles `x`."""
    return tl.interleave(tl.interleave(x[0], x[2]), tl.interleave(x[1], x[3]))
