"""Rotary position embedding: frequencies, their scalings, the rotation itself, and the scaling of queries."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.config import Linear, Llama3, QueryScale, Rope, Yarn
from jaxkv.models.layers.linear import with_rank
from jaxkv_kernels.rotary import rotated


def angles(rope: Rope, rotary_dim: int, positions) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of `positions` [...]: float32 [..., rotary_dim / 2], multiplied by YaRN's attention factor."""
    per_token = with_rank(frequencies(rope, rotary_dim), positions.ndim + 1)
    phase = positions[..., None].astype(jnp.float32) * per_token
    factor = _attention_factor(rope.scaling)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def query_scales(config: QueryScale, positions) -> jax.Array:
    """The factors of queries at `positions`, float32 of the same shape; padding, at negative positions, has 1."""
    turns = jnp.maximum(positions, 0) // config.original_length
    return 1 + config.beta * jnp.log1p(turns.astype(jnp.float32))


def rotate(x, cos, sin, *, interleaved: bool) -> jax.Array:
    """Rotates the pairs of x [..., n] by the angles of `cos` and `sin` [..., n / 2].

    The result has the first values of all pairs, then the second values, even if the pairs of x are `interleaved`.
    Scores do not change, because queries and keys are stored in the same order.
    """
    wide = x.astype(jnp.float32)
    half = x.shape[-1] // 2
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate_last(x, cos, sin) -> jax.Array:
    """Rotates the last pairs (x[2i], x[2i + 1]) of x [..., n] by the angles of `cos` and `sin` [..., p], p <= n / 2.

    The values keep their order, so that `rotate_last(y, cos, -sin)` rotates back.
    """
    plain, rotary = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    rotary = rotated(rotary, jnp.concatenate([cos, sin], axis=-1), interleaved=True)
    return jnp.concatenate([plain, rotary], axis=-1)


def rotate_first(x, cos, sin, *, interleaved: bool) -> jax.Array:
    """Rotates the first values of x [..., n], twice as many as there are angles, and leaves the others as they are."""
    rotary = 2 * cos.shape[-1]
    if rotary in (0, x.shape[-1]):
        return rotate(x, cos, sin, interleaved=interleaved) if rotary else x
    return jnp.concatenate([rotate(x[..., :rotary], cos, sin, interleaved=interleaved), x[..., rotary:]], axis=-1)


def frequencies(rope: Rope, size: int) -> np.ndarray:
    """The angle per position of each pair, in radians: float32 [size / 2]."""
    pairs = np.arange(0, size, 2, dtype=np.float32)
    plain = np.float32(1) / np.float32(rope.theta) ** (pairs / np.float32(size))
    match rope.scaling:
        case Yarn():
            return _yarn(plain, rope.scaling, rope.theta)
        case Llama3():
            return _llama3(plain, rope.scaling)
        case Linear(factor):
            return plain / np.float32(factor)
    return plain


def _yarn(plain: np.ndarray, yarn: Yarn, theta: float) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2).

    Frequencies with fewer than `beta_slow` turns within the original length are divided by `factor`.  Those with more
    than `beta_fast` turns are kept.  Between these, the two are blended linearly in the index of the pair.
    """
    size = 2 * len(plain)
    low, high = (_pair_of(turns, yarn, theta, size) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = max(high - low, 0.001)
    stretched = np.clip((np.arange(len(plain), dtype=np.float32) - low) / np.float32(width), 0, 1)
    return plain / np.float32(yarn.factor) * stretched + plain * (1 - stretched)


def _llama3(plain: np.ndarray, llama3: Llama3) -> np.ndarray:
    """The scaling that `Llama3` describes.  The blend is linear in the number of turns within the original length."""
    turns = np.float32(llama3.original_length) * plain / np.float32(2 * math.pi)
    low, high = np.float32(llama3.low_freq_factor), np.float32(llama3.high_freq_factor)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain / np.float32(llama3.factor) * (1 - kept) + plain * kept


def _pair_of(turns: float, yarn: Yarn, theta: float, size: int) -> float:
    """The fractional index of the pair that makes `turns` turns within the original length."""
    return size * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _attention_factor(yarn: Yarn | Llama3 | Linear | None) -> float:
    """The factor by which cos and sin are multiplied: 1 unless the scaling is YaRN."""
    if not isinstance(yarn, Yarn):
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, 1.0)


def mscale(factor: float, mscale: float) -> float:
    """YaRN's attention scaling for a context `factor` times as long as in training."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
