"""Feed-forward: dense, and a mixture of experts beside a shared one."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models.config import Experts
from jaxkv.models.layers import linear
from jaxkv.models.routing import route

ROWS_BY_OUT_IN = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
"""Rows [T, in], sorted by group, through weights [groups, out, in]."""


def dense(weights, x) -> jax.Array:
    """SwiGLU: x [..., hidden] to [..., hidden]."""
    return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])


def mixture(config: Experts, weights, x) -> jax.Array:
    """Each token's experts, weighted, plus the shared expert: x [B, Q, hidden] to [B, Q, hidden]."""
    rows = x.reshape(-1, x.shape[-1])
    share, chosen = route(config, weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=config.count).astype(jnp.int32)
    out = _experts(weights["experts"], rows[order // config.per_token], sizes)
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*chosen.shape, -1)
    out = (out * share[..., None].astype(out.dtype)).sum(axis=1)
    return out.reshape(x.shape) + dense(weights["shared"], x)


def _experts(weights, rows, sizes):
    """`dense` of rows [T, hidden], sorted by expert, `sizes` [experts] rows each."""

    def through(x, weight):
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return lax.ragged_dot_general(x, weight, sizes, ROWS_BY_OUT_IN, precision=precision)

    return through(jax.nn.silu(through(rows, weights["gate"])) * through(rows, weights["up"]), weights["down"])
