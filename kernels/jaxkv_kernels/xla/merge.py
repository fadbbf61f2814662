"""Combines partial attentions of the same queries over disjoint keys."""

import jax
import jax.numpy as jnp
from jax import lax


@jax.jit
def merge_states(outs, lses):
    """Outs [N, ..., D], lses [N, ...] to out [..., D] and float32 lse [...]."""
    # Some kernels say "no keys" with +inf or NaN; here it is -inf, and such a part weighs nothing, whatever it holds.
    lses = jnp.where(lses < jnp.inf, lses.astype(jnp.float32), -jnp.inf)
    # The maximum cancels, so it has no gradient.
    top = lax.stop_gradient(lses).max(axis=0)
    empty = top == -jnp.inf
    weights = jnp.exp(lses - jnp.where(empty, 0, top))
    # Before the product: 0 x NaN is NaN, in the gradient of the weights as well.
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0)
    total, merged = weights.sum(axis=0), (parts * weights[..., None]).sum(axis=0)
    merged = merged / jnp.where(empty, 1, total)[..., None]
    return merged.astype(outs.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
