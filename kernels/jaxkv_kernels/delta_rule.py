"""The gated delta rule (arXiv 2412.06464) for one token, and the short causal convolution before it.

A head has a state S [K, V].  A token has a query q and a key k [K], a value v [V], the logarithm g <= 0 of a decay, and
a rate b:

    S = exp(g) S
    S = S + k (b (v - S' k))'
    o = S' q

In Kimi Delta Attention (arXiv 2510.26692), g is a vector [K], and each row of S has a decay of its own.

Queries, keys and values are the channels of a causal convolution with SiLU.  Queries and keys are divided by their
lengths, and queries by the square root of K.  All arithmetic is in float32.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

CONV, DELTA = "conv", "delta"
"""The names of the arrays of a state: the tokens before the new one, and the matrices S of the heads."""
NORM_EPS = 1e-6
"""What is added to the squared lengths of queries and keys before these are divided by their lengths."""


def convolve(x, state, weight, count) -> tuple[jax.Array, jax.Array]:
    """The causal convolution of each channel over the tokens of a request; returns it and the next state.

    Args:
      x: [B, Q, C], the new tokens, aligned to the end; those before them may hold anything.
      state: float32 [B, W - 1, C], the W - 1 tokens before the new ones; 0 before the first of a request.
      weight: [C, W], in which the new token has the last column.
      count: int32 [B], the new tokens of each request.

    Returns:
      float32 [B, Q, C], of which those before the new tokens have no meaning; and the state, of the last W - 1 tokens.
    """
    (_, q_len, _), width = x.shape, weight.shape[-1]
    x, weight = jnp.pad(x.astype(jnp.float32), ((0, 0), (width - 1, 0), (0, 0))), weight.astype(jnp.float32)
    # The state lies before the first new token of each row.
    x = jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=0))(x, state, q_len - count)
    taps = [x[:, i : i + q_len] * jnp.expand_dims(weight[:, i], (0, 1)) for i in range(width)]
    return reduce(jnp.add, taps), x[:, q_len:]


def heads_of(channels, heads: int, key_dim: int, value_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys [..., G, K], and values [..., H, V], of channels [..., 2 G K + H V]: H heads of values."""
    keys = (channels.shape[-1] - heads * value_dim) // 2
    parts = zip(jnp.split(channels, [keys, 2 * keys], axis=-1), (key_dim, key_dim, value_dim), strict=True)
    q, k, v = (part.reshape(*channels.shape[:-1], part.shape[-1] // size, size) for part, size in parts)
    return q, k, v


def unit_queries_and_keys(q, k, heads: int) -> tuple[jax.Array, jax.Array]:
    """Queries and keys [..., G, K] as the rule uses them, float32 [..., H, K].

    They are divided by their lengths, and queries by the square root of K.  Value head h has those of h // (H / G).
    """
    q, k = (jnp.repeat(_unit(part.astype(jnp.float32)), heads // part.shape[-2], axis=part.ndim - 2) for part in (q, k))
    return q * q.shape[-1] ** -0.5, k


def advance(q, k, v, decay, rate, state) -> tuple[jax.Array, jax.Array]:
    """The rule for one token; returns the output and the next state.

    Args:
      q: float32 [..., H, K], from `unit_queries_and_keys`.
      k: the keys, likewise.
      v: float32 [..., H, V].
      decay: float32 [..., H, 1], g above; or [..., H, K], one per value of a key.
      rate: float32 [..., H], b above.
      state: float32 [..., H, K, V].

    Returns:
      float32 [..., H, V], and the state, of its shape.
    """
    q, k = q[..., None], k[..., None]
    state = state * jnp.exp(decay)[..., None]
    state = state + k * (rate[..., None] * (v - (k * state).sum(axis=-2)))[..., None, :]
    return (q * state).sum(axis=-2), state


def _unit(x) -> jax.Array:
    """x [..., n] divided by its length."""
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + NORM_EPS)
