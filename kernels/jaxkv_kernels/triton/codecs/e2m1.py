"""e2m1 values, two per byte, times a scale of e4m3 for every 16 of them.

A tile of bytes becomes two tiles: the values of even columns, in the low bits, and those of odd columns.  Each value
stays in the thread, and at the index, of its byte, so that both tiles can be used as operands directly, as those of
`e4m3_pairs.py`.
"""

import triton
import triton.language as tl

from jaxkv_kernels.formats.nvfp4 import TILE
from jaxkv_kernels.triton.codecs.e4m3 import from_e4m3
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import rounded

SCALE_TILE = tl.constexpr(TILE)
"""Values that share a scale."""


@triton.jit
def load_e2m1(
    values, scales, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr
):
    """Two tiles DTYPE [n, COLUMNS // 2] of SIZE values, from bytes at `values` [n] with scales at `scales` [n].

    Values past SIZE are 0, and so are rows where `known` [n] is False.  bf16 and float16 represent the products of
    values and scales exactly.
    """
    bits = load_pieces(values, known, SIZE // 2, COLUMNS // 2).to(tl.int32)
    scale = from_e4m3(load_pieces(scales, known, SIZE // SCALE_TILE, COLUMNS // SCALE_TILE), NATIVE)
    scale = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], SCALE_TILE // 2))
    scale = tl.reshape(scale, (scale.shape[0], COLUMNS // 2))
    return rounded(_value(bits) * scale, DTYPE), rounded(_value(bits >> 4) * scale, DTYPE)


@triton.jit
def _value(code):
    """The e2m1 values of the lowest four bits of int32 numbers, as float32."""
    # Shifted by 9, the exponent and mantissa bits are those of a float16, 2**14 times too small.
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0
