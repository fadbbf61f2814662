"""Conversion of e2m1 values and of the scales of their tiles, with the same bits on every device.

An e2m1 value is 4 bits: a sign, then the magnitude 0, 0.5, 1, 1.5, 2, 3, 4 or 6 as codes 0 to 7.  Two values are stored
in a byte, the first in the low bits.  There is no NaN, so that values of invalid tiles are NaN through their scale.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv_kernels.formats.bits import (
    FP8_MAX,
    SMALLEST_E4M3,
    SMALLEST_NORMAL_E4M3,
    corrected_quotient,
    e4m3_values,
)

E2M1_MAX = 6.0
DROPPED = 2**20 - 1
"""Bits of the fraction of a float32 value that e4m3 lacks."""
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes.  Ties go to the even code: upwards from the second, the fourth and the sixth."""


def tiles_of(x: jax.Array, tile: int) -> jax.Array:
    """`x` [..., n] in float32 as [..., n / tile, tile]."""
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // tile, tile)


def to_e2m1(tiles: jax.Array, scale: jax.Array, *, ties_to_even: bool = True) -> jax.Array:
    """Values [..., n, tile] divided by the scales [..., n] of their tiles, as pairs of e2m1, uint8 [..., n * tile / 2].

    The exact quotient is rounded to nearest, ties to even or away from 0, saturating at 6: magnitudes are compared with
    the products of midpoints and scales, which float32 represents exactly if a scale has at most 20 bits.  NaN becomes
    0.  The sign of 0 is kept."""
    magnitude, scale = jnp.abs(tiles), scale[..., None]
    code = jnp.zeros(tiles.shape, jnp.uint8)
    for n, midpoint in enumerate(MIDPOINTS):
        up = n % 2 or not ties_to_even
        above = magnitude >= midpoint * scale if up else magnitude > midpoint * scale
        code += above.astype(jnp.uint8)
    code = jnp.where(jnp.isinf(magnitude) & (scale > 0), jnp.uint8(7), code)  # products may be infinite as well
    negative = lax.bitcast_convert_type(tiles, jnp.int32) < 0
    code = jnp.where(negative, code | 8, code)
    code = code.reshape(*tiles.shape[:-2], tiles.shape[-2] * tiles.shape[-1] // 2, 2)
    return code[..., 0] | code[..., 1] << 4


def from_e2m1(pairs: jax.Array, scale: jax.Array) -> jax.Array:
    """Pairs of e2m1, uint8 [..., n], times the float32 scales [..., tiles] of their tiles: float32 [..., 2 n]."""
    code = jnp.stack([pairs & 15, pairs >> 4], axis=-1).astype(jnp.int32)
    size = code & 7
    twice = jnp.where(size < 2, size, (2 | size & 1) << (size >> 1) - 1)
    value = twice.astype(jnp.float32) * jnp.where(code & 8, -0.5, 0.5)
    count = 2 * pairs.shape[-1]
    value = value.reshape(*scale.shape, count // scale.shape[-1]) * scale[..., None]
    return value.reshape(*pairs.shape[:-1], count)


def e4m3_scale(amax: jax.Array, *, round_up: bool = False) -> jax.Array:
    """amax / 6 rounded to a value of e4m3, to nearest even or up, at least 2**-9 and at most 448, as float32.

    XLA cannot leave out this rounding, unlike a conversion to e4m3 and back.
    """
    exact = jnp.clip(corrected_quotient(amax, jnp.float32(E2M1_MAX)), SMALLEST_E4M3, FP8_MAX)
    if not round_up:
        return e4m3_values(exact)
    bits = lax.bitcast_convert_type(exact, jnp.int32)
    normal = lax.bitcast_convert_type((bits + DROPPED) & ~DROPPED, jnp.float32)
    denormal = jnp.ceil(exact / SMALLEST_E4M3) * SMALLEST_E4M3
    return jnp.where(jnp.isnan(exact), jnp.nan, jnp.where(exact < SMALLEST_NORMAL_E4M3, denormal, normal))


def to_e8m0(scale: jax.Array) -> jax.Array:
    """Float32 scales, which are NaN or powers of two from 2**-126 on, as e8m0: the exponent plus 127; 255 for NaN."""
    bits = (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)
    return lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)


def from_e8m0(scale: jax.Array) -> jax.Array:
    """e8m0 scales as float32.  Byte 0, which is 2**-127, becomes 0, as in readers that shift it to the exponent."""
    bits = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    return jnp.where(bits == 255, np.float32(np.nan), lax.bitcast_convert_type(bits << 23, jnp.float32))
