"""Grouped-query attention over the cache."""

from typing import Any

import jax

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, Part
from jaxkv.models.config import GQA
from jaxkv.models.layers import rope
from jaxkv.models.layers.linear import linear
from jaxkv.models.model import Model
from jaxkv.ops.writes import write_kv


def attention(
    model: Model, config: GQA, weights, x, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, None, jax.Array]:
    """Stores the keys and values of x and attends to all cached tokens.

    x and the output, the last value returned, are [B, Q, hidden].

    If devices divide the heads, the result is this device's term of a sum over devices.
    """
    q, k, v = (linear(x, weights[name]).reshape(*x.shape[:2], -1, config.head_dim) for name in ("q", "k", "v"))
    cos, sin = batch.cos[:, :, None], batch.sin[:, :, None]
    q, k = (rope.rotate(heads, cos, sin, interleaved=model.config.rope.interleaved) for heads in (q, k))

    # Keys and values are computed from normalised values and stay far below e4m3's largest value, 448.  Scale 1 is
    # therefore enough for formats that need one.
    options: dict[str, Any] = {"layer": layer, "implementation": model.implementation}
    if cache.layout.entry.codec.scaled:
        options |= {"k_scale": 1.0, "v_scale": 1.0}
    k, v = (new.reshape(len(batch.slots), -1, config.head_dim) for new in (k, v))
    cache = write_kv(cache, k, v, batch.slots, **options)
    options["scale"] = config.head_dim**-0.5

    def attend(part: Part, q) -> jax.Array:
        return model.parallel.decode_kv(q, cache, part.block_tables, part.seq_lens, plan=part.plan, **options)

    out = batch.attend(attend, q)
    return cache, None, linear(out.reshape(*x.shape[:2], -1), weights["o"])
