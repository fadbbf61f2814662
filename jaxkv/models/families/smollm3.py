"""SmolLM3: Llama with some layers, by default every fourth, that have no rotary embedding."""

from dataclasses import replace
from typing import Any

from jaxkv.models.config import GQA, ModelConfig
from jaxkv.models.families.family import Family, layer_weights, read_config
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import gqa, rope
from jaxkv.models.layers.block import pre_norm

THETA = 2_000_000.0
"""`rope_theta` by default."""
INTERVAL = 4
"""`no_rope_layer_interval` by default."""


def _read(fields: JsonObject) -> ModelConfig:
    fields.choice("use_sliding_window", False, default=False)
    rotated = _rotated(fields, fields.integer("num_hidden_layers"))
    unrotated = tuple(layer for layer, rotates in enumerate(rotated) if not rotates)
    rotary = rope.read(fields, {}, interleaved=False, theta=THETA)
    attention = replace(gqa.read(fields), unrotated=unrotated)
    return read_config(fields, attention, rotary, tied=True, biases=attention.biases)


def _rotated(fields: JsonObject, num_layers: int) -> list[int]:
    """1 for each layer with rotary embedding, 0 for the others."""
    if "no_rope_layers" not in fields:
        interval = fields.integer("no_rope_layer_interval") if "no_rope_layer_interval" in fields else INTERVAL
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    rotated = fields.value("no_rope_layers")
    known = isinstance(rotated, list) and all(type(one) is int and one in (0, 1) for one in rotated)
    if not known or len(rotated) < num_layers:
        raise fields.error("no_rope_layers", f"1 or 0 for each of {num_layers} layers")
    return rotated[:num_layers]


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    def attention(config: ModelConfig, attention: GQA, weight) -> dict[str, Any]:
        return {gqa.kind_of(attention, layer): gqa.weights(config, attention, weight)}

    return layer_weights(attention, config, layer)


SMOLLM3 = Family(_read, _weights, pre_norm(gqa.by_kind))
