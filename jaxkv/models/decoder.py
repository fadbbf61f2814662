"""The decoder: embedding, layers under `lax.scan` with the cache as the carry, norm and head."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.dispatch.validate import Dims, int32
from jaxkv.models.batch import Batch
from jaxkv.models.families import FAMILIES
from jaxkv.models.layers.linear import product, rms_norm
from jaxkv.models.model import Model


def prefill(model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping) -> tuple[KVCache, jax.Array]:
    """A chunk of new tokens of each request: stores their entries, and attends to all that is cached, them included.

    A request with fewer than Q new tokens has them at the end of its row, as `decode_mla` has it; what stands before
    them is padding, of any token, with slot -1.  A request without new tokens has `seq_lens` 0 and slots -1.

    Args:
      model: from `load`.
      cache: from `model.cache`; donate it.
      tokens: int32 [B, Q], the new tokens, aligned to the end.
      seq_lens: int32 [B], tokens of each request once these are stored: those cached before and the new ones.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length may hold anything.
      slot_mapping: int32 [B, Q], where each new token's entry goes; negative for padding.

    Returns:
      The cache, and float32 [B, vocab]: the logits after the last token of each request.

    Raises:
      ValueError: a shape or dtype is wrong, or the cache is not of the model's layout.
    """
    cache, x = forward(model, cache, tokens, seq_lens, block_tables, slot_mapping)
    return cache, head(model, x[:, -1])


def decode(model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping) -> tuple[KVCache, jax.Array]:
    """One new token of each request: a prefill of one token.

    Args:
      model: from `load`.
      cache: from `model.cache`; donate it.
      tokens: int32 [B]; any token for a request that is not there.
      seq_lens: int32 [B], tokens of each request, the new one included; 0 for a request that is not there.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length may hold anything.
      slot_mapping: int32 [B], where each new token's entry goes; negative for a request that is not there.

    Returns:
      The cache, and float32 [B, vocab]: the logits after each token; without meaning where no request is.

    Raises:
      ValueError: a shape or dtype is wrong, or the cache is not of the model's layout.
    """
    return prefill(model, cache, tokens[:, None], seq_lens, block_tables, slot_mapping[:, None])


def forward(model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping) -> tuple[KVCache, jax.Array]:
    """`prefill` without the head: the cache, and [B, Q, hidden] after the last layer; padding rows have no meaning."""
    model.check_cache(cache)
    dims = Dims()
    dims.check_ints("tokens", tokens, "B Q")
    dims.check_ints("seq_lens", seq_lens, "B")
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("slot_mapping", slot_mapping, "B Q")
    return model.parallel.run(_layers, model, cache, tokens, int32(seq_lens), int32(block_tables), int32(slot_mapping))


def _layers(model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping) -> tuple[KVCache, jax.Array]:
    """`forward` on one device, with its part of the model, the cache and the batch."""
    block = FAMILIES[model.config.architecture].block
    batch = Batch.of(model, cache, seq_lens, block_tables, slot_mapping)

    def step(carry, inputs):
        cache, x = carry
        layer, weights = inputs
        return block(model, weights, x, cache, batch, layer), None

    x, first = model.params["embed"][tokens], 0
    for layers in model.params["stacks"]:
        count = len(layers["attention_norm"])
        (cache, x), _ = lax.scan(step, (cache, x), (jnp.arange(first, first + count), layers))
        first += count
    return cache, x


def head(model: Model, x) -> jax.Array:
    """Logits, float32 [..., vocab], from the result of `forward`, [..., hidden]: the final norm and the output
    matrix."""
    params = model.params
    x = rms_norm(x, params["norm"], model.config.rms_norm_eps)
    weight = params["embed"] if model.config.tie_word_embeddings else params["head"]
    return product("...i,oi->...o", x, weight, dtype=jnp.float32)
