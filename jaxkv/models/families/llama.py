"""Llama 2, 3, 3.1 and 3.2 (the text models): grouped-query attention and a dense feed-forward in every layer."""

from functools import partial

from jaxkv.models.config import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.parts import decoder, gqa, rope
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers.block import pre_norm
from jaxkv.models.layers.gqa import attention

THETA = 10000.0
"""`rope_theta` of Llama 2, whose config.json does not have the key."""


def _read(fields: JsonObject) -> ModelConfig:
    rotary = rope.read(fields, {"llama3": rope.llama3}, interleaved=False, theta=THETA)
    attention = gqa.read(fields)
    return decoder.read(fields, attention, rotary, biases=attention.biases)


LLAMA = Family(_read, partial(decoder.weights, gqa.weights), pre_norm(attention))
