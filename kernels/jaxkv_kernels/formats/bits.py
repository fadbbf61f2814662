"""Reinterpreting the last axis of an array as another dtype, exact quotients, powers of two and comparisons."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv_kernels.gradients import without_gradients

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_E4M3 = 2.0**-9
"""The smallest e4m3 value above 0."""
SMALLEST_NORMAL_E4M3 = 2.0**-6
"""Smaller values are multiples of 2**-9."""


def view_as(x: jax.Array, dtype) -> jax.Array:
    """The bytes of `x` [..., n] reinterpreted as `dtype` [..., n * old itemsize / new itemsize].

    Floats of another dtype have no gradients here: differentiating them raises NotImplementedError.
    """
    old, new = x.dtype.itemsize, jnp.dtype(dtype).itemsize
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        moved = f"{x.dtype} values that are moved as bits of {jnp.dtype(dtype)} have no gradients"
        x = without_gradients(x, f"{moved}: use a cache whose buffer has the dtype of its entries")
    if new > old:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old), dtype)
    return lax.bitcast_convert_type(x, dtype).reshape(*x.shape[:-1], x.shape[-1] * old // new)


def to_fp8(x: jax.Array, dtype=FP8) -> jax.Array:
    """`x` rounded to e4m3 or e5m2 (nearest, ties to even), saturating.  A plain cast returns NaN for larger values."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def e4m3_values(x: jax.Array) -> jax.Array:
    """Float32 `x` rounded to values of e4m3 (nearest, ties to even), saturating, in float32.

    A conversion to e4m3 and back does the same unless XLA leaves it out, which it may; it keeps these roundings.
    """
    x = jnp.clip(x, -FP8_MAX, FP8_MAX)
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    return jnp.where(jnp.abs(x) < SMALLEST_NORMAL_E4M3, jnp.round(x / SMALLEST_E4M3) * SMALLEST_E4M3, normal)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """The largest magnitude along the last axis; NaN if any value is NaN, also where a device's maximum ignores NaN."""
    return jnp.where(jnp.isnan(x).any(axis=-1), jnp.nan, jnp.abs(x).max(axis=-1))


