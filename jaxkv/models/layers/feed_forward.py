"""Feed-forward layers: dense, and a mixture of experts with a shared expert."""

import jax
import jax.numpy as jnp

from jaxkv.models.config import Experts
from jaxkv.models.layers.linear import linear, product
from jaxkv.models.layers.routing import route


def feed_forward(experts: Experts | None, weights, x) -> jax.Array:
    """That of a layer, whichever its weights have."""
    if experts is None or "dense" in weights:
        return dense(weights["dense"], x)
    return mixture(experts, weights["mixture"], x)


def dense(weights, x) -> jax.Array:
    """SwiGLU: x [..., hidden] to [..., hidden]."""
    return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])


def mixture(config: Experts, weights, x) -> jax.Array:
    """The weighted sum of each token's experts, plus the shared expert: x [..., hidden] to [..., hidden].

    All experts side by side are computed as one wide feed-forward, whose inner values are multiplied by the weight of
    their expert: 0 for experts that were not chosen.  A decode step of some dozens of requests needs every expert's
    weights anyway, and reads them once here.  A long prefill computes `count / per_token` times the products it needs.
    """
    share = route(config, weights, x)[..., None]
    experts = weights["experts"]
    inner = jax.nn.silu(product("...d,eid->...ei", x, experts["gate"])) * product("...d,eid->...ei", x, experts["up"])
    # Selected, not multiplied by 0: an expert that does not concern a token may overflow on it.
    inner = jnp.where(share > 0, inner * share.astype(x.dtype), 0)
    return product("...ei,dei->...d", inner, experts["down"]) + dense(weights["shared"], x)
