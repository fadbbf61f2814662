"""Mistral 4: MLA whose queries are scaled by their position, and experts with softmax scores.

Checkpoints of Mistral Small 4 have this text model inside a model that also reads images.  The weights of the images'
model are skipped, so that tokens that stand for images have no meaning.
"""

from dataclasses import replace
from typing import Any

from jaxkv.models.config import Experts, ModelConfig, QueryScale
from jaxkv.models.families import deepseek
from jaxkv.models.families.family import read_config, weight_of
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import feed_forward, mla, rope


def _read(fields: JsonObject, outer: JsonObject | None = None) -> ModelConfig:
    attention = mla.read(fields)
    values = fields.child("rope_parameters")
    values.choice(values.spelling("rope_type", "type"), "yarn")
    scale = QueryScale(
        beta=values.number("llama_4_scaling_beta", least=0),
        original_length=values.integer("original_max_position_embeddings"),
    )
    rotary = rope.read(
        fields,
        {"yarn": rope.read_yarn},
        interleaved=fields.flag("rope_interleave", default=True),
        # Of the values of a query's head, as transformers counts them.
        partial=attention.qk_rope_head_dim / (attention.qk_nope_head_dim + attention.qk_rope_head_dim),
    )
    layers = feed_forward.read_layers(fields, _read_experts)
    return read_config(fields, replace(attention, query_scale=scale), rotary, layers, outer=outer)


def _read_experts(fields: JsonObject) -> Experts:
    fields.choice("n_group", 1, default=1)
    fields.choice("topk_group", 1, default=1)
    return feed_forward.read_routing(fields, "softmax", grouped=False, normalize=fields.flag("norm_topk_prob"))


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    """The weights of a layer.  Checkpoints have the experts of a layer in two tensors."""
    tree = deepseek.V3.weights(config, layer)
    if "mixture" in tree:
        weight, hidden = weight_of(layer), config.hidden_size
        gate = tree["mixture"]["experts"]["gate"]
        count, (size, _) = gate.experts, gate.shape
        both, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
        experts = {
            "gate": weight(both, size, hidden, experts=count, packed=(0, 2 * size)),
            "up": weight(both, size, hidden, experts=count, packed=(size, 2 * size)),
            "down": weight(down, hidden, size, experts=count, packed=(0, hidden)),
        }
        tree["mixture"] = {**tree["mixture"], "experts": experts}
    return tree


def _read_with_images(fields: JsonObject) -> ModelConfig:
    fields.flag("tie_word_embeddings")  # required: transformers ties the head by default, but not in the text model
    text = fields.child("text_config")
    text.choice("model_type", "mistral4")
    return _read(text, fields)


MISTRAL4 = replace(deepseek.V3, read=_read, weights=_weights)
MISTRAL4_WITH_IMAGES = replace(
    MISTRAL4, read=_read_with_images, prefix="language_model.", unused=r"(vision_tower|multi_modal_projector)\..*"
)
