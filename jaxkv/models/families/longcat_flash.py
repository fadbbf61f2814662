"""LongCat-Flash: layers of two attentions with MLA, dense feed-forwards, and experts beside them, some without weights.

Queries and latents are scaled, so that their variance does not depend on their rank (arXiv 2509.01322, section 2.3).
The norms before them have a weight each, with which these constants are multiplied while loading.
"""

from dataclasses import replace
from typing import Any

from jaxkv.models.config import MLA, Experts, ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.parts import decoder, mla, rope
from jaxkv.models.families.parts.feed_forward import feed_forward
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers.shortcut import block
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
    rotary = rope.read(fields, {"yarn": rope.yarn}, interleaved=True, theta=THETA)
    config = decoder.read(fields, attention, rotary, (0, _read_experts(fields)), dtype="bfloat16")
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
    weight, hidden = decoder.of_layer(layer), config.hidden_size
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
            "dense": feed_forward(weight, f"mlps.{i}", hidden, config.intermediate_size),
        }

    mixture = {
        "router": weight("mlp.router.classifier.weight", routes, hidden, exact=True),
        "router_bias": weight("mlp.router.e_score_correction_bias", routes, exact=True),
        "experts": feed_forward(
            weight, f"mlp.experts.{EXPERT}", hidden, experts.intermediate_size, experts=experts.count
        ),
    }
    return {"halves": (half(0), half(1)), "mixture": mixture}


def _arrange(config: ModelConfig, attention: MLA, layer: dict[str, Any]) -> dict[str, Any]:
    def scaled(half: dict[str, Any]) -> dict[str, Any]:
        half = mla.arrange(config, attention, half)
        part = dict(half["attention"])
        ranks: dict[str, Any] = {"q_a_norm": attention.q_lora_rank, "kv_a_norm": attention.kv_lora_rank}
        for name, rank in ranks.items():
            factor = (config.hidden_size / rank) ** 0.5
            part[name] = (part[name].astype("float32") * factor).astype(part[name].dtype)
        return {**half, "attention": part}

    return {**layer, "halves": tuple(map(scaled, layer["halves"]))}


# Transformers also saves matrices of experts without weights, which have no use.  Layers of multi-token prediction are
# `model.mtp`.
LONGCAT_FLASH = Family(
    _read,
    _weights,
    block,
    _arrange,
    unused=r"model\.mtp\..*|model\.layers\.[0-9]+\.mlp\.experts\.[0-9]+\.(gate|up)_proj\.weight",
)
