"""Quantised values on their way into products."""

import triton
import triton.language as tl

from jaxkv_kernels.triton.codecs.e4m3 import from_e4m3
from jaxkv_kernels.triton.runtime.arithmetic import INTERPRETED, rounded


@triton.jit
def widened(byte, scale, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 bytes, multiplied by `scale` in float32 (None: by nothing), as DTYPE; NATIVE: the GPU has the type."""
    value = from_e4m3(byte, NATIVE)
    if scale is not None:
        value = value * scale
    return pinned(rounded(value, DTYPE))


@triton.jit
def pinned(x):
    """`x`, which Triton now cannot make anew from the bytes for each product: both take it from one place."""
    if INTERPRETED:
        return x
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
