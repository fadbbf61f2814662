"""The program that the engine runs on the device."""

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.decoder import step
from jaxkv.models.model import Model
from jaxkv.models.sampling import sample
from jaxkv.serving.step_inputs import Rows


def run_step(model: Model, cache: KVCache, last, *batches: Rows) -> tuple[KVCache, jax.Array, jax.Array]:
    """A step on one or more batches, given the last sampled tokens of running requests by place.

    Returns the cache, the last sampled tokens after the step, and the sampled token of each row of all batches, int32;
    -1 if its logits are NaN.
    """
    cache, logits = step(model, cache, *[rows.new_tokens(last) for rows in batches])
    temperature, top_p, seeds, lengths, places = (
        jnp.concatenate([getattr(rows, name) for rows in batches])
        for name in ("temperature", "top_p", "seeds", "seq_lens", "places")
    )
    # The position of the next token is the length so far, so its random numbers do not depend on the step or the row.
    drawn = sample(logits, temperature, top_p, seeds, lengths)
    return cache, last.at[places].set(drawn, mode="drop"), drawn
