"""e4m3 values, and power-of-two scales for them.

GPUs before Ada (sm_89) have no such type, and Triton has none there: bytes are made and read by arithmetic on bits.
"""

import triton
import triton.language as tl

from jaxkv_kernels.triton.runtime.launch import capability

NAN = tl.constexpr(0x7FC00000)
"""The bits of a float32 NaN."""


def has_e4m3() -> bool:
    """Whether the GPU converts by itself: the constant NATIVE of kernels."""
    return capability() >= 89


@triton.jit
def load_scales(first, second, head, STEPS: tl.constexpr):
    """Scales [n] of both parts of entries of heads `head` [n]; nothing where STEPS is None.

    `first` and `second` point to them, STEPS says how far apart those of two heads are in each.  Kernels load them
    before the entries: nothing must wait for them afterwards.
    """
    scales = ()
    if STEPS is not None:
        scales += (tl.load(first + head * STEPS[0]), tl.load(second + head * STEPS[1]))
    return scales


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
def from_e4m3(byte, NATIVE: tl.constexpr):
    """Bytes to float32, exactly."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = byte.to(tl.uint16)
    # Moved by a bit it is a float16, 2**8 times too small.  Float32's smallest values are no way: CPUs may flush them.
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def power_of_two_scale(tile, SMALLEST_EXPONENT: tl.constexpr, keep=None):
    """For float32 tiles [..., n], [...]: the smallest power of two >= the largest magnitude / 448, and its inverse.

    The formula is that of `jaxkv_kernels.bits.power_of_two_scale`; a NaN among the values gives NaN for both.  What
    `keep` [..., 1] does not hold for counts as 0: a kernel that says so has its slots fetched beside its values, where
    the assembler would otherwise begin with slots when it is done with values.
    """
    # As integers, magnitudes have the same order, and NaN is the largest.
    size = tile.to(tl.int32, bitcast=True) & (0x7FFFFFFF if keep is None else tl.where(keep, 0x7FFFFFFF, 0))
    bits = tl.max(size, axis=len(tile.shape) - 1)
    exponent = (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, SMALLEST_EXPONENT)
    broken = bits > 0x7F800000
    scale = tl.where(broken, NAN, (127 + exponent) << 23)
    inverse = tl.where(broken, NAN, (127 - exponent) << 23)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
