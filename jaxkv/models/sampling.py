"""From logits to tokens: greedy, temperature, top-p."""

import numbers
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.formats.bits import ordered_bits
from jaxkv_kernels.integers import as_int

MOST = float(jnp.finfo(jnp.float32).max)
"""Temperatures are float32 on the device."""
LEAST = float(jnp.finfo(jnp.float32).tiny)
"""The smallest temperature at which tokens are drawn.  Devices may take smaller numbers, which are subnormal, for 0."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Args:
      temperature: logits are divided by it before the softmax; 0, or a number below 2**-126, selects the most likely
        token (greedy).  A number that is finite in float32.
      top_p: draw from the smallest set of most likely tokens whose probabilities sum to at least this value (nucleus
        sampling, arXiv:1904.09751); 1 draws from all tokens, however small their probabilities are.
      seed: an int, 0 to 2**32 - 1.  A request's random numbers depend on its seed, not on the other requests in the
        batch.

    Raises:
      ValueError: an argument is out of range or not a number (a bool is rejected), or `seed` is not an int.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (_is_real(self.temperature) and 0 <= self.temperature <= MOST):
            raise ValueError(
                f"`temperature` is {self.temperature!r}: expected a finite number, 0 (greedy) to {MOST:.3g}"
            )
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"`top_p` is {self.top_p!r}: expected more than 0, at most 1")
        seed = as_int(self.seed)
        if seed is None or not 0 <= seed < 2**32:
            raise ValueError(f"`seed` is {self.seed!r}: expected an int, 0 to 2**32 - 1")
        object.__setattr__(self, "seed", seed)


def _is_real(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def sample(logits, temperature, top_p, seeds, positions) -> jax.Array:
    """Samples one token per row.

    The vocabulary is sorted only if a row needs it, which is decided on the device.  On GPUs, the host waits for that
    decision.

    Args:
      logits: float [B, V].
      temperature: float32 [B], 0 (or less than 2**-126) for greedy.
      top_p: float32 [B].
      seeds: uint32 [B].
      positions: int32 [B], the position of the sampled token in its request; each position has its own random numbers.

    Returns:
      int32 [B], the token of each row; -1 if one of the row's logits is NaN.
    """
    options = temperature, top_p, seeds, positions
    return lax.cond(jnp.any(temperature >= LEAST), draw, lambda logits, *_: likeliest(logits), logits, *options)


def likeliest(logits) -> jax.Array:
    """The most likely token of each row of logits [B, V], int32 [B]; -1 if one of the row's logits is NaN."""
    logits = logits.astype(jnp.float32)
    # Comparisons of floats would take subnormal logits for zeros on CPUs.
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, jnp.argmax(ordered_bits(logits), axis=-1).astype(jnp.int32))


def draw(logits, temperature, top_p, seeds, positions) -> jax.Array:
    """The same as `sample`, but always sorts the vocabulary."""
    logits = logits.astype(jnp.float32)
    at_random = temperature >= LEAST
    drawn = jax.vmap(_draw)(logits, jnp.where(at_random, temperature, 1), top_p, seeds, positions)
    found = likeliest(logits)
    return jnp.where(at_random & (found >= 0), drawn, found)


def _draw(logits, temperature, top_p, seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    likeliest, tokens = lax.top_k(logits, logits.shape[-1])
    scaled = _below_largest(likeliest, temperature)
    p = jax.nn.softmax(scaled)
    before = jnp.cumsum(p) - p
    # The sum of all probabilities, as it is rounded, may reach 1 before the last of them.
    kept = ((before < top_p) | (top_p >= 1)) & (likeliest > -jnp.inf)
    kept = kept.at[0].set(True)  # the most likely token, however the sum is rounded, and if all logits are -inf
    return tokens[jax.random.categorical(key, jnp.where(kept, scaled, -jnp.inf))]


def _below_largest(descending, temperature):
    """(logits - largest) / temperature, for logits [V] in descending order; 0 for those that equal the largest.

    The quotients of the logits themselves would overflow at low temperatures.  At temperatures above 1, all numbers are
    divided by 4, so that neither the difference of large logits overflows, nor the inverse of the temperature is
    subnormal.
    """
    unit = jnp.where(temperature > 1, 0.25, 1)
    largest = descending[0]
    difference = jnp.where(descending == largest, 0, descending * unit - largest * unit)
    return difference / (temperature * unit)
