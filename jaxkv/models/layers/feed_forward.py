"""Feed-forward layers: dense, and a mixture of experts with a shared expert."""

import jax
import jax.numpy as jnp

from jaxkv.models.config import Experts
from jaxkv.models.layers.linear import linear
from jaxkv.models.layers.routing import route


def feed_forward(experts: Experts | None, weights, x) -> jax.Array:
    """The feed-forward of a layer: dense or a mixture, depending on its weights."""
    if experts is None or "dense" in weights:
        return dense(weights["dense"], x)
    return mixture(experts, weights["mixture"], x)


def dense(weights, x) -> jax.Array:
    """The SwiGLU feed-forward; x and the result are [..., hidden]."""
    return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])


def mixture(config: Experts, weights, x) -> jax.Array:
    """The weighted sum of each token's experts, plus the shared expert; x and the result are [..., hidden].

    All experts are computed as one wide feed-forward, whose inner values are multiplied by the weight of their expert
    (0 if it is not chosen).  A decode step with dozens of requests needs nearly all experts' weights anyway, and this
    reads them once.  A long prefill computes `count / per_token` times as many products as necessary.
    """
    share = route(config, weights, x)[..., None]
    experts = weights["experts"]

    def product_of_all(weight):  # reshaped, because XLA on CPUs transposes `weight` in an einsum with three axes
        return linear(x, weight.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], *weight.shape[:2])

    inner = jax.nn.silu(product_of_all(experts["gate"])) * product_of_all(experts["up"])
    # Select instead of multiplying by 0: an expert that is not chosen for a token may overflow to inf.
    inner = jnp.where(share > 0, inner * share.astype(x.dtype), 0)
    out = linear(inner.reshape(*x.shape[:-1], -1), experts["down"].reshape(x.shape[-1], -1))
    return out + dense(weights["shared"], x)
