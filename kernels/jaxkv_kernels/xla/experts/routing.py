"""The experts of each token, and their weights."""

import jax
import jax.numpy as jnp
from jax import lax

SCORES = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}
"""The scores of experts, from their logits [T, E]."""


def select_experts(logits, bias, *, per_token, scoring, groups, groups_per_token, normalize, scale):
    """The choices [T, K] of tokens with logits [T, E], and their weights."""
    scores, leaders = SCORES[scoring](logits), 1 if scoring == "softmax" else 2
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.reshape(len(choice), groups, choice.shape[1] // groups)
        kept = _best(lax.top_k(grouped, leaders)[0].sum(axis=-1), groups_per_token)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = lax.top_k(choice, per_token)
    return experts, weights_of(scores, experts, normalize=normalize, scale=scale)


def weights_of(scores, experts, *, normalize, scale) -> jax.Array:
    """The weights [T, K] of experts [T, K], from the scores [T, E] of all."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * scale


def _best(scores, k: int):
    """A mask, bool [T, n], of the k largest of `scores` [T, n]."""
    _, best = lax.top_k(scores, k)
    return (best[..., None] == jnp.arange(scores.shape[-1])).any(axis=-2)
