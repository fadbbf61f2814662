"""Which experts a token goes to, and with what weights."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models.config import Experts
from jaxkv.models.layers import linear


def route(config: Experts, weights, x) -> tuple[jax.Array, jax.Array]:
    """x [T, hidden] to (weights float32 [T, per_token], experts int32 [T, per_token]).

    V2 (arXiv 2405.04434, 2.1): softmax scores.  V3 (arXiv 2412.19437, 2.1.2): sigmoid scores; a bias a expert, which
    balances the load, takes part in the choice and not in the weights.  With groups, only experts of the best
    groups may be chosen: a group is as good as its best expert (V2), or as its two best together (V3).
    """
    logits = linear(x.astype(jnp.float32), weights["router"])
    if config.scoring == "softmax":
        scores, choice, leaders = jax.nn.softmax(logits), jax.nn.softmax(logits), 1
    else:
        scores, leaders = jax.nn.sigmoid(logits), 2
        choice = scores + weights["router_bias"]
    if config.groups > 1:
        choice = _best_groups(config, choice, leaders)
    _, chosen = lax.top_k(choice, config.per_token)
    share = jnp.take_along_axis(scores, chosen, axis=1)
    if config.normalize:
        share = share / (share.sum(axis=1, keepdims=True) + 1e-20)
    return share * config.scale, chosen


def _best_groups(config: Experts, choice, leaders: int):
    """`choice` with -inf for experts outside each token's best groups."""
    grouped = choice.reshape(len(choice), config.groups, -1)
    group_scores = lax.top_k(grouped, leaders)[0].sum(axis=-1)
    _, best = lax.top_k(group_scores, config.groups_per_token)
    kept = (best[:, :, None] == jnp.arange(config.groups)).any(axis=1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
