"""Merging the results of attention over disjoint sets of keys, for the same queries."""

import jax
import jax.numpy as jnp
from jax import lax


@jax.jit
def merge_states(outs, lses):
    """Merges outs [N, ..., D] with lses [N, ...]: out [..., D] and float32 lse [...]."""
    # Some kernels return +inf or NaN for a part without keys.  Replace it by -inf, so that the part has no weight,
    # whatever it holds.
    lses = jnp.where(lses < jnp.inf, lses.astype(jnp.float32), -jnp.inf)
    # The maximum cancels out of the result, so its gradient is 0.
    top = lax.stop_gradient(lses).max(axis=0)
    empty = top == -jnp.inf
    weights = jnp.exp(lses - jnp.where(empty, 0, top))
    # Mask before the product, because 0 * NaN is NaN, also in the gradient of the weights.
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0)
    total, merged = weights.sum(axis=0), (parts * weights[..., None]).sum(axis=0)
    merged = merged / jnp.where(empty, 1, total)[..., None]
    return merged.astype(outs.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
