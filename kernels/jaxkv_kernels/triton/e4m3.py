"""e4m3 values, and power-of-two scales for them.

GPUs before Ada (sm_89) have no such type, and Triton has none there: bytes are made and read by arithmetic on bits.
"""

import triton
import triton.language as tl

from jaxkv_kernels.triton.launch import capability

NAN = tl.constexpr(0x7FC00000)
"""The bits of a float32 NaN."""


def has_e4m3() -> bool:
    """Whether the GPU converts by itself: the constant NATIVE of kernels."""
    return capability() >= 89


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """float32 to bytes: to nearest even, saturating at +-448; NaN stays NaN."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 steps are of 2**-9, and so are float32's beside 2**14.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    found = tl.where(size < 0.015625, small, normal)
    return (sign | tl.where(x == x, found, 0x7F)).to(tl.uint8)


@triton.jit
def from_e4m3(byte):
    """Bytes to float32, exactly."""
    bits = byte.to(tl.uint16)
    # Moved by a bit it is a float16, 2**8 times too small.  Float32's smallest values are no way: CPUs may flush them.
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def power_of_two_scale(tile, SMALLEST_EXPONENT: tl.constexpr):
    """For float32 tiles [..., n], [...]: the smallest power of two >= the largest magnitude / 448, and its inverse.

    The formula is that of `jaxkv_kernels.bits.power_of_two_scale`; a NaN among the values gives NaN for both.
    """
    axis: tl.constexpr = len(tile.shape) - 1
    bits = tl.max(tl.abs(tile), axis=axis).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, SMALLEST_EXPONENT)
    broken = tl.max((tile != tile).to(tl.int32), axis=axis) != 0  # a maximum drops NaN
    scale = tl.where(broken, NAN, (127 + exponent) << 23)
    inverse = tl.where(broken, NAN, (127 - exponent) << 23)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
