"""Combines partial attentions of the same queries over disjoint keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@jax.jit
def merge_states(outs, lses):
    """Outs [N, ..., D], lses [N, ...] to out [..., D] and float32 lse [...]."""
    return jax.vmap(partial(merge_over, axis="parts"), axis_name="parts", out_axes=None)(outs, lses)


def merge_over(out, lse, axis):
    """The same of one part for each index of a named axis: out [..., D], lse [...]."""
    # Some kernels say "no keys" with +inf or NaN; here it is -inf, and such a part weighs nothing, whatever it holds.
    lse = jnp.where(lse < jnp.inf, lse.astype(jnp.float32), -jnp.inf)
    # The maximum cancels, so it has no gradient.
    top = lax.pmax(lax.stop_gradient(lse), axis)
    empty = top == -jnp.inf
    weight = jnp.exp(lse - jnp.where(empty, 0, top))
    part = jnp.where(weight[..., None] > 0, out.astype(jnp.float32) * weight[..., None], 0)
    total, merged = lax.psum((weight, part), axis)
    merged = merged / jnp.where(empty, 1, total)[..., None]
    return merged.astype(out.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
