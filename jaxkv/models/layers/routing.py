"""Routing: the experts of each token, and their weights."""

import jax
import jax.numpy as jnp

from jaxkv.models.config import Experts
from jaxkv.models.layers.linear import linear, with_rank
from jaxkv.ops.routing import select_experts
from jaxkv_kernels.xla.experts import SCORES, weights_of


def route(config: Experts, weights, x, ids=None) -> tuple[jax.Array, jax.Array]:
    """The chosen experts of tokens x [T, hidden], int32 [T, per_token], and their weights, float32 of that shape.

    In the first layers of V4, a table has the experts of each token id; `ids` are int32 [T].
    """
    logits = linear(x.astype(jnp.float32), weights["router"])
    if "logit_bias" in weights:  # GPT-OSS
        logits = logits + with_rank(weights["logit_bias"], logits.ndim)
    if "experts_of_ids" in weights:
        experts, scores = weights["experts_of_ids"][ids], SCORES[config.scoring](logits)
        return experts, weights_of(scores, experts, normalize=config.normalize, scale=config.scale)
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
