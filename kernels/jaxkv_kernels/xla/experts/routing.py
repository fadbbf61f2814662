"""The experts of each token, and their weights."""

import jax
import jax.numpy as jnp
from jax import lax


def select_experts(logits, bias, *, per_token, scoring, groups, groups_per_token, normalize, scale):
    """The choices [T, K] of tokens with logits [T, E], and their weights."""
    scores, leaders = (jax.nn.softmax(logits), 1) if scoring == "softmax" else (jax.nn.sigmoid(logits), 2)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.reshape(len(choice), groups, -1)
        kept = _best(lax.top_k(grouped, leaders)[0].sum(axis=-1), groups_per_token)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = lax.top_k(choice, per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, weights * scale


def _best(scores, k: int):
    """A mask, bool [T, n], of the k largest of `scores` [T, n]."""
    _, best = lax.top_k(scores, k)
    return (best[..., None] == jnp.arange(scores.shape[-1])).any(axis=-2)
