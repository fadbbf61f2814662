"""Llama 2, 3, 3.1 and 3.2 (the text models): grouped-query attention and a dense feed-forward in every layer."""

from functools import partial

from jaxkv.models.config import ModelConfig
from jaxkv.models.families.family import Family, layer_weights, read_config
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import gqa, rope
from jaxkv.models.layers.block import pre_norm

THETA = 10000.0
"""`rope_theta` of Llama 2, whose config.json does not have the key."""


def _read(fields: JsonObject) -> ModelConfig:
    rotary = rope.read(fields, {"llama3": rope.read_llama3}, interleaved=False, theta=THETA)
    attention = gqa.read(fields)
    return read_config(fields, attention, rotary, biases=attention.biases)


LLAMA = Family(_read, partial(layer_weights, gqa.weights), pre_norm(gqa.attention))
