"""The sparse indexer of DeepSeek V3.2 and GLM-5, which selects the cached tokens that each new token attends to."""

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, Part
from jaxkv.models.config import Indexer
from jaxkv.models.layers import rope
from jaxkv.models.layers.linear import layer_norm, linear
from jaxkv.models.model import Model
from jaxkv.ops.writes import write_indexer_k

KEY_EPS = 1e-6


def select_slots(
    model: Model, config: Indexer, weights, x, q_latent, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, jax.Array]:
    """Stores the indexer's keys of x; returns the cache and the slots with the highest scores, int32 [B, Q, <= topk].

    score[j] = sum over heads h of w_h * relu(q_h . k_j / sqrt(heads * head_dim)), over the tokens j that a query sees.
    DeepSeek first multiplies queries and keys by a Hadamard matrix.  This is left out, because it does not change the
    products.

    Args:
      model: the model.
      config: the model's indexer.
      weights: the weights of this layer's indexer.
      x: [B, Q, hidden], the input of the attention.
      q_latent: [B, Q, q_lora_rank], the latent of the queries after its norm.
      cache: the model's cache, as the view of the latents.
      batch: the new tokens.
      layer: traced int32 scalar.
    """
    q = linear(q_latent, weights["q"]).reshape(*x.shape[:2], config.heads, config.head_dim)
    k = layer_norm(linear(x, weights["k"]), weights["k_norm"], weights["k_norm_bias"], KEY_EPS)
    # Their pairs may be interleaved or not, whatever those of the attention are.
    q = rope.rotate_first(q, batch.cos[:, :, None], batch.sin[:, :, None], interleaved=config.interleaved)
    k = rope.rotate_first(k, batch.cos, batch.sin, interleaved=config.interleaved)
    head_weights = linear(x.astype(jnp.float32), weights["weights"]) * (config.heads * config.head_dim) ** -0.5

    if config.layers is not None:  # the cache has keys of these layers only, and of the MTP layer after them
        layer = (jnp.asarray(config.layers, jnp.int32) < layer).sum(dtype=jnp.int32)
    options = {"layer": layer, "implementation": model.implementation}
    block_size = cache.layout.block_size
    keys = cache.view(model.packed_layout(config, cache.layout.num_blocks, block_size)["indexer"])
    keys = write_indexer_k(keys, k.reshape(-1, config.head_dim), batch.slots, **options)

    def select(part: Part, q, head_weights) -> jax.Array:
        index, max_len = (part.block_tables, part.seq_lens), part.block_tables.shape[1] * block_size
        return model.parallel.select_slots(q, head_weights, keys, *index, config.topk, max_len=max_len, **options)

    slots = batch.attend(select, q, head_weights)
    return keys.view(cache.layout), slots