def power_of_two_scale(amax: jax.Array, smallest_exponent: int, largest=FP8_MAX) -> tuple[jax.Array, jax.Array]:
    """The smallest power of two s >= amax / largest, at least 2 ** smallest_exponent, and 1 / s; both float32.

    Values of magnitude up to `amax`, divided by s, are at most `largest`: that of e4m3, or of another dtype.  NaN
    returns NaN, so that invalid values stay visible.

    s = 2 ** ceil(log2(amax / largest)) is computed on the bits, so that all devices agree: with amax = m * 2**e and
    largest = n * 2**f, where 1 <= m, n < 2, amax / largest = (m / n) * 2**(e - f).
    """
    of_largest = int(np.float32(largest).view(np.int32))
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
    above = (bits & FRACTION) > (of_largest & FRACTION)
    exponent = (bits >> 23) - (of_largest >> 23) + above.astype(jnp.int32)
    exponent = jnp.maximum(exponent, smallest_exponent)
    nan = jnp.isnan(amax)
    scale = lax.bitcast_convert_type((127 + exponent) << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
    return jnp.where(nan, jnp.nan, scale), jnp.where(nan, jnp.nan, inverse)


MAGNITUDE, INFINITY, NAN, FRACTION = 0x7FFFFFFF, 0x7F800000, 0x7FC00000, 0x7FFFFF
"""Bits of float32 values: a mask of all bits but the sign, those of infinity and NaN, and a mask of the fraction."""


def ordered_bits(x: jax.Array) -> jax.Array:
    """int32 numbers in the order of float32 `x`: -0 equals 0, and every NaN is above all numbers.

    Subnormal numbers keep their order.  Comparisons of the floats themselves take them for 0 on CPUs.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & MAGNITUDE
    return jnp.where(magnitude > INFINITY, MAGNITUDE, jnp.where(magnitude == 0, 0, _reflected(bits)))


def from_ordered_bits(numbers: jax.Array) -> jax.Array:
    """The float32 values whose `ordered_bits` are `numbers`: 0 in place of -0, and a single NaN, which is positive."""
    return lax.bitcast_convert_type(_reflected(numbers), jnp.float32)


def _reflected(bits):
    """int32 numbers, in which those of negative sign have their other bits inverted."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


CORRECTIONS = 4
"""The most units in the last place by which a device's own quotient may be off in `corrected_quotient`."""


def corrected_quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`x` / `divisor` in float32, rounded once to nearest even, with the same bits on every device.

    Both are float32, and are broadcast.  Quotients below the normal range (2**-126) become 0, which does not matter:
    they are far below the smallest value of e4m3.

    XLA's own division is off by up to two units in the last place on GPUs, multiplies by the reciprocal where the
    divisor is broadcast, and treats denormal operands as 0 on CPUs.  It therefore only estimates the quotient of the
    operands' significands (24 bits each), and the remainder of the estimate corrects it.  The remainder is exact,
    although its terms overflow int32, because it is small and int32 arithmetic is modulo 2**32.
    """
    x, divisor = jnp.broadcast_arrays(x, divisor)
    bits, divisor_bits = (lax.bitcast_convert_type(value, jnp.int32) for value in (x, divisor))
    (n, exponent), (d, divisor_exponent) = _significand(bits), _significand(divisor_bits)
    below = (n < d).astype(jnp.int32)
    n, exponent = n << below, exponent - divisor_exponent - below
    # n / d is in [1, 2), so that the quotient of 24 bits is an integer in [2**23, 2**24).
    quotient = (n.astype(jnp.float32) / d.astype(jnp.float32) * 2.0**23).astype(jnp.int32)
    remainder = (n << 23) - quotient * d
    for _ in range(CORRECTIONS):
        step = (remainder >= d).astype(jnp.int32) - (remainder < 0).astype(jnp.int32)
        quotient, remainder = quotient + step, remainder - step * d
    # There are no ties: for n * 2**24 = (2 * quotient + 1) * d, d would have to be a multiple of 2**24.
    quotient += (2 * remainder > d).astype(jnp.int32)
    # A quotient that was rounded up to 2**24 carries into the exponent.
    found = jnp.where(exponent < -126, 0, ((exponent + 126) << 23) + quotient)
    found = jnp.where(exponent > 127, INFINITY, jnp.minimum(found, INFINITY))
    sign = (bits ^ divisor_bits) & ~MAGNITUDE
    ordinary = _ordinary(bits) & _ordinary(divisor_bits)
    # Where an operand is 0, infinite or NaN, the quotient is one of these too.
    size, divisor_size = bits & MAGNITUDE, divisor_bits & MAGNITUDE
    both = (size == divisor_size) & ~ordinary  # 0 / 0 or infinity / infinity
    nan = (jnp.maximum(size, divisor_size) > INFINITY) | both
    special = jnp.where((size == INFINITY) | (divisor_size == 0), INFINITY, 0)
    found = jnp.where(ordinary, found, jnp.where(nan, NAN, special))
    return lax.bitcast_convert_type(found | sign, jnp.float32)


def _significand(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The magnitude of float32 `bits` as m * 2**(e - 23) with an integer m in [2**23, 2**24): m and e, both int32."""
    biased, fraction = (bits & MAGNITUDE) >> 23, bits & FRACTION
    # The leading bit of a denormal number's fraction is shifted to bit 23.
    shift = lax.clz(jnp.maximum(fraction, 1)) - 8
    denormal = biased == 0
    return (
        jnp.where(denormal, fraction << shift, fraction | (FRACTION + 1)),
        jnp.where(denormal, -126 - shift, biased - 127),
    )


def _ordinary(bits: jax.Array) -> jax.Array:
    """Whether float32 `bits` are those of a number other than 0, infinity and NaN."""
    return ((bits & MAGNITUDE) - 1).astype(jnp.uint32) < INFINITY - 1
