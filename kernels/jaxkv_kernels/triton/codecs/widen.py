"""Decodes e4m3 values to operands of products."""

import triton
import triton.language as tl

from jaxkv_kernels.triton.codecs.e4m3 import from_e4m3
from jaxkv_kernels.triton.runtime.arithmetic import INTERPRETED, rounded


@triton.jit
def widened(byte, scale, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 bytes as DTYPE, multiplied in float32 by `scale` unless that is None."""
    value = from_e4m3(byte, NATIVE)
    if scale is not None:
        value = value * scale
    return _computed_once(rounded(value, DTYPE))


@triton.jit
def _computed_once(x):
    """Returns `x`, and keeps Triton from computing it again for each of its uses.

    Latents are an operand of two products, which need them in different register layouts.  Triton would convert the
    bytes to each layout and decode them twice.  An assembly instruction with `is_pure=False` is not duplicated: values
    are decoded once, and the result goes through shared memory to both products.
    """
    if INTERPRETED:
        return x
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
