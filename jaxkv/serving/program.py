"""The programs that the engine runs on the device.

A step is two programs: all layers, and the choice of the next tokens.  Steps with requests that have log probabilities
run a third one, `logprobs`.

The second one exists without random numbers too, because drawing tokens sorts the vocabulary.  The host knows which of
them a step needs.  A branch on the device
(`lax.cond`) would make the host wait until the branch is reached before it can launch the rest: on an H200, a step of
256 requests and 512 prompt tokens of DeepSeek-V2-Lite took 26 ms with such a branch, and takes 16 without.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.models import sampling
from jaxkv.models.decoder import step
from jaxkv.models.model import Model
from jaxkv.serving.request import TokenLogprobs
from jaxkv.serving.step_inputs import Bundle, Choices, InputBatch

MAX_LOGPROBS = 20
"""The most tokens per position whose log probabilities a request can have; the program computes as many."""


def run_layers(model: Model, cache: KVCache, last, inputs: Bundle[list[InputBatch]]) -> tuple[KVCache, jax.Array]:
    """The cache and the logits of each row of all batches, given the last tokens of running requests by place."""
    return step(model, cache, *[batch.new_tokens(last) for batch in inputs.arrays()])


def likeliest(logits, last, bundle: Bundle[Choices]) -> tuple[jax.Array, jax.Array]:
    """The last tokens after the step, and the most likely token of each row, int32; -1 if its logits are NaN."""
    return _kept(sampling.likeliest(logits), last, bundle.arrays())


def draw(logits, last, bundle: Bundle[Choices]) -> tuple[jax.Array, jax.Array]:
    """The same with tokens that are drawn at random in rows whose temperature is not 0."""
    choices = bundle.arrays()
    # The position of the next token is the length so far, so its random numbers do not depend on the step or the row.
    return _kept(sampling.draw(logits, choices.sampling, choices.lengths), last, choices)


def _kept(tokens, last, choices: Choices) -> tuple[jax.Array, jax.Array]:
    return last.at[choices.places].set(tokens, mode="drop"), tokens


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
