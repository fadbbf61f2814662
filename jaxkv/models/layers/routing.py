"""Routing: the experts of each token, and their weights."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models.config import Experts
from jaxkv.models.layers.linear import linear, with_rank

SCORES = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}
"""The scores of experts, by `Experts.scoring`."""


def route(config: Experts, weights, x, ids=None) -> tuple[jax.Array, jax.Array]:
    """The chosen experts of tokens x [T, hidden], int32 [T, per_token], and their weights, float32 of that shape.

    V2 (arXiv 2405.04434, section 2.1) uses softmax scores.  V3 (arXiv 2412.19437, section 2.1.2) uses sigmoid scores,
    and V4 the square root of their softplus.  In the first layers of V4, a table has the experts of each token id;
    `ids` are int32 [T].  A bias per expert, if the model has one, balances the load: it is added to the scores for the
    choice of experts, but not for their weights.  With groups, only experts of the best groups may be chosen; the score
    of a group is that of its best expert (V2), or the sum of its two best (V3).  Logits of GPT-OSS have a bias.
    """
    logits = linear(x.astype(jnp.float32), weights["router"])
    if "logit_bias" in weights:
        logits = logits + with_rank(weights["logit_bias"], logits.ndim)
    scores = SCORES[config.scoring](logits)
    experts = weights["experts_of_ids"][ids] if "experts_of_ids" in weights else _chosen(config, weights, scores)
    share = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize:
        share = share / (share.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, share * config.scale


def _chosen(config: Experts, weights, scores):
    """The best experts of tokens, int32 [T, per_token], by scores [T, E]."""
    bias = weights.get("router_bias")
    choice = scores if bias is None else scores + with_rank(bias, scores.ndim)
    if config.groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], config.groups, -1)
        leaders = 1 if config.scoring == "softmax" else 2
        kept = _best(lax.top_k(grouped, leaders)[0].sum(axis=-1), config.groups_per_token)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    return lax.top_k(choice, config.per_token)[1]


def _best(scores, k: int):
    """A mask, bool [..., n], of the k largest of `scores` [..., n]."""
    _, best = lax.top_k(scores, k)
    experts = with_rank(jnp.arange(scores.shape[-1]), best.ndim + 1)
    return (best[..., None] == experts).any(axis=-2)
