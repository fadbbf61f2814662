"""Grouped-query attention over the cache."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, Part
from jaxkv.models.config import GQA
from jaxkv.models.layers import rope
from jaxkv.models.layers.linear import linear, rms_norm, with_rank
from jaxkv.models.model import Model
from jaxkv.ops.writes import write_kv


def attention(
    model: Model, config: GQA, weights, x, cache: KVCache, batch: Batch, layer, *, windowed=False, rotated=True
) -> tuple[KVCache, None, jax.Array]:
    """Stores the keys and values of x and attends to all cached tokens, or to those in the window.

    x and the output, the last value returned, are [B, Q, hidden].  `windowed` and `rotated`: whether the layer has the
    window, and rotary embedding.

    If devices divide the heads, the result is this device's term of a sum over devices.
    """
    q, k, v = (_projected(weights, name, x) for name in ("q", "k", "v"))
    gate = None
    if config.gated:  # a head of queries, then its gate
        q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * config.head_dim), 2, axis=-1)
    q, k, v = (heads.reshape(*x.shape[:2], -1, config.head_dim) for heads in (q, k, v))
    if config.normed:
        q, k = (
            rms_norm(heads, weights[norm], model.config.rms_norm_eps) for heads, norm in ((q, "q_norm"), (k, "k_norm"))
        )
    if rotated:
        cos, sin = batch.cos[:, :, None], batch.sin[:, :, None]
        q, k = (rope.rotate_first(heads, cos, sin, interleaved=model.config.rope.interleaved) for heads in (q, k))

    options: dict[str, Any] = {"layer": layer, "implementation": model.implementation, **model.entry_scales(layer)}
    k, v = (new.reshape(len(batch.slots), -1, config.head_dim) for new in (k, v))
    cache = write_kv(cache, k, v, batch.slots, **options)
    options |= {"scale": config.head_dim**-0.5, "sinks": weights.get("sinks")}
    if windowed:
        options["window"] = config.window

    def attend(part: Part, q) -> jax.Array:
        plan = part.window_plan if windowed else part.plan
        return model.parallel.decode_kv(q, cache, part.block_tables, part.seq_lens, plan=plan, **options)

    out = batch.attend(attend, q)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate)
    return cache, None, _projected(weights, "o", out.reshape(*x.shape[:2], -1))


def by_kind(
    model: Model, config: GQA, weights, x, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, None, jax.Array]:
    """`attention` of a layer whose weights have a kind, from `kind_of`."""
    ((kind, own),) = weights.items()
    options = {"windowed": "windowed" in kind, "rotated": "unrotated" not in kind}
    return attention(model, config, own, x, cache, batch, layer, **options)


def kind_of(config: GQA, layer: int) -> str:
    """What a layer's attention differs in, as the name of its weights: layers of a kind are traced once."""
    kinds = {"windowed": config.windowed, "unrotated": config.unrotated}
    return " ".join(kind for kind, layers in kinds.items() if layer in layers) or "full"


def _projected(weights, name: str, x) -> jax.Array:
    """x [..., in] times a matrix, plus its bias if there is one."""
    out, bias = linear(x, weights[name]), weights.get(f"{name}_bias")
    return out if bias is None else out + with_rank(bias, out.ndim)
