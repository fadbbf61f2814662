"""Kimi-K2.5 (the text model): a model like DeepSeek V3, inside a model that also reads images.

The weights of the images' model are skipped, so that tokens that stand for images have no meaning.
"""

from dataclasses import replace

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import deepseek
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import feed_forward, mla


def _read(fields: JsonObject) -> ModelConfig:
    fields.flag("tie_word_embeddings")  # required: by default, transformers ties the head, and the checkpoint does not
    text = fields.child("text_config")
    text.choice("model_type", "kimi_k2", "deepseek_v3")
    return deepseek.read(text, mla.read(text), feed_forward.read_experts, outer=fields)


# transformers 5.24 gives layers the name that those of the images' model have, and saves one module of that model as
# `model.mm_projector.pre_norm`.
KIMI_K25 = replace(
    deepseek.V3,
    read=_read,
    prefix="language_model.",
    spellings={r"language_model\.model\.blocks\.": "language_model.model.layers."},
    unused=r"(vision_tower|(model\.)?mm_projector)\..*",
)
