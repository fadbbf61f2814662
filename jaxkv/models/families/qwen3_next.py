"""Qwen3-Next: layers with the gated delta rule (Gated DeltaNet), some with gated grouped-query attention, and experts.

All norms but those of the recurrent layers' outputs multiply by 1 + weight.  The shared expert has a gate.
"""

from dataclasses import replace
from typing import Any

from jaxkv.models.config import GQA, DeltaNet, ModelConfig
from jaxkv.models.families import qwen3
from jaxkv.models.families.family import Family, layer_weights, read_config, weight_of
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import gqa, rope
from jaxkv.models.layers.block import pre_norm
from jaxkv.models.layers.delta_net import delta_net_or
from jaxkv.models.layers.feed_forward import swiglu_weights

ROTARY_FACTOR, INTERVAL = 0.25, 4
"""`partial_rotary_factor` and `full_attention_interval` by default."""


def _read(fields: JsonObject) -> ModelConfig:
    for key in ("head_dim", "num_key_value_heads"):
        fields.integer(key)  # required: what transformers has by default does not depend on the number of heads
    heads = gqa.read(fields)
    factor = _rotary_factor(fields)
    rotary = rope.read(fields, {}, interleaved=False, partial=factor)
    if not (size := int(heads.head_dim * factor)) or size % 2:
        raise fields.error("head_dim", f"a number of which `partial_rotary_factor`, {factor}, is a positive, even one")
    heads = replace(heads, rotary=size, normed=True, gated=True)
    fields.choice("use_sliding_window", False, default=False)
    fields.choice("decoder_sparse_step", 1, default=1)
    fields.choice("mlp_only_layers", [], None, default=[])
    experts = qwen3.read_experts(fields, shared_size=fields.integer("shared_expert_intermediate_size"))
    config = read_config(fields, heads, rotary, (0, experts))
    # Layers of multi-token prediction have other weights than those that `speculative.py` describes.
    return replace(config, recurrent=_read_recurrent(fields), centred_norms=True, num_nextn_predict_layers=0)


def _rotary_factor(fields: JsonObject) -> float:
    """The part of a head that is rotated; if two keys state it, `rope.read` checks that they agree."""
    key, held = "partial_rotary_factor", fields
    spelling = fields.spelling("rope_parameters", "rope_scaling")
    if key not in fields and spelling in fields:
        held = fields.child(spelling)
    factor = held.number(key, default=ROTARY_FACTOR)
    if factor > 1:
        raise held.error(key, "at most 1")
    return factor


def _read_recurrent(fields: JsonObject) -> DeltaNet:
    groups, heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if heads % groups:
        raise fields.error("linear_num_key_heads", f"a divisor of the {heads} `linear_num_value_heads`")
    return DeltaNet(
        layers=_recurrent_layers(fields, fields.integer("num_hidden_layers")),
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=fields.integer("linear_key_head_dim"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        kernel_size=fields.integer("linear_conv_kernel_dim", least=2),
    )


def _recurrent_layers(fields: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Those of `layer_types` that are "linear_attention"; by default all but every `full_attention_interval`th."""
    kinds = "linear_attention", "full_attention"
    if "layer_types" in fields:
        key, types = "layer_types", fields.per_layer("layer_types", *kinds, count=num_layers)
    else:
        key = "full_attention_interval"
        every = fields.integer(key) if key in fields else INTERVAL
        types = [kinds[(layer + 1) % every == 0] for layer in range(num_layers)]
    if len({*types}) < len(kinds):
        raise fields.error(key, f"`layer_types` of both kinds among the {num_layers}, '{kinds[0]}' and '{kinds[1]}'")
    return tuple(layer for layer, kind in enumerate(types) if kind == kinds[0])


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    recurrent: Any = config.recurrent
    tree = layer_weights(_recurrent_weights if layer in recurrent.layers else _attention_weights, config, layer)
    weight, hidden = weight_of(layer), config.hidden_size
    experts: Any = config.experts
    shared = {
        "shared": swiglu_weights(weight, "mlp.shared_expert", hidden, experts.shared_intermediate_size),
        "shared_gate": weight("mlp.shared_expert_gate.weight", 1, hidden, expanded=True),
    }
    return {**tree, "mixture": {**tree["mixture"], **shared}}


def _attention_weights(config: ModelConfig, attention: GQA, weight) -> dict[str, Any]:
    return {
        **gqa.weights(config, attention, weight),
        # A head of queries, then its gate.
        "q": weight("self_attn.q_proj.weight", 2 * config.num_heads * attention.head_dim, config.hidden_size),
    }


def _recurrent_weights(config: ModelConfig, attention: GQA, weight) -> dict[str, Any]:
    recurrent: Any = config.recurrent
    hidden, heads = config.hidden_size, recurrent.num_value_heads
    values = heads * recurrent.value_head_dim
    return {
        "qkvz": weight("linear_attn.in_proj_qkvz.weight", recurrent.channels + values, hidden),
        "ba": weight("linear_attn.in_proj_ba.weight", 2 * heads, hidden),
        "conv": weight("linear_attn.conv1d.weight", recurrent.channels, 1, recurrent.kernel_size, expanded=True),
        "a_log": weight("linear_attn.A_log", heads, exact=True),
        "dt_bias": weight("linear_attn.dt_bias", heads, exact=True),
        "norm": weight("linear_attn.norm.weight", recurrent.value_head_dim),
        "o": weight("linear_attn.out_proj.weight", hidden, values),
    }


QWEN3_NEXT = Family(_read, _weights, pre_norm(delta_net_or(gqa.attention)), unused=r"mtp\..*")
