"""Rules that all implementations share: logit caps (cap * tanh(score / cap)), attention sinks, merging of results."""

from collections.abc import Iterator, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

CHUNK_TOKENS = 512
"""Keys per step, rounded up to whole blocks.  They limit the temporary memory of a decode."""

LARGEST_BY_POWERS = 64
"""The largest cap of kernels that compute tanh from a power of two.

Near 1, the power has errors of about 2**-23, which the cap multiplies.  With a cap of 64, the relative error of softmax
weights is at most 2**-17.
"""


def capped(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap), exact to a few roundings if the cap and its inverse are normal float32 numbers."""
    # Below this limit, tanh(x) rounds to x in float32.  Return the score itself, because its quotient by a large cap
    # may underflow.
    return jnp.where(jnp.abs(scores) < cap * 2.0**-13, scores, cap * jnp.tanh(scores / cap))


def too_large(cap: float | None) -> Iterator[str]:
    """Yields a reason if the cap is too large for kernels that compute tanh from a power of two."""
    if cap is not None and cap > LARGEST_BY_POWERS:
        yield f"`logit_cap` of {cap}: supports at most {LARGEST_BY_POWERS}, because of the error of its tanh"


def with_sinks(out, lse, sinks) -> jax.Array:
    """`out` [..., H, V] multiplied by exp(lse) / (exp(lse) + exp(sink)), the weight that keys keep beside sinks.

    `lse` is [..., H] and `sinks` [H].
    """
    sinks = jnp.broadcast_to(sinks, lse.shape)
    share = jax.nn.sigmoid(jnp.where(lse == -jnp.inf, 0, lse) - sinks)  # rows without keys must not compute inf - inf
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


def merged(parts: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Merges the results (out, lse) of attention to one or several disjoint sets of keys, in float32.

    One without keys has out 0 and lse -inf.  NaN in one makes the result NaN, as it does within one.  `merge_states`
    is not used, because it treats a NaN in `lse`, which a NaN in the cache causes, as no keys.
    """
    if len(parts) == 1:
        return parts[0]
    # Without an array of all parts, so that XLA fuses all of this.
    lses = [lse for _, lse in parts]
    top = reduce(jnp.maximum, map(lax.stop_gradient, lses))
    weights = [jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top)) for lse in lses]
    total = reduce(jnp.add, weights)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    terms = (out.astype(jnp.float32) * weight[..., None] for (out, _), weight in zip(parts, weights, strict=True))
    return reduce(jnp.add, terms) / total[..., None], jnp.where(empty, -jnp.inf, top + jnp.log(total))
