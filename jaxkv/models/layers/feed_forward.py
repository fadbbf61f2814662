"""Feed-forward layers: dense, and a mixture of experts with a shared expert."""

import jax

from jaxkv.models.config import Experts
from jaxkv.models.layers.linear import linear
from jaxkv.models.layers.routing import route
from jaxkv.models.parallel.base import Parallel
from jaxkv.ops.products import grouped_swiglu
from jaxkv_kernels.mosaic_gpu.experts import unsupported
from jaxkv_kernels.tile_scaled import TileScaled
from jaxkv_kernels.xla.experts.swiglu import gated


def swiglu_of_one(*args, **kwargs):
    """`swiglu_of_one` of `jaxkv_kernels.mosaic_gpu.one_token.experts`, which imports Pallas."""
    from jaxkv_kernels.mosaic_gpu.one_token.experts import swiglu_of_one

    return swiglu_of_one(*args, **kwargs)


def feed_forward(experts: Experts | None, weights, x, parallel: Parallel, ids=None) -> jax.Array:
    """The feed-forward of a layer: dense or a mixture, depending on its weights; `ids` are those of `mixture`.

    If devices divide the weights, the result is this device's term of a sum over devices.
    """
    if experts is None or "dense" in weights:
        return dense(weights["dense"], x)
    return mixture(experts, weights["mixture"], x, parallel, ids)


def dense(weights, x, limit: float | None = None, alpha: float | None = None) -> jax.Array:
    """The SwiGLU feed-forward; x and the result are [..., hidden], `limit` and `alpha` as in `grouped_swiglu`."""
    parts, tokens = [weights[name] for name in ("gate", "up", "down")], x.size // x.shape[-1]
    if alpha is None and not any(unsupported.swiglu_of_one(tokens, x, *parts)):
        return swiglu_of_one(x.reshape(1, -1), *parts, limit=limit).reshape(x.shape)
    return linear(gated(linear(x, weights["gate"]), linear(x, weights["up"]), limit, alpha), weights["down"])


def mixture(config: Experts, weights, x, parallel: Parallel, ids=None) -> jax.Array:
    """The weighted sum of each token's experts, plus the shared expert; x and the result are [..., hidden].

    With a weight "shared_gate" [1, hidden], the shared expert is multiplied by the sigmoid of x's product with it.
    `ids` are those of the tokens, for layers that choose experts by them; of the shape of x without its last axis.
    """
    chosen, shares = route(config, weights, x.reshape(-1, x.shape[-1]), None if ids is None else ids.reshape(-1))
    if not config.shared_intermediate_size:
        return routed(config, weights["experts"], x, chosen, shares, parallel)
    shared = tuple(weights["shared"][part] for part in ("gate", "up", "down"))
    # One kernel may compute the shared expert with the others, unless these also compute tokens of other devices.
    fused = not parallel.exchanges_tokens and not any(isinstance(weight, TileScaled) for weight in shared)
    fused = fused and "shared_gate" not in weights
    out = routed(config, weights["experts"], x, chosen, shares, parallel, shared=shared if fused else None)
    if fused:
        return out
    whole = dense(weights["shared"], x, config.limit, config.alpha)
    return out + (jax.nn.sigmoid(linear(x, weights["shared_gate"])) * whole if "shared_gate" in weights else whole)


def routed(config: Experts, weights, x, chosen, shares, parallel: Parallel, shared=None) -> jax.Array:
    """The weighted sum of each token's experts, of which those with id -1 are skipped, plus the shared expert, if any.

    x and the result are [..., hidden]; `chosen` and `shares` are from `route`; `shared` as in `grouped_swiglu`.
    """
    stacks = tuple(weights[name] for name in ("gate", "up", "down"))
    biases = tuple(weights[f"{name}_bias"] for name in ("gate", "up", "down")) if "gate_bias" in weights else None
    options = {"shared": shared, "limit": config.limit, "alpha": config.alpha, "biases": biases}

    def experts(tokens, chosen, shares):
        return grouped_swiglu(tokens, chosen, shares, *stacks, **options)

    return parallel.routed(experts, x.reshape(-1, x.shape[-1]), chosen, shares, config.count).reshape(x.shape)
