"""A.X K1: DeepSeek V3 with a norm after the experts of a layer, and optionally without a bias of the router."""

from dataclasses import replace
from typing import Any

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import deepseek
from jaxkv.models.families.family import weight_of
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import feed_forward, mla


def _read(fields: JsonObject) -> ModelConfig:
    return deepseek.read(fields, mla.read(fields, q_latent=True), feed_forward.read_experts)


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    tree = deepseek.V3.weights(config, layer)
    if "mixture" in tree:
        tree["feed_forward_post_norm"] = weight_of(layer)("post_mlp_layernorm.weight", config.hidden_size)
        mixture = tree["mixture"]
        tree["mixture"] = {**mixture, "router_bias": replace(mixture["router_bias"], optional=True)}
    return tree


# Published checkpoints also have the norm in dense layers, which do not use it.
AXK1 = replace(deepseek.V3, read=_read, weights=_weights, unused=r"model\.layers\.[0-9]+\.post_mlp_layernorm\.weight")
