"""Youtu-LLM: MLA and a dense feed-forward in every layer; the head is tied to the embedding unless config.json says
otherwise."""

from functools import partial

from jaxkv.models.config import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.parts import decoder, mla, rope
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers.block import pre_norm, pre_norm_store
from jaxkv.models.layers.mla import attention, store


def _read(fields: JsonObject) -> ModelConfig:
    return decoder.read(fields, mla.read(fields), rope.read_yarn(fields), tied=True)


YOUTU = Family(
    _read, partial(decoder.weights, mla.weights), pre_norm(attention), mla.arrange, store=pre_norm_store(store)
)
