"""The programs that the engine runs on the device.

A step is one program: all layers, and the most likely token of each row.  If tokens are drawn at random, a second one
draws them from the same logits, because it sorts the vocabulary.  Steps with requests that have log probabilities run
one more, `logprobs`.

The host knows which of them a step needs.  A branch on the device (`lax.cond`) would make the host wait until the
branch is reached before it can launch the rest: on an H200, a step of 256 requests and 512 prompt tokens of
DeepSeek-V2-Lite took 26 ms with such a branch, and takes 16 without.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models import sampling
from jaxkv.models.decoder import step
from jaxkv.models.model import Model
from jaxkv.models.split_cache import SplitCache
from jaxkv.serving.request import TokenLogprobs
from jaxkv.serving.step_inputs import Bundle, Choices, StepBatches

MAX_LOGPROBS = 20
"""The most tokens per position whose log probabilities a request can have; the program computes as many."""


class Found(NamedTuple):
    """What a step found, one row per span."""

    logits: Any
    """float32 [B, V], after the last token of each row."""
    tokens: Any
    """int32 [B], the most likely token of each row; -1 if its logits are NaN."""


def run_layers(model: Model, cache: Any, last, inputs: Bundle[StepBatches]) -> tuple[Any, jax.Array, Found]:
    """Runs the layers, and chooses the most likely token of each row.

    Args:
      model: the model.
      cache: its cache, a KVCache or a SplitCache.
      last: int32 [places], the last token of each running request.
      inputs: the batches.

    Returns:
      The cache, and `last` with the tokens of rows that sample one; and what was found of the rows of all batches.
    """
    batches = inputs.arrays().present
    if isinstance(cache, SplitCache):
        cache = replace(
            cache, places=tuple(batch.places if batch.staging is None else batch.staging for batch in batches)
        )
    cache, logits = step(model, cache, *[batch.new_tokens(last) for batch in batches])
    if isinstance(cache, SplitCache):
        cache = replace(cache, places=())
    tokens = sampling.likeliest(logits)
    return cache, _kept(tokens, last, jnp.concatenate([batch.places for batch in batches])), Found(logits, tokens)


def draw(logits, last, bundle: Bundle[Choices]) -> tuple[jax.Array, jax.Array]:
    """`last` and the tokens of a step, with tokens that are drawn at random in rows whose temperature is not 0."""
    choices = bundle.arrays()
    # The position of the next token is the length so far, so its random numbers do not depend on the step or the row.
    tokens = sampling.draw(logits, choices.sampling, choices.lengths)
    return _kept(tokens, last, choices.places), tokens


def _kept(tokens, last, places) -> jax.Array:
    return last.at[places].set(tokens, mode="drop")


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities, of the tokens after each row."""

    sampled: Any
    """float32 [B], of the sampled token."""
    top: Any
    """float32 [B, K], of the most likely tokens, in descending order."""
    top_tokens: Any
    """int32 [B, K], these tokens; of equal probabilities, the lower ids come first."""

    def of_row(self, row: int, count: int) -> TokenLogprobs:
        """Those of one row, with `count` most likely tokens, if the fields are lists that the host has read."""
        return TokenLogprobs(self.sampled[row], list(zip(self.top_tokens[row], self.top[row], strict=True))[:count])


def logprobs(logits, tokens) -> Logprobs:
    """The log probabilities, before temperature and filters, of the sampled `tokens`, int32 [B], and of the most likely
    ones, given the logits [B, V]."""
    logits = logits.astype(jnp.float32)
    top, top_tokens = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    largest = top[:, :1]
    total = jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True))
    sampled = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)  # -1 if the logits are NaN
    return Logprobs((sampled - largest - total)[:, 0], top - largest - total, top_tokens)
