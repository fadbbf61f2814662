"""GLM-5: DeepSeek V3.2 with an interleaved rotary embedding in the indexer, which only some layers may have.

A layer without an indexer ("shared") attends to the tokens that the last layer before it with one ("full") selected.
"""

from dataclasses import replace
from typing import Any

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import deepseek
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import feed_forward, mla


def _read(fields: JsonObject) -> ModelConfig:
    attention = mla.read(fields, q_latent=True, latent_eps=fields.number("rms_norm_eps"))  # as in glm4_moe_lite.py
    fields.choice("rope_interleave", True, default=True)
    fields.choice("indexer_rope_interleave", True, default=True)
    indexer = deepseek.read_indexer(fields, attention)
    types = _types(fields, fields.integer("num_hidden_layers"))
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "full")
    indexer = replace(indexer, interleaved=True, layers=None if len(layers) == len(types) else layers)
    return deepseek.read(fields, replace(attention, indexer=indexer), feed_forward.read_experts)


def _types(fields: JsonObject, num_layers: int) -> list[str]:
    """ "full" or "shared" for each layer: `indexer_types`, `index_topk_pattern`, or a full one every `index_topk_freq`.

    Of the keys that are not null, the first one in this order counts.
    """
    if "indexer_types" not in fields and "index_topk_pattern" not in fields:
        every = fields.integer("index_topk_freq") if "index_topk_freq" in fields else 1
        skipped = fields.integer("index_skip_topk_offset", least=0) if "index_skip_topk_offset" in fields else 2
        return ["shared" if max(layer - skipped + 1, 0) % every else "full" for layer in range(num_layers)]
    key = "indexer_types" if "indexer_types" in fields else "index_topk_pattern"
    types = fields.value(key)
    if key == "index_topk_pattern" and isinstance(types, str):
        types = [{"F": "full", "S": "shared"}.get(letter) for letter in types]
    known = isinstance(types, list) and len(types) == num_layers and all(kind in ("full", "shared") for kind in types)
    if not known or types[0] != "full":
        raise fields.error(key, f"'full' or 'shared' for each of {num_layers} layers, the first of which is 'full'")
    return types


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    tree, selecting = deepseek.V32.weights(config, layer), config.indexer.layers if config.indexer else None
    if selecting is not None and layer < config.num_layers and layer not in selecting:
        del tree["attention"]["indexer"]
    return tree


GLM5 = replace(deepseek.V32, read=_read, weights=_weights)
