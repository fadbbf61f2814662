"""GPT-OSS: grouped-query attention with sinks, a window in every other layer, and experts with biases.

Experts of published checkpoints are in MXFP4; they are expanded while loading.  Checkpoints have the rows of gate and
up of an expert in turn, in one tensor, whose axes are swapped if it is not quantised.
"""

from dataclasses import replace
from typing import Any

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.families.family import Family, read_config, weight_of
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import gqa, rope
from jaxkv.models.layers.block import pre_norm

WINDOWED, FULL = "sliding_attention", "full_attention"
ALPHA, LIMIT = 1.702, 7.0
"""`swiglu_alpha` and `swiglu_limit` by default."""


def _read(fields: JsonObject) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers")
    windowed = tuple(layer for layer, kind in enumerate(_kinds(fields, num_layers)) if kind == WINDOWED)
    attention = replace(gqa.read(fields), biases=True)
    if windowed:
        attention = replace(attention, window=fields.integer("sliding_window"), windowed=windowed)
    rotary = rope.read(fields, {"yarn": rope.read_yarn}, interleaved=False)
    experts = 0, _read_experts(fields)
    return read_config(fields, attention, rotary, experts, dtype="bfloat16", biases=True, mxfp4=True)


def _kinds(fields: JsonObject, num_layers: int) -> list[str]:
    """The kind of each layer; by default every other one has a window, beginning with the first."""
    if "layer_types" not in fields:
        return [FULL if layer % 2 else WINDOWED for layer in range(num_layers)]
    return fields.per_layer("layer_types", WINDOWED, FULL, count=num_layers)


def _read_experts(fields: JsonObject) -> Experts:
    count, per_token = fields.integer("num_local_experts"), fields.integer("num_experts_per_tok")
    if per_token > count:
        raise fields.error("num_experts_per_tok", f"at most `num_local_experts`, which is {count}")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=fields.integer("intermediate_size"),
        shared_intermediate_size=0,
        scoring="softmax",
        normalize=True,
        scale=1.0,
        limit=fields.number("swiglu_limit", default=LIMIT),
        alpha=fields.number("swiglu_alpha", default=ALPHA),
    )


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    weight, hidden = weight_of(layer), config.hidden_size
    attention: Any = config.attention
    experts: Any = config.experts
    count, size = experts.count, experts.intermediate_size
    sinks = weight("self_attn.sinks", config.num_heads, exact=True)
    both = {"experts": count, "packed": (0, 2 * size), "step": 2}
    second, down = {**both, "packed": (1, 2 * size)}, {"experts": count, "packed": (0, hidden)}
    mixture = {
        "router": weight("mlp.router.weight", count, hidden, lossless=True),
        "logit_bias": weight("mlp.router.bias", count, exact=True),
        "experts": {
            "gate": weight("mlp.experts.gate_up_proj", size, hidden, swapped=True, **both),
            "up": weight("mlp.experts.gate_up_proj", size, hidden, swapped=True, **second),
            "down": weight("mlp.experts.down_proj", hidden, size, swapped=True, **down),
            "gate_bias": weight("mlp.experts.gate_up_proj_bias", size, **both),
            "up_bias": weight("mlp.experts.gate_up_proj_bias", size, **second),
            "down_bias": weight("mlp.experts.down_proj_bias", hidden, **down),
        },
    }
    return {
        "attention_norm": weight("input_layernorm.weight", hidden),
        "attention": {gqa.kind_of(attention, layer): {**gqa.weights(config, attention, weight), "sinks": sinks}},
        "feed_forward_norm": weight("post_attention_layernorm.weight", hidden),
        "mixture": mixture,
    }


GPT_OSS = Family(_read, _weights, pre_norm(gqa.by_kind))
