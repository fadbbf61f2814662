"""LongCat-Flash: layers of two attentions with MLA, dense feed-forwards, and experts beside them, some without weights.

A layer (arXiv 2509.01322, section 2.2) is

    x = x + attention_0(norm x)
    y = norm x;  x = x + dense_0(y)
    x = x + attention_1(norm x)
    x = x + dense_1(norm x) + experts(y)

experts(y) depends on nothing after y, so that it may run beside the rest.

Queries and latents are scaled, so that their variance does not depend on their rank (section 2.3).  The norms before
them have a weight each, with which these constants are multiplied while loading.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch
from jaxkv.models.config import MLA, Experts, ModelConfig
from jaxkv.models.families.family import Family, read_config, weight_of
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import mla, rope
from jaxkv.models.layers.feed_forward import dense, route, routed, swiglu_weights
from jaxkv.models.layers.linear import rms_norm
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights.weight import EXPERT

NAMES = {
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
    "num_hidden_layers": "num_layers",
}
"""The names of keys in config.json."""
THETA = 10_000_000.0
"""`rope_theta` by default."""


def _read(fields: JsonObject) -> ModelConfig:
    fields = fields.renamed(NAMES)
    fields.choice("attention_method", "MLA", default="MLA")
    fields.choice("mla_scale_q_lora", True, default=True)
    fields.choice("mla_scale_kv_lora", True, default=True)
    fields.choice("rope_interleave", True, default=True)
    attention = mla.read(fields, q_latent=True)
    fields.choice("head_dim", attention.qk_rope_head_dim, default=attention.qk_rope_head_dim)
    rotary = rope.read(fields, {"yarn": rope.read_yarn}, interleaved=True, theta=THETA)
    config = read_config(fields, attention, rotary, (0, _read_experts(fields)), dtype="bfloat16")
    # Its layer of multi-token prediction has other weights than those that `speculative.py` describes.
    return replace(config, attentions_per_layer=2, num_nextn_predict_layers=0)


def _read_experts(fields: JsonObject) -> Experts:
    fields.choice("router_bias", False, default=False)
    fields.choice("norm_topk_prob", False, default=False)
    fields.choice("zero_expert_type", "identity", default="identity")
    count, zero_count = fields.integer("n_routed_experts"), fields.integer("zero_expert_num", least=0)
    per_token = fields.integer("num_experts_per_tok")
    if per_token > count + zero_count:
        raise fields.error("num_experts_per_tok", f"at most the {count} + {zero_count} experts")
    return Experts(
        count=count,
        per_token=per_token,
        scoring="softmax",
        normalize=False,
        scale=fields.number("routed_scaling_factor"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=0,
        zero_count=zero_count,
    )


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    weight, hidden = weight_of(layer), config.hidden_size
    attention: Any = config.attention
    experts: Any = config.experts
    routes = experts.count + experts.zero_count

    def half(i: int) -> dict[str, Any]:
        def numbered(name: str, *shape: int, **options):
            return weight(name.replace("self_attn.", f"self_attn.{i}."), *shape, **options)

        return {
            "attention_norm": weight(f"input_layernorm.{i}.weight", hidden),
            "attention": mla.weights(config, attention, numbered),
            "feed_forward_norm": weight(f"post_attention_layernorm.{i}.weight", hidden),
            "dense": swiglu_weights(weight, f"mlps.{i}", hidden, config.intermediate_size),
        }

    mixture = {
        "router": weight("mlp.router.classifier.weight", routes, hidden, lossless=True),
        "router_bias": weight("mlp.router.e_score_correction_bias", routes, exact=True),
        "experts": swiglu_weights(
            weight, f"mlp.experts.{EXPERT}", hidden, experts.intermediate_size, experts=experts.count
        ),
    }
    return {"halves": (half(0), half(1)), "mixture": mixture}


def _convert_weights(config: ModelConfig, attention: MLA, layer: dict[str, Any]) -> dict[str, Any]:
    def scaled(half: dict[str, Any]) -> dict[str, Any]:
        half = mla.convert_weights(config, attention, half)
        part = dict(half["attention"])
        ranks: dict[str, Any] = {"q_a_norm": attention.q_lora_rank, "kv_a_norm": attention.kv_lora_rank}
        for name, rank in ranks.items():
            factor = (config.hidden_size / rank) ** 0.5
            part[name] = (part[name].astype("float32") * factor).astype(part[name].dtype)
        return {**half, "attention": part}

    return {**layer, "halves": tuple(map(scaled, layer["halves"]))}


def block(model: Model, weights, x, cache: KVCache, batch: Batch, layer) -> tuple[KVCache, None, jax.Array]:
    """The layer, whose attentions have the layers 2 * `layer` and 2 * `layer` + 1 of the cache."""
    config, total = model.config, model.parallel.total
    options: Any = config.attention
    experts: Any = config.experts

    def half(i: int, x, cache: KVCache):
        part = weights["halves"][i]
        normed = rms_norm(x, part["attention_norm"], config.rms_norm_eps)
        place = 2 * layer + jnp.int32(i)
        cache, _, out = mla.attention(model, options, part["attention"], normed, cache, batch, place)
        x = x + total(out)
        normed = rms_norm(x, part["feed_forward_norm"], config.rms_norm_eps)
        return cache, x, normed, dense(part["dense"], normed)

    cache, x, normed, out = half(0, x, cache)
    divided, whole = _mixture(experts, weights["mixture"], normed, model.parallel, batch)
    cache, x, _, last = half(1, x + total(out), cache)
    return cache, None, x + total(last + divided) + whole


def _mixture(config: Experts, weights, x, parallel: Parallel, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of each token's experts with weights, and of those without, whose output is the token itself.

    If devices divide the weights, the former is this device's term of a sum over devices, but the latter is whole.
    """
    chosen, shares = route(config, weights, x.reshape(-1, x.shape[-1]), batch)
    has_weights = chosen < config.count
    divided = routed(config, weights["experts"], x, jnp.where(has_weights, chosen, -1), shares, parallel)
    unchanged = jnp.where(has_weights, 0.0, shares).sum(axis=-1).reshape(*x.shape[:-1], 1)
    return divided, (unchanged * x.astype(jnp.float32)).astype(x.dtype)


# Transformers also saves matrices of experts without weights, which have no use.  Layers of multi-token prediction are
# `model.mtp`.
LONGCAT_FLASH = Family(
    _read,
    _weights,
    block,
    _convert_weights,
    unused=r"model\.mtp\..*|model\.layers\.[0-9]+\.mlp\.experts\.[0-9]+\.(gate|up)_proj\.weight",
)
