"""Tokens times a weight in float8."""

import jax
import jax.numpy as jnp
from jax import lax


@jax.jit
def scaled_linear(x, weight):
    """x [T, D] times the transpose of `weight` [I, D], with sums in float32."""
    x, expanded = weight.operands(x)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("td,id->ti", x, expanded, precision=precision)
