"""Routing: the experts of each token, and their weights."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models.config import Experts
from jaxkv.models.layers.linear import linear, with_rank
from jaxkv.ops.routing import select_experts


def route(config: Experts, weights, x, ids=None) -> tuple[jax.Array, jax.Array]:
    """The chosen experts of tokens x [T, hidden], int32 [T, per_token], and their weights, float32 of that shape.

    `ids`, int32 [T], are the ids of the tokens, by which the first layers of V4 choose.
    """
    logits = linear(x.astype(jnp.float32), weights["router"])
    if "logit_bias" in weights:  # GPT-OSS
        logits = logits + with_rank(weights["logit_bias"], logits.ndim)
    if config.scoring == "sqrtsoftplus":
        return _route_v4(config, weights, logits, ids)
    return select_experts(
        logits,
        config.per_token,
        bias=weights.get("router_bias"),
        scoring=config.scoring,
        groups=config.groups,
        groups_per_token=config.groups_per_token,
        normalize=config.normalize,
        scale=config.scale,
    )


def _route_v4(config: Experts, weights, logits, ids):
    """The routing of DeepSeek-V4: the score of an expert is the square root of the softplus of its logit.

    In the first layers, a table has the experts of each token id.  In the others, a bias per expert is added to the
    scores for the choice, but not for the weights.
    """
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if "experts_of_ids" in weights:
        experts = weights["experts_of_ids"][ids]
    else:
        experts = lax.top_k(scores + with_rank(weights["router_bias"], scores.ndim), config.per_token)[1]
    share = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize:
        share = share / (share.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, share * config.scale
