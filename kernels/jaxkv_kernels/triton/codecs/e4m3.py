"""e4m3 values, and power-of-two scales for them.

GPUs before Ada (sm_89) have no instructions for the type, and Triton does not support it on them.  There, bytes are
encoded and decoded with integer arithmetic on the bits.
"""

import triton
import triton.language as tl

from jaxkv_kernels.triton.runtime.arithmetic import INTERPRETED
from jaxkv_kernels.triton.runtime.launch import capability

NAN = tl.constexpr(0x7FC00000)
"""The bits of a float32 NaN."""


def has_e4m3() -> bool:
    """Whether the GPU has instructions that convert e4m3; passed to kernels as the constant NATIVE."""
    return capability() >= 89


@triton.jit
def load_scales(first, second, head, STEPS: tl.constexpr):
    """Loads the scales [n] of both parts of entries, for heads `head` [n]; an empty tuple if STEPS is None.

    `first` and `second` point to the scales; STEPS are the distances between those of consecutive heads.  Kernels load
    scales before entries, so that nothing has to wait for them later.
    """
    scales = ()
    if STEPS is not None:
        scales += (tl.load(first + head * STEPS[0]), tl.load(second + head * STEPS[1]))
    return scales


@triton.jit
def quotient(x, divisor):
    """Float32 `x` / `divisor`, which are broadcast, rounded once.

    This is inline PTX, because the way in which Triton compiles a division depends on its version: it may approximate
    the quotient, or treat denormal operands as 0.  The interpreter divides as NumPy does.
    """
    if INTERPRETED:
        return tl.div_rn(x, divisor)
    x, divisor = tl.broadcast(x, divisor)
    return tl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, divisor], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Encodes float32 as bytes: rounds to nearest even and saturates at +-448.  NaN stays NaN."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals of e4m3, below 2**-6, are multiples of 2**-9.  float32 values near 2**14 also are, so adding 2**14
    # rounds.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    found = tl.where(size < 0.015625, small, normal)
    return (sign | tl.where(x == x, found, 0x7F)).to(tl.uint8)


@triton.jit
def from_e4m3(byte, NATIVE: tl.constexpr):
    """Decodes bytes to float32, exactly."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = byte.to(tl.uint16)
    # Shifted by 7, the exponent and mantissa bits are those of a float16, 2**8 times too small.  float16 also holds
    # e4m3's subnormals.  Shifted into a float32 they would be subnormal, and CPUs may flush those to zero.
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def power_of_two_scale(tile, SMALLEST_EXPONENT: tl.constexpr, keep=None):
    """Scales [...] for float32 values `tile` [..., n], and their inverses [...].

    A scale is the smallest power of two that is at least the largest magnitude / 448, and at least
    2**SMALLEST_EXPONENT.  The formula is that of `jaxkv_kernels.formats.bits.power_of_two_scale`.  A NaN among the
    values gives NaN for both results.

    Values where the mask `keep` [..., 1] is False count as 0.  The mask only matters for speed, because results of
    these rows are not stored.  Kernels that store entries load slots and values, and compute `keep` from the slots.
    Using `keep` here makes ptxas issue both loads together.  Otherwise, it would load the slots after the arithmetic on
    the values.
    """
    # Magnitudes have the same order as integers and as floats, and NaN is the largest integer.
    size = tile.to(tl.int32, bitcast=True) & (0x7FFFFFFF if keep is None else tl.where(keep, 0x7FFFFFFF, 0))
    bits = tl.max(size, axis=len(tile.shape) - 1)
    exponent = (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, SMALLEST_EXPONENT)
    broken = bits > 0x7F800000
    scale = tl.where(broken, NAN, (127 + exponent) << 23)
    inverse = tl.where(broken, NAN, (127 - exponent) << 23)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
