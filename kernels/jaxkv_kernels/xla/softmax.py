"""Attention over chunks of keys with an online softmax, shared by the decode operations."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.scores import capped
from jaxkv_kernels.xla.paged import walk

MASKED = -jnp.inf
"""Score of a masked key.  Its weight is exp(-inf) = 0, because the running max is always finite."""
EMPTY = float(jnp.finfo(jnp.float32).min)
"""Running max of a row that has seen no key.  No finite score is lower, so only masked keys are ignored."""

Chunk = tuple[jax.Array, jax.Array, jax.Array]


def attend(
    q: jax.Array,
    load: Callable[[jax.Array], Chunk],
    first,
    last,
    *,
    value_dim: int,
    scale: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    logit_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax attention of `q` [B, Q, H, G, D] (G query heads per KV head) over the chunks i with first <= i < last.

    `load(i)` returns K [B, S, H, D], V [B, S, H, value_dim] and a mask of the keys that each query token sees, bool [B,
    Q, S].  Keys that a query token does not see have no influence on its result, even if they hold NaN.  Keys that no
    query token sees have no influence on gradients, either.  In a scaled format, K and V are the stored values, which a
    narrow dtype represents exactly.  Their scales (scalars or [H]) multiply scores and results in float32.

    Returns:
      out float32 [B, Q, H, G, value_dim], lse and the largest score float32 [B, Q, H, G]; 0, -inf and -inf for a query
      that saw no key.
    """
    # Products of float32 entries must not be rounded to tf32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    if k_scale is not None:
        scale = scale * jnp.reshape(k_scale, (-1, 1, 1))

    def step(i, state):
        running_max, row_sum, acc = state
        k, v, seen = load(i)
        # Mask before the products, because 0 * NaN is NaN, also in gradients.
        seen_at_all = seen.any(axis=1)[:, :, None, None]
        k, v = jnp.where(seen_at_all, k, 0), jnp.where(seen_at_all, v, 0)
        s = jnp.einsum("bqhgd,bshd->bqhgs", q, k, precision=precision, preferred_element_type=jnp.float32) * scale
        if logit_cap is not None:
            s = capped(s, logit_cap)
        s = jnp.where(seen[:, :, None, None, :], s, MASKED)
        new_max = jnp.maximum(running_max, s.max(axis=-1))
        p = jnp.exp(s - new_max[..., None])
        rescale = jnp.exp(running_max - new_max)
        pv = sums_of_seen(p.astype(v.dtype), v, seen, precision)
        return new_max, row_sum * rescale + p.sum(axis=-1), acc * rescale[..., None] + pv

    rows = q.shape[:-1]
    state = (
        jnp.full(rows, EMPTY, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, value_dim), jnp.float32),
    )
    # If nothing but the loop needed the first state, XLA would make those of all layers when a program starts.
    state, q = jax.lax.optimization_barrier((state, q))
    running_max, row_sum, acc = walk(first, last, step, state)
    empty = row_sum == 0
    out = acc / jnp.where(empty, 1, row_sum)[..., None]
    if v_scale is not None:
        out = out * jnp.reshape(v_scale, (-1, 1, 1))
    largest = jnp.where(empty, -jnp.inf, running_max)
    return out, largest + jnp.log(jnp.where(empty, 1, row_sum)), largest


def sums_of_seen(p, v, seen, precision):
    """Sums [B, Q, H, G, V] of values `v` [B, S, H, V], weighted by `p` [B, Q, H, G, S], which is 0 where not `seen`.

    `seen` is bool [B, Q, S].  Infinities and NaN in values only reach query tokens that see them.  The values of keys
    that no query token sees must be 0.
    """
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    if seen.shape[1] == 1:
        return product("bqhgs,bshv->bqhgv", p, v)
    finite = jnp.isfinite(v)
    sums = product("bqhgs,bshv->bqhgv", p, jnp.where(finite, v, 0))

    def with_the_rest(sums):
        def rest(query):
            p, seen = query
            return product("bhgs,bshv->bhgv", p, jnp.where(seen[:, :, None, None] & ~finite, v, 0))

        # One query token at a time, because each needs its own masked copy of the values.
        return sums + jnp.moveaxis(lax.map(rest, (jnp.moveaxis(p, 1, 0), jnp.moveaxis(seen, 1, 0))), 0, 1)

    return lax.cond(finite.all(), lambda sums: sums, with_the_rest, sums)
