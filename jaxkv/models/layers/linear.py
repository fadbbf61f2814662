"""The pieces every part of a layer uses: matrix products and norms."""

import jax
import jax.numpy as jnp
from jax import lax


def product(equation: str, *operands, dtype=None) -> jax.Array:
    """`jnp.einsum`; float32 operands are not rounded to tf32."""
    precision = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=dtype)


def linear(x, weight) -> jax.Array:
    """x [..., in] through weight [out, in], as checkpoints store it."""
    return product("...i,oi->...o", x, weight)


def with_rank(vector, ndim: int) -> jax.Array:
    """vector [n] as [1, ..., 1, n] of `ndim` axes: NumPy's rank promotion, which a user's program may have disabled."""
    return jnp.expand_dims(vector, range(ndim - 1))


def rms_norm(x, weight, eps: float) -> jax.Array:
    """x [..., n] over its root mean square, times weight [n]; the mean in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    return with_rank(weight, x.ndim) * wide.astype(x.dtype)


def layer_norm(x, weight, bias, eps: float) -> jax.Array:
    """x [..., n] with mean 0 and variance 1, times weight [n], plus bias [n]; in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    weight, bias = (with_rank(vector.astype(jnp.float32), x.ndim) for vector in (weight, bias))
    return (wide * weight + bias).astype(x.dtype)
