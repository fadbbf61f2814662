"""Multi-head latent attention over the cache."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, Part
from jaxkv.models.config import MLA, Rope, Yarn
from jaxkv.models.layers import indexer, rope
from jaxkv.models.layers.linear import linear, product, rms_norm
from jaxkv.models.model import Model
from jaxkv.ops.writes import write_mla


def attention(
    model: Model, config: MLA, weights, x, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, jax.Array | None, jax.Array]:
    """Stores the entries of x and attends to all cached tokens.

    If devices divide the heads, the output is this device's term of a sum over devices.

    Args:
      model: the model.
      config: the model's attention.
      weights: the weights of this layer's attention.
      x: [B, Q, hidden].
      cache: the model's cache.
      batch: the new tokens.
      layer: traced int32 scalar.

    Returns:
      The cache; the slots selected for later layers, as in `Batch.selected`; and the output [B, Q, hidden].
    """
    q_source = x
    if config.q_lora_rank is not None:
        q_source = rms_norm(linear(x, weights["q_a"]), weights["q_a_norm"], config.latent_eps)
    q = linear(q_source, weights["q"])
    q = q.reshape(*x.shape[:2], model.num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim)
    if batch.query_scales is not None:
        q = q * batch.query_scales.astype(q.dtype)[:, :, None, None]
    q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    interleaved = model.config.rope.interleaved
    q_pe = rope.rotate_first(q_pe, batch.cos[:, :, None], batch.sin[:, :, None], interleaved=interleaved)
    cache = store(model, config, weights, x, cache, batch, layer)

    options = _options(model, layer) | {"scale": _softmax_scale(config, model.config.rope)}
    selected = None
    if config.indexer is None:
        attend = partial(_attend, model, weights, cache, options=options)
        out = batch.attend(attend, q_nope, q_pe)
    else:
        slots = batch.selected
        if "indexer" in weights:
            chosen = indexer.select_slots(model, config.indexer, weights["indexer"], x, q_source, cache, batch, layer)
            cache, slots = chosen
        selected = None if config.indexer.layers is None else slots
        attend = partial(_attend_sparse, model, weights, cache, options=options)
        out = batch.attend(attend, q_nope, q_pe, slots)
    return cache, selected, linear(out.reshape(*x.shape[:2], -1), weights["o"])


def store(model: Model, config: MLA, weights, x, cache: KVCache, batch: Batch, layer) -> KVCache:
    """Stores the entries of x; the arguments are those of `attention`.  Keys of an indexer are not stored."""
    kv_c, k_pe = jnp.split(linear(x, weights["kv_a"]), [config.kv_lora_rank], axis=-1)
    kv_c = rms_norm(kv_c, weights["kv_a_norm"], config.latent_eps)
    k_pe = rope.rotate_first(k_pe, batch.cos, batch.sin, interleaved=model.config.rope.interleaved)
    tokens, options = len(batch.slots), _options(model, layer)
    return write_mla(cache, kv_c.reshape(tokens, -1), k_pe.reshape(tokens, -1), batch.slots, **options)


def _options(model: Model, layer) -> dict[str, Any]:
    """What all operations on the cache get."""
    return {"layer": layer, "implementation": model.implementation, **model.entry_scales(layer)}


def _attend(model: Model, weights, cache: KVCache, part: Part, q_nope, q_pe, *, options) -> jax.Array:
    """Values [B, Q, H, V] of the attention of one part to all cached tokens."""
    index = part.block_tables, part.seq_lens
    if part.expanded:
        up = weights["w_uk"], weights["w_uv"]
        return model.parallel.prefill_mla(q_nope, q_pe, *up, cache, *index, **options)
    q_latent = product("bqhn,hnr->bqhr", q_nope, weights["w_uk"])
    out = model.parallel.decode_mla(q_latent, q_pe, cache, *index, plan=part.plan, **options)
    return _expanded(out, weights, cache)


def _attend_sparse(model: Model, weights, cache: KVCache, part: Part, q_nope, q_pe, slots, *, options) -> jax.Array:
    """The same for the cached tokens in `slots` [B, Q, K]."""
    q_latent = product("bqhn,hnr->bqhr", q_nope, weights["w_uk"])
    out = model.parallel.decode_mla_sparse(q_latent, q_pe, cache, slots, **options)
    return _expanded(out, weights, cache)


def _expanded(out, weights, cache: KVCache) -> jax.Array:
    """Values [B, Q, H, V] from sums of latents, which sums of rotary parts follow in formats of DeepSeek V4."""
    return product("bqhr,hvr->bqhv", out[..., : cache.layout.entry.latent], weights["w_uv"])


def _softmax_scale(config: MLA, rotary: Rope) -> float:
    """1 / sqrt(nope + rope), multiplied by YaRN's mscale squared if the checkpoint has an `mscale_all_dim`."""
    scale, yarn = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5, rotary.scaling
    if not isinstance(yarn, Yarn) or not yarn.mscale_all_dim:
        return scale
    return scale * rope.mscale(yarn.factor, yarn.mscale_all_dim) ** 2
