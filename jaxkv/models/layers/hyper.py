"""Manifold-constrained hyper-connections (arXiv 2512.24880): n residual streams instead of one.

A part of a layer, attention or feed-forward, reads a weighted sum of the streams.  Its output is added to each of them,
also weighted, after a matrix has mixed the streams:

    x_k = post_k * part(norm(sum over j of pre_j * x_j)) + sum over j of mix_jk * x_j

The weights depend on the streams.  `mix` is nearly doubly stochastic, so that the streams neither grow nor vanish.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.models.config import HyperConnections
from jaxkv.models.layers.linear import normalised, product, with_rank


class Connections(NamedTuple):
    """The weights of a part of a layer, float32."""

    pre: jax.Array
    """[..., n]."""
    post: jax.Array
    """[..., n]."""
    mix: jax.Array
    """[..., n, n]."""

    @classmethod
    def of(cls, config: HyperConnections, weights, x, norm_eps: float) -> "Connections":
        """The weights for streams x [..., n, hidden]."""
        n = config.streams
        pre, post, mix = jnp.split(_projected(weights, x, norm_eps), [n, 2 * n], axis=-1)
        base_pre, base_post, base_mix = jnp.split(with_rank(weights["base"], pre.ndim), [n, 2 * n], axis=-1)
        pre_scale, post_scale, mix_scale = weights["scale"]
        logits = (mix * mix_scale + base_mix).reshape(*mix.shape[:-1], n, n)
        return cls(
            jax.nn.sigmoid(pre * pre_scale + base_pre) + config.eps,
            2 * jax.nn.sigmoid(post * post_scale + base_post),
            _doubly_stochastic(config, jax.nn.softmax(logits, axis=-1) + config.eps),
        )

    def read(self, x) -> jax.Array:
        """The input [..., hidden] of the part, before its norm, from streams x [..., n, hidden]."""
        return _weighted(self.pre, x)

    def write(self, x, out) -> jax.Array:
        """The streams after the part, given those before it, and its output [..., hidden]."""
        post, mix = self.post.astype(x.dtype), self.mix.astype(x.dtype)
        return post[..., None] * out[..., None, :] + product("...jk,...jd->...kd", mix, x)


def _doubly_stochastic(config: HyperConnections, mix):
    """Sinkhorn-Knopp: normalises columns, then rows and columns in turn."""
    mix = mix / (mix.sum(axis=-2, keepdims=True) + config.eps)
    for _ in range(config.iterations - 1):
        mix = mix / (mix.sum(axis=-1, keepdims=True) + config.eps)
        mix = mix / (mix.sum(axis=-2, keepdims=True) + config.eps)
    return mix


def last(config: HyperConnections, weights, x, norm_eps: float) -> jax.Array:
    """The sum [..., hidden] of the streams x [..., n, hidden] that the final norm reads."""
    scale, base = (with_rank(weights[name], x.ndim - 1) for name in ("scale", "base"))
    pre = _projected(weights, x, norm_eps) * scale + base
    return _weighted(jax.nn.sigmoid(pre) + config.eps, x)


def _projected(weights, x, norm_eps: float):
    """float32 [..., m] of all streams together."""
    flat = x.reshape(*x.shape[:-2], -1).astype(jnp.float32)
    return product("...i,oi->...o", normalised(flat, norm_eps), weights["projection"])


def _weighted(weights, x):
    """The sum over streams x [..., n, hidden], in float32."""
    return (weights[..., None] * x.astype(jnp.float32)).sum(axis=-2).astype(x.dtype)
