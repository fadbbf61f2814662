"""The programs that the engine runs on the device.

A step is two programs: all layers, and the choice of the next tokens.  The second exists without random numbers too,
because drawing tokens sorts the vocabulary.  The host knows which of them a step needs.  A branch on the device
(`lax.cond`) would make the host wait until the branch is reached before it can launch the rest: on an H200, a step of
256 requests and 512 prompt tokens of DeepSeek-V2-Lite took 26 ms with such a branch, and takes 16 without.
"""

import jax

from jaxkv.cache import KVCache
from jaxkv.models import sampling
from jaxkv.models.decoder import step
from jaxkv.models.model import Model
from jaxkv.serving.step_inputs import Choices, InputBatch


def run_layers(model: Model, cache: KVCache, last, *batches: InputBatch) -> tuple[KVCache, jax.Array]:
    """The cache and the logits of each row of all batches, given the last tokens of running requests by place."""
    return step(model, cache, *[batch.new_tokens(last) for batch in batches])


def likeliest(logits, last, choices: Choices) -> tuple[jax.Array, jax.Array]:
    """The last tokens after the step, and the most likely token of each row, int32; -1 if its logits are NaN."""
    return _kept(sampling.likeliest(logits), last, choices)


def draw(logits, last, choices: Choices) -> tuple[jax.Array, jax.Array]:
    """The same with tokens that are drawn at random in rows whose temperature is not 0."""
    # The position of the next token is the length so far, so its random numbers do not depend on the step or the row.
    return _kept(sampling.draw(logits, choices.sampling, choices.lengths), last, choices)


def _kept(tokens, last, choices: Choices) -> tuple[jax.Array, jax.Array]:
    return last.at[choices.places].set(tokens, mode="drop"), tokens
