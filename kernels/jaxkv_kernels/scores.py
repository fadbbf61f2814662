"""Rules that all implementations share: logit caps (cap * tanh(score / cap)), attention sinks, merging of results."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

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


def merged(result, other) -> tuple[jax.Array, jax.Array]:
    """Merges two results (out, lse) in float32.  One without keys has out 0 and lse -inf.

    `merge_states` is not used, because it treats a NaN in `lse`, which a NaN in the cache causes, as no keys.
    """
    (out, lse), (other_out, other_lse) = result, other
    empty = (lse == -jnp.inf) & (other_lse == -jnp.inf)
    top = jnp.logaddexp(*(jnp.where(empty, 0, x) for x in (lse, other_lse)))  # that of -inf and -inf has no gradient
    weight, other_weight = (jnp.exp(x - top)[..., None] for x in (lse, other_lse))
    return out * weight + other_out.astype(out.dtype) * other_weight, jnp.where(empty, -jnp.inf, top)
