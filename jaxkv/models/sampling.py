"""From logits to tokens: greedy, temperature, min-p, top-k, top-p."""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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

    Logits are divided by the temperature.  Then `min_p`, `top_k` and `top_p` remove tokens, in this order, which is
    that of vLLM 0.26, and the token is drawn from those that remain.  Of tokens with equal logits, those of lower ids
    count as more likely.

    Args:
      temperature: logits are divided by it before the softmax; 0, or a number below 2**-126, selects the most likely
        token (greedy), whatever the other options are.  A number that is finite in float32.
      top_k: draw from so many most likely tokens; 0 draws from all.
      top_p: draw from the smallest set of most likely tokens whose probabilities sum to at least this value (nucleus
        sampling, arXiv:1904.09751).  The probabilities are those after `min_p` and `top_k`, which sum to 1; with 1, no
        token is removed, however small its probability is.
      min_p: draw from the tokens whose probability is at least this fraction of that of the most likely token
        (arXiv:2407.01082); 0 draws from all.
      seed: an int, 0 to 2**32 - 1.  A request's random numbers depend on its seed, not on the other requests in the
        batch.

    Raises:
      ValueError: an argument is out of range or not a number (a bool is rejected), or `top_k` or `seed` is not an int.
    """

    temperature: float = 0.0
    top_k: int = field(default=0, kw_only=True)
    top_p: float = 1.0
    min_p: float = field(default=0.0, kw_only=True)
    seed: int = 0

    def __post_init__(self):
        if not (_is_real(self.temperature) and 0 <= self.temperature <= MOST):
            raise ValueError(
                f"`temperature` is {self.temperature!r}: expected a finite number, 0 (greedy) to {MOST:.3g}"
            )
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"`top_p` is {self.top_p!r}: expected more than 0, at most 1")
        if not (_is_real(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"`min_p` is {self.min_p!r}: expected 0 (all tokens) to 1")
        for name, most, meaning in (
            ("top_k", 2**31 - 1, "0 (all tokens) to 2**31 - 1"),
            ("seed", 2**32 - 1, "0 to 2**32 - 1"),
        ):
            value = as_int(getattr(self, name))
            if value is None or not 0 <= value <= most:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}: expected an int, {meaning}")
            object.__setattr__(self, name, value)


class SamplingBatch(NamedTuple):
    """The `Sampling` of each of B rows, as arrays."""

    temperature: Any
    """float32 [B]."""
    top_k: Any
    """int32 [B]."""
    top_p: Any
    """float32 [B]."""
    min_p: Any
    """float32 [B]."""
    seeds: Any
    """uint32 [B]."""

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> "SamplingBatch":
        """NumPy arrays with one row for each of `samplings`."""
        return cls(
            temperature=np.asarray([sampling.temperature for sampling in samplings], np.float32),
            top_k=np.asarray([sampling.top_k for sampling in samplings], np.int32),
            top_p=np.asarray([sampling.top_p for sampling in samplings], np.float32),
            min_p=np.asarray([sampling.min_p for sampling in samplings], np.float32),
            seeds=np.asarray([sampling.seed for sampling in samplings], np.uint32),
        )


def _is_real(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def sample(logits, sampling: SamplingBatch, positions) -> jax.Array:
    """Samples one token per row.

    The vocabulary is sorted only if a row needs it, which is decided on the device.  On GPUs, the host waits for that
    decision.

    Args:
      logits: float [B, V].
      sampling: how each row's token is chosen; temperatures below 2**-126 are greedy.
      positions: int32 [B], the position of the sampled token in its request; each position has its own random numbers.

    Returns:
      int32 [B], the token of each row; -1 if one of the row's logits is NaN.
    """
    at_random = jnp.any(sampling.temperature >= LEAST)
    return lax.cond(at_random, draw, lambda logits, *_: likeliest(logits), logits, sampling, positions)


def likeliest(logits) -> jax.Array:
    """The most likely token of each row of logits [B, V], int32 [B]; -1 if one of the row's logits is NaN."""
    logits = logits.astype(jnp.float32)
    # Comparisons of floats would take subnormal logits for zeros on CPUs.
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, jnp.argmax(ordered_bits(logits), axis=-1).astype(jnp.int32))


def draw(logits, sampling: SamplingBatch, positions) -> jax.Array:
    """The same as `sample`, but always sorts the vocabulary."""
    logits = logits.astype(jnp.float32)
    at_random = sampling.temperature >= LEAST
    sampling = sampling._replace(temperature=jnp.where(at_random, sampling.temperature, 1))
    drawn = jax.vmap(_draw)(logits, sampling, positions)
    found = likeliest(logits)
    return jnp.where(at_random & (found >= 0), drawn, found)


def _draw(logits, sampling: SamplingBatch, position):
    scaled, tokens = remaining(logits, sampling)
    key = jax.random.fold_in(jax.random.key(sampling.seeds), position)
    return tokens[jax.random.categorical(key, scaled)]


def remaining(logits, sampling: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """The tokens of a row that may be drawn, given its logits, float32 [V], and its options, which are scalars.

    Returns:
      - float32 [V], logits divided by the temperature, up to a constant, in descending order; -inf for tokens that
        `min_p`, `top_k` or `top_p` removes, which are the last ones.
      - int32 [V], the tokens in this order.
    """
    size = logits.shape[-1]
    descending, tokens = lax.top_k(logits, size)
    scaled = _below_largest(descending, sampling.temperature)
    kept = (jnp.exp(scaled) >= sampling.min_p) & (descending > -jnp.inf)
    kept &= (jnp.arange(size, dtype=jnp.int32) < sampling.top_k) | (sampling.top_k == 0)
    p = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
    before = jnp.cumsum(p) - p
    # The sum of all probabilities, as it is rounded, may reach 1 before the last of them.
    kept &= (before < sampling.top_p) | (sampling.top_p >= 1)
    kept = kept.at[0].set(True)  # the most likely token, however the sum is rounded, and if all logits are -inf
    return jnp.where(kept, scaled, -jnp.inf), tokens


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
