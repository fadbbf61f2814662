"""Grouped-query attention over the cache."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, Part
from jaxkv.models.config import GQA
from jaxkv.models.layers import rope
from jaxkv.models.layers.linear import linear, rms_norm
from jaxkv.models.model import Model
from jaxkv.ops.writes import write_kv


def attention(
    model: Model, config: GQA, weights, x, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, None, jax.Array]:
    """Stores the keys and values of x and attends to all cached tokens.

    x and the output, the last value returned, are [B, Q, hidden].

    If devices divide the heads, the result is this device's term of a sum over devices.
    """
    q, k, v = (linear(x, weights[name]) for name in ("q", "k", "v"))
    gate = None
    if config.gated:  # a head of queries, then its gate
        q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * config.head_dim), 2, axis=-1)
    q, k, v = (heads.reshape(*x.shape[:2], -1, config.head_dim) for heads in (q, k, v))
    if config.normed:
        q, k = (
            rms_norm(heads, weights[norm], model.config.rms_norm_eps) for heads, norm in ((q, "q_norm"), (k, "k_norm"))
        )
    cos, sin = batch.cos[:, :, None], batch.sin[:, :, None]
    q, k = (rope.rotate_first(heads, cos, sin, interleaved=model.config.rope.interleaved) for heads in (q, k))

    options: dict[str, Any] = {"layer": layer, "implementation": model.implementation, **model.entry_scales(layer)}
    k, v = (new.reshape(len(batch.slots), -1, config.head_dim) for new in (k, v))
    cache = write_kv(cache, k, v, batch.slots, **options)
    options["scale"] = config.head_dim**-0.5

    def attend(part: Part, q) -> jax.Array:
        return model.parallel.decode_kv(q, cache, part.block_tables, part.seq_lens, plan=part.plan, **options)

    out = batch.attend(attend, q)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate)
    return cache, None, linear(out.reshape(*x.shape[:2], -1), weights["o"])
