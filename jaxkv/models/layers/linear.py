"""Matrix products and norms, which all parts of a layer use."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.ops.products import scaled_linear
from jaxkv_kernels.tile_scaled import TileScaled


def product(equation: str, *operands, dtype=None) -> jax.Array:
    """`jnp.einsum`, without rounding float32 operands to tf32."""
    precision = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=dtype)


def linear(x, weight) -> jax.Array:
    """x @ weight.T for x [..., in] and `weight` [out, in], the order in which checkpoints store weights.

    `weight` is an array or a `TileScaled`.
    """
    if isinstance(weight, TileScaled):
        return scaled_linear(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
    return product("...i,oi->...o", x, weight)


def float32_linear(x, weight) -> jax.Array:
    """x @ weight.T in float32, as `linear`; neither operand is rounded.

    If both have the same 16-bit dtype, their products are exact in float32, and a GPU's matrix units compute them.
    Otherwise both are float32, whose products are several times slower.
    """
    if x.dtype != weight.dtype:
        x = x.astype(jnp.float32)
    return product("...i,oi->...o", x, weight, dtype=jnp.float32)


def with_rank(vector, ndim: int) -> jax.Array:
    """`vector` [n] reshaped to [1, ..., 1, n] with `ndim` axes, for programs that disable implicit rank promotion."""
    return jnp.expand_dims(vector, range(ndim - 1))


def rms_norm(x, weight, eps: float) -> jax.Array:
    """x [..., n] divided by its root mean square, which is computed in float32, times `weight` [n].

    The product is rounded to the dtype of x; a float32 `weight` is not rounded before.
    """
    return (with_rank(weight, x.ndim) * _normalised(x, eps).astype(weight.dtype)).astype(x.dtype)


def normalised(x, eps: float) -> jax.Array:
    """x [..., n] divided by its root mean square, which is computed in float32."""
    return _normalised(x, eps).astype(x.dtype)


def _normalised(x, eps: float):
    wide, size = x.astype(jnp.float32), x.shape[-1]
    # The mean of x**2 + eps.  If it were divided and `eps` were added after the sum, XLA would need another kernel for
    # the norm of a single token on GPUs.
    return wide * lax.rsqrt((wide * wide * (1 / size) + eps / size).sum(axis=-1, keepdims=True))


def layer_norm(x, weight, bias, eps: float) -> jax.Array:
    """x [..., n] normalised to mean 0 and variance 1 in float32, times `weight` [n], plus `bias` [n]."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    weight, bias = (with_rank(vector.astype(jnp.float32), x.ndim) for vector in (weight, bias))
    return (wide * weight + bias).astype(x.dtype)
