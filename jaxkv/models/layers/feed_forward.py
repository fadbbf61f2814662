"""Feed-forward layers: dense, and a mixture of experts with a shared expert."""

import jax

from jaxkv.models.config import Experts
from jaxkv.models.layers.linear import linear
from jaxkv.models.layers.routing import route
from jaxkv.models.parallel.base import Parallel
from jaxkv.ops.products import grouped_swiglu


def feed_forward(experts: Experts | None, weights, x, parallel: Parallel) -> jax.Array:
    """The feed-forward of a layer: dense or a mixture, depending on its weights.

    If devices divide the weights, the result is this device's term of a sum over devices.
    """
    if experts is None or "dense" in weights:
        return dense(weights["dense"], x)
    return mixture(experts, weights["mixture"], x, parallel)


def dense(weights, x) -> jax.Array:
    """The SwiGLU feed-forward; x and the result are [..., hidden]."""
    return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])


def mixture(config: Experts, weights, x, parallel: Parallel) -> jax.Array:
    """The weighted sum of each token's experts, plus the shared expert; x and the result are [..., hidden]."""
    chosen, shares = route(config, weights, x.reshape(-1, x.shape[-1]))
    return routed(config, weights["experts"], x, chosen, shares, parallel) + dense(weights["shared"], x)


def routed(config: Experts, weights, x, chosen, shares, parallel: Parallel) -> jax.Array:
    """The weighted sum of each token's experts, of which those with id -1 are skipped.

    x and the result are [..., hidden]; `chosen` and `shares` are from `route`.
    """
    chosen, tokens = parallel.local_experts(chosen, config.count), x.reshape(-1, x.shape[-1])
    return grouped_swiglu(tokens, chosen, shares, weights["gate"], weights["up"], weights["down"]).reshape(x.shape)
