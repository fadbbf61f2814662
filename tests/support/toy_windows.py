"""Small models with sliding windows, without experts: their programs compile quickly."""

from dataclasses import replace
from functools import cache

from jaxkv import models
from jaxkv.models.families import FAMILIES
from jaxkv.models.families.family import Family, layer_weights, read_config
from jaxkv.models.layers import gqa, rope
from jaxkv.models.layers.block import pre_norm
from support.many_devices import mesh_of

BLOCK, WINDOW, LONGEST = 8, 10, 96
"""Tokens per block of the first table; of the window; and of a request, at most."""
WINDOWED, FULL = "sliding_attention", "full_attention"
EVEN, UNEVEN, ALL = (WINDOWED, FULL), (WINDOWED, FULL, WINDOWED), (WINDOWED,)
"""Kinds of layers: blocks of windows have as many tokens as the others; half as many; and there are no others."""

SIZES = {
    "architectures": ["WindowsForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": LONGEST, "sliding_window": WINDOW, "eos_token_id": None,
}  # fmt: skip


def install(monkeypatch):
    """Adds the family of these models."""
    monkeypatch.setitem(FAMILIES, "WindowsForCausalLM", Family(_read, _weights, pre_norm(gqa.by_kind)))


def _read(fields):
    kinds = fields.per_layer("layer_types", WINDOWED, FULL, count=fields.integer("num_hidden_layers"))
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOWED)
    attention = replace(gqa.read(fields), window=fields.integer("sliding_window"), windowed=windowed)
    return read_config(fields, attention, rope.read(fields, {}, interleaved=False, theta=1e4))


def _weights(config, layer):
    def attention(config, attention, weight):
        return {gqa.kind_of(attention, layer): gqa.weights(config, attention, weight)}

    return layer_weights(attention, config, layer)


def random_model(kinds, **options):
    config = {**SIZES, "num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    return models.random_model(models.ModelConfig.from_json(config), dtype="float32", **options)


model = cache(random_model)


def one_table(held):
    """The same model for a device that has all shares of the tokens: its cache has one table, and keeps all entries."""
    return replace(held, parallel=models.ContextParallel(mesh_of(1), "x"))
