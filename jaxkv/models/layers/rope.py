"""Rotary position embedding: frequencies, YaRN, and the rotation itself."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.config import ModelConfig, Rope, Yarn
from jaxkv.models.layers.linear import with_rank


def angles(config: ModelConfig, positions) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of positions [...]: float32 [..., qk_rope_head_dim / 2], times YaRN's factor."""
    per_token = with_rank(frequencies(config.rope, config.qk_rope_head_dim), positions.ndim + 1)
    phase = positions[..., None].astype(jnp.float32) * per_token
    factor = _attention_factor(config.rope.yarn)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def rotate(x, cos, sin, *, interleaved: bool) -> jax.Array:
    """x [..., n] turned by the angles of cos and sin [..., n / 2]; first halves of all pairs, then second halves.

    The order of the result is the same for interleaved pairs: queries and keys are only ever multiplied with each
    other, and then any common order gives the same scores.
    """
    wide = x.astype(jnp.float32)
    half = x.shape[-1] // 2
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def softmax_scale(config: ModelConfig) -> float:
    """1 / sqrt(nope + rope), times YaRN's mscale squared where the checkpoint has an `mscale_all_dim`."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.rope.yarn
    if yarn is None or not yarn.mscale_all_dim:
        return scale
    return scale * _mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def frequencies(rope: Rope, size: int) -> np.ndarray:
    """Radians a token of each pair: float32 [size / 2].

    YaRN (arXiv 2309.00071, section 3.2) divides by `factor` those that turn less than `beta_slow` times in the
    original length, leaves those that turn more than `beta_fast` times, and blends between.
    """
    pairs = np.arange(0, size, 2, dtype=np.float32)
    periods = np.float32(rope.theta) ** (pairs / np.float32(size))
    plain = np.float32(1) / periods
    yarn = rope.yarn
    if yarn is None:
        return plain
    low = max(math.floor(_pair_of(yarn.beta_fast, yarn, rope.theta, size)), 0)
    high = min(math.ceil(_pair_of(yarn.beta_slow, yarn, rope.theta, size)), size - 1)
    width = max(high - low, 0.001)
    stretched = np.clip((np.arange(size // 2, dtype=np.float32) - low) / np.float32(width), 0, 1)
    return plain / np.float32(yarn.factor) * stretched + plain * (1 - stretched)


def _pair_of(turns: float, yarn: Yarn, theta: float, size: int) -> float:
    """The (fractional) pair that turns so many times in the original length."""
    return size * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _attention_factor(yarn: Yarn | None) -> float:
    """The factor on cos and sin."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
