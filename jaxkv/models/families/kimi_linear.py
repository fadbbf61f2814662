"""Kimi Linear (arXiv 2510.26692): layers with Kimi Delta Attention, some with latent attention, and V3's experts.

No layer has rotary embedding; the part of a key that all heads share stays as it is.
"""

from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.config import MLA, DeltaNet, ModelConfig, Rope
from jaxkv.models.families.family import WITHOUT_HEAD, Family, Layer, layer_weights, read_config
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import feed_forward, mla
from jaxkv.models.layers.block import pre_norm
from jaxkv.models.layers.delta_net import delta_net_or
from jaxkv.models.weights.weight import Weight

NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "scoring_func": "moe_router_activation_func",
}
"""The names of keys in config.json."""
KINDS = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
"""The kinds of layers: the keys of `linear_attn_config` with their numbers, and their names in `layer_types`."""


def _read(fields: JsonObject) -> ModelConfig:
    fields = fields.renamed(NAMES)
    fields.choice("mla_use_nope", True, default=True)
    fields.choice("use_grouped_topk", True, default=True)
    fields.choice("mla_use_output_gate", False, default=False)
    layers = feed_forward.read_layers(fields, feed_forward.read_experts)
    config = read_config(fields, replace(mla.read(fields), rotated=False), Rope(1.0, False, None), layers)
    return replace(config, recurrent=_read_recurrent(fields))


def _read_recurrent(fields: JsonObject) -> DeltaNet:
    """As in published files, or with the keys that transformers writes."""
    published = "linear_attn_config" in fields
    held = fields.child("linear_attn_config") if published else fields
    kernel = "short_conv_kernel_size" if published else "linear_conv_kernel_dim"
    held.choice("use_full_rank_gate", False, default=False)
    held.choice("gate_lower_bound", None, default=None)
    heads, size = (held.integer(name if published else f"linear_{name}") for name in ("num_heads", "head_dim"))
    return DeltaNet(
        layers=_recurrent_layers(fields),
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=size,
        value_head_dim=size,
        kernel_size=held.integer(kernel, least=2),
        channel_decays=True,
    )


def _recurrent_layers(fields: JsonObject) -> tuple[int, ...]:
    count = fields.integer("num_hidden_layers")
    if "layer_types" not in fields and "linear_attn_config" in fields:
        held = fields.child("linear_attn_config")
        recurrent, full = numbers = [held.value(key) for key in KINDS]  # counted from 1
        known = all(isinstance(some, list) and some and all(type(one) is int for one in some) for some in numbers)
        if not known or sorted(recurrent + full) != [*range(1, count + 1)]:
            raise held.error(
                "kda_layers", f"with `full_attn_layers` each of the layers 1 to {count} once, and both some"
            )
        return tuple(sorted(layer - 1 for layer in recurrent))
    types = fields.per_layer("layer_types", *KINDS.values(), count=count)
    if len({*types}) < len(KINDS):
        raise fields.error("layer_types", "at least one layer of each kind")
    return tuple(layer for layer, kind in enumerate(types) if kind == KINDS["kda_layers"])


def _weights(config: ModelConfig, layer: int) -> Layer:
    recurrent: Any = config.recurrent
    tree = layer_weights(_recurrent_weights if layer in recurrent.layers else mla.weights, config, layer)
    if "mixture" not in tree:
        return tree
    mixture = _named(tree["mixture"], {".mlp.": ".block_sparse_moe."})
    parts = _named(mixture["experts"], {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."})
    return {**tree, "mixture": {**mixture, "experts": parts}}


def _named(tree, changes: dict[str, str]) -> Any:
    """The weights of a tree with parts of their names changed."""

    def named(weight: Weight) -> Weight:
        return replace(weight, name=reduce(lambda name, change: name.replace(*change), changes.items(), weight.name))

    return jax.tree.map(named, tree)


def _recurrent_weights(config: ModelConfig, attention: MLA, weight) -> dict[str, Any]:
    recurrent: Any = config.recurrent
    hidden, heads, size = config.hidden_size, recurrent.num_value_heads, recurrent.value_head_dim
    kernel = heads * size, 1, recurrent.kernel_size
    return {
        **{name: weight(f"self_attn.{name}_proj.weight", heads * size, hidden) for name in "qkv"},
        **{f"{name}_conv": weight(f"self_attn.{name}_conv1d.weight", *kernel, expanded=True) for name in "qkv"},
        "step_a": weight("self_attn.f_a_proj.weight", size, hidden),
        "step_b": weight("self_attn.f_b_proj.weight", heads * size, size),
        "gate_a": weight("self_attn.g_a_proj.weight", size, hidden),
        "gate_b": weight("self_attn.g_b_proj.weight", heads * size, size),
        "rate": weight("self_attn.b_proj.weight", heads, hidden),
        "a_log": weight("self_attn.A_log", 1, 1, heads, 1, exact=True),
        "dt_bias": weight("self_attn.dt_bias", heads * size, exact=True),
        "norm": weight("self_attn.o_norm.weight", size),
        "o": weight("self_attn.o_proj.weight", hidden, heads * size),
    }


def _convert_weights(config: ModelConfig, attention: MLA, layer: Layer) -> Layer:
    """A layer with one convolution of queries, keys and values, or with `kv_b` as `mla.convert_weights` splits it."""
    tree = dict(layer["attention"])
    if "kv_b" in tree:
        return mla.convert_weights(config, attention, layer)
    tree["conv"] = jnp.concatenate([tree.pop(f"{name}_conv") for name in "qkv"])
    return {**layer, "attention": tree}


# transformers 5.24 gives dense layers the name that layers with experts have.
SPELLINGS = {
    r"(?:model\.)?(layers\.[0-9]+)\.block_sparse_moe\.((?:gate|up|down)_proj\.)": r"model.\1.mlp.\2",
    **WITHOUT_HEAD,
}
KIMI_LINEAR = Family(_read, _weights, pre_norm(delta_net_or(mla.attention)), _convert_weights, spellings=SPELLINGS)
