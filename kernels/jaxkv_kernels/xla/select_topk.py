"""The positions of the k largest logits."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.jit, static_argnames="k")
def select_topk(logits, *, k):
    """Logits [..., N] to int32 positions [..., k], largest first, the earlier position where equal; -1 for -inf."""
    best = min(k, logits.shape[-1])
    # top_k orders -0 below 0, but they are equal, and relu makes both; and NaN by its sign, which differs by device.
    logits = jnp.where(jnp.isnan(logits), jnp.nan, jnp.where(logits == 0, 0.0, logits))
    values, positions = lax.top_k(logits, best)
    positions = jnp.where(values == -jnp.inf, -1, positions)
    return jnp.pad(positions, [(0, 0)] * (logits.ndim - 1) + [(0, k - best)], constant_values=-1)
