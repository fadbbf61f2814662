"""Reinterpreting the last axis of an array as another dtype, and exact powers of two."""

import jax
import jax.numpy as jnp
from jax import lax

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0


def view_as(x: jax.Array, dtype) -> jax.Array:
    """The bytes of `x` [..., n] reinterpreted as `dtype` [..., n * old itemsize / new itemsize]."""
    old, new = x.dtype.itemsize, jnp.dtype(dtype).itemsize
    if x.dtype == dtype:
        return x
    if new > old:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old), dtype)
    return lax.bitcast_convert_type(x, dtype).reshape(*x.shape[:-1], x.shape[-1] * old // new)


def to_fp8(x: jax.Array) -> jax.Array:
    """`x` rounded to e4m3 (nearest, ties to even), saturating at +-448.  A plain cast returns NaN for larger values."""
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)


def power_of_two_scale(amax: jax.Array, smallest_exponent: int) -> tuple[jax.Array, jax.Array]:
    """The smallest power of two s >= amax / 448, at least 2 ** smallest_exponent, and 1 / s; both float32.

    Values of magnitude up to `amax`, divided by s, are within the range of e4m3.  NaN returns NaN, so that invalid
    values stay visible.

    s = 2 ** ceil(log2(amax / 448)) is computed on the bits, so that all devices agree: with amax = m * 2**e and
    1 <= m < 2, amax / 448 = (m / 1.75) * 2**(e - 8).
    """
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    exponent = jnp.maximum(exponent, smallest_exponent)
    nan = jnp.isnan(amax)
    scale = lax.bitcast_convert_type((127 + exponent) << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
    return jnp.where(nan, jnp.nan, scale), jnp.where(nan, jnp.nan, inverse)
