"""A layer: attention and feed-forward, each with a norm before it and a residual connection.

The feed-forward may have another norm after it (A.X K1).
"""

from collections.abc import Callable

import jax

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch
from jaxkv.models.layers.feed_forward import feed_forward
from jaxkv.models.layers.linear import rms_norm
from jaxkv.models.model import Model

AttentionFn = Callable[..., tuple[KVCache, jax.Array | None, jax.Array]]
"""`attention(model, config.attention, weights, x, cache, batch, layer)` combines x [B, Q, hidden] with cached tokens.

It returns the cache, the slots selected for later layers (`Batch.selected`), and its output [B, Q, hidden].
"""
Block = Callable[..., tuple[KVCache, jax.Array | None, jax.Array]]
"""`Family.block`."""


def pre_norm(attention: AttentionFn) -> Block:
    """The layer function with the given attention."""

    def block(model: Model, weights, x, cache: KVCache, batch: Batch, layer):
        config, total = model.config, model.parallel.total
        normed = rms_norm(x, weights["attention_norm"], config.rms_norm_eps)
        cache, selected, out = attention(model, config.attention, weights["attention"], normed, cache, batch, layer)
        x = x + total(out)
        normed = rms_norm(x, weights["feed_forward_norm"], config.rms_norm_eps)
        out = total(feed_forward(config.experts, weights, normed, model.parallel, batch))
        if "feed_forward_post_norm" in weights:
            out = rms_norm(out, weights["feed_forward_post_norm"], config.rms_norm_eps)
        return cache, selected, x + out

    return block


def pre_norm_store(store: Callable[..., KVCache]) -> Callable[..., KVCache]:
    """`Family.store` of such layers; it calls `store` with the arguments of `attention`, which it only stores."""

    def run(model: Model, weights, x, cache: KVCache, batch: Batch, layer) -> KVCache:
        normed = rms_norm(x, weights["attention_norm"], model.config.rms_norm_eps)
        return store(model, model.config.attention, weights["attention"], normed, cache, batch, layer)

    return run
