"""Rotary position embedding (RoPE) that keeps the order of values, as writes and DeepSeek V4 apply it."""

import jax
import jax.numpy as jnp


def rotated(x: jax.Array, cos_sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates the pairs of x [..., P] by angles whose cosines and then sines are float32 `cos_sin` [..., P].

    Other axes of `cos_sin` than the last may have length 1: the angles are then the same along them.

    A pair is values 2i and 2i + 1 if `interleaved`, otherwise i and i + P / 2.  Its rotated values take its place.
    Products and sums are float32; the result is rounded to the dtype of `x`.
    """
    half = x.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    wide = x.astype(jnp.float32)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    pair = a * cos - b * sin, b * cos + a * sin
    found = jnp.stack(pair, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return found.astype(x.dtype)
