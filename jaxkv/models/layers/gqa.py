"""Grouped-query attention over the cache, which includes multi-head attention (one KV head per query head)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, SubBatch
from jaxkv.models.cache_groups import MAIN
from jaxkv.models.config import GQA, ModelConfig
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import rope
from jaxkv.models.layers.linear import linear, rms_norm, with_rank
from jaxkv.models.model import Model
from jaxkv.ops.writes import write_kv


def read(fields: JsonObject) -> GQA:
    """Reads the number of KV heads (default: that of query heads), the head size (default: hidden_size / heads), and
    whether there are biases (`attention_bias`, default false).
    """
    biases = fields.flag("attention_bias", default=False)
    heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads") if "num_key_value_heads" in fields else heads
    if heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} `num_attention_heads`")
    if "head_dim" not in fields:
        hidden = fields.integer("hidden_size")
        if hidden % (2 * heads):
            raise fields.error("hidden_size", f"a multiple of 2 x {heads} `num_attention_heads`, or a `head_dim`")
        return GQA(num_kv_heads, hidden // heads, biases)
    head_dim = fields.integer("head_dim")
    if head_dim % 2:
        raise fields.error("head_dim", "an even number: rotary embedding rotates pairs")
    return GQA(num_kv_heads, head_dim, biases)


def weights(config: ModelConfig, attention: GQA, weight) -> dict[str, Any]:
    """The weights of the attention; `weight` as in `layer_weights`."""
    hidden = config.hidden_size
    q_size, kv_size = (heads * attention.head_dim for heads in (config.num_heads, attention.num_kv_heads))
    tree = {
        "q": weight("self_attn.q_proj.weight", q_size, hidden),
        "k": weight("self_attn.k_proj.weight", kv_size, hidden),
        "v": weight("self_attn.v_proj.weight", kv_size, hidden),
        "o": weight("self_attn.o_proj.weight", hidden, q_size),
    }
    if attention.biases:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
        tree |= {f"{name}_bias": weight(f"self_attn.{name}_proj.bias", size) for name, size in sizes.items()}
    if attention.normed:
        size, centred = attention.head_dim, config.centred_norms
        tree |= {name: weight(f"self_attn.{name}.weight", size, centred=centred) for name in ("q_norm", "k_norm")}
    return tree


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

    held, table, place = _group_of(model, config, cache, layer, windowed=windowed)
    options: dict[str, Any] = {"layer": place, "implementation": model.implementation, **model.entry_scales(layer)}
    k, v = (new.reshape(len(batch.slots), -1, config.head_dim) for new in (k, v))
    held = write_kv(held, k, v, batch.slots_of(table, held), **options)
    options |= {"scale": config.head_dim**-0.5, "sinks": weights.get("sinks")}
    if windowed:
        options["window"] = config.window

    def attend(sub_batch: SubBatch, q) -> jax.Array:
        plan = sub_batch.window_plan if windowed else sub_batch.plan
        return model.parallel.decode_kv(q, held, sub_batch.tables[table], sub_batch.seq_lens, plan=plan, **options)

    out = batch.attend(attend, q)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate)
    return held.view(cache.layout), None, _projected(weights, "o", out.reshape(*x.shape[:2], -1))


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


def _group_of(model: Model, config: GQA, cache: KVCache, layer, *, windowed: bool) -> tuple[KVCache, str, jax.Array]:
    """Where the entries of a layer are: the cache as the view of the layer's group, the name of the table, and the
    number of the layer in the group.
    """
    view, table = model.windowed_view(cache)
    if table == MAIN:
        return cache, MAIN, layer
    before = (jnp.asarray(config.windowed, jnp.int32) < layer).sum(dtype=jnp.int32)
    return (view, table, before) if windowed else (cache, MAIN, layer - before)


def _projected(weights, name: str, x) -> jax.Array:
    """x [..., in] times a matrix, plus its bias if there is one."""
    out, bias = linear(x, weights[name]), weights.get(f"{name}_bias")
    return out if bias is None else out + with_rank(bias, out.ndim)
