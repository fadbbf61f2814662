"""Logit caps: scores become cap * tanh(score / cap)."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

LARGEST_BY_POWERS = 64
"""The largest cap of kernels that compute tanh from a power of two.

Near 1 that power has errors of some 2**-23, which the cap multiplies: at 64, weights are off by 2**-17 at most.
"""


def capped(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap), exact to a few roundings for every cap that float32 holds together with its inverse."""
    # Where tanh(x) is x in float32, the score itself: its quotient by a large cap may vanish.
    return jnp.where(jnp.abs(scores) < cap * 2.0**-13, scores, cap * jnp.tanh(scores / cap))


def too_large(options: Mapping[str, Any]) -> Iterator[str]:
    """The reason against a call of kernels that compute tanh from a power of two, where its cap is too large for it."""
    cap = options.get("logit_cap")
    if cap is not None and cap > LARGEST_BY_POWERS:
        yield f"`logit_cap` of {cap}: supports at most {LARGEST_BY_POWERS}, beyond which errors of tanh would show"
