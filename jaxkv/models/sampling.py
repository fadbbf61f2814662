"""From logits to tokens: greedy, temperature, top-p."""

import numbers
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing.integers import as_int

MOST = float(jnp.finfo(jnp.float32).max)
"""Temperatures are float32 on the device."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Args:
      temperature: logits are divided by it before the softmax; 0 selects the most likely token (greedy).  A number that
        is finite in float32.
      top_p: draw from the smallest set of most likely tokens whose probabilities sum to at least this value (nucleus
        sampling, arXiv:1904.09751); 1 draws from all tokens.
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
      temperature: float32 [B], 0 for greedy.
      top_p: float32 [B].
      seeds: uint32 [B].
      positions: int32 [B], the position of the sampled token in its request; each position has its own random numbers.

    Returns:
      int32 [B], the token of each row; -1 if one of the row's logits is NaN.
    """
    options = temperature, top_p, seeds, positions
    return lax.cond(jnp.any(temperature > 0), draw, lambda logits, *_: likeliest(logits), logits, *options)


def likeliest(logits) -> jax.Array:
    """The most likely token of each row of logits [B, V], int32 [B]; -1 if one of the row's logits is NaN."""
    logits = logits.astype(jnp.float32)
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def draw(logits, temperature, top_p, seeds, positions) -> jax.Array:
    """The same as `sample`, but always sorts the vocabulary."""
    logits = logits.astype(jnp.float32)
    drawn = jax.vmap(_draw)(logits, jnp.where(temperature > 0, temperature, 1), top_p, seeds, positions)
    found = likeliest(logits)
    return jnp.where((temperature > 0) & (found >= 0), drawn, found)


def _draw(logits, temperature, top_p, seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    likeliest, tokens = lax.top_k(logits / temperature, logits.shape[-1])
    p = jax.nn.softmax(likeliest)
    before = jnp.cumsum(p) - p
    # Keep the most likely token, however the sum of probabilities is rounded.
    kept = (before < top_p).at[0].set(True)
    return tokens[jax.random.categorical(key, jnp.where(kept, likeliest, -jnp.inf))]
