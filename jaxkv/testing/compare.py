"""Comparison of arrays on the device: bit for bit, and by roundings of a dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding."""


def differ(found: jax.Array, expected: jax.Array) -> jax.Array:
    """inf if any bit differs, else 0."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    bits = jnp.dtype(f"uint{8 * found.dtype.itemsize}")
    found, expected = (lax.bitcast_convert_type(x, bits) for x in (found, expected))
    return jnp.where((found == expected).all(), 0.0, jnp.inf)


def excess(found, expected, *, roundings: int, dtype: str, magnitude: float, floor: float = 0) -> Any:
    """The largest error / tolerance, of single elements and of the norm of all; inf if infinities or NaN differ.

    `magnitude` is the size of the terms that were summed, which is the absolute part of an element's tolerance.
    `floor` is the absolute part of the norm's tolerance, for results that may be small by chance, such as a request's
    only score, and for errors that do not depend on the results, such as those of capped scores.
    """
    assert found.shape == expected.shape
    a, e = found.astype(jnp.float32), expected.astype(jnp.float32)
    finite = jnp.isfinite(e)
    same = ((a == e) | (jnp.isnan(a) & jnp.isnan(e)) | (finite & jnp.isfinite(a))).all()
    a, e = jnp.where(finite, a, 0), jnp.where(finite, e, 0)
    tolerance = roundings * EPSILON[dtype]
    worst = (jnp.abs(a - e) / (tolerance * (jnp.abs(e) + magnitude))).max()
    size = jnp.linalg.norm((jnp.abs(e) + floor).reshape(-1))
    whole = jnp.linalg.norm((a - e).reshape(-1)) / (tolerance / 2 * size + 1e-30)
    return jnp.where(same, jnp.maximum(worst, whole), jnp.inf)
