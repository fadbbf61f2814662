"""Youtu-LLM: MLA and a dense feed-forward in every layer; the head is tied to the embedding unless config.json says
otherwise."""

from functools import partial

from jaxkv.models.config import ModelConfig
from jaxkv.models.families.family import Family, layer_weights, read_config
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import mla, rope
from jaxkv.models.layers.block import pre_norm, pre_norm_store


def _read(fields: JsonObject) -> ModelConfig:
    return read_config(fields, mla.read(fields), rope.read_with_yarn(fields), tied=True)


YOUTU = Family(
    _read,
    partial(layer_weights, mla.weights),
    pre_norm(mla.attention),
    mla.convert_weights,
    store=pre_norm_store(mla.store),
)
