"""Qwen3, dense or with experts: grouped-query attention that normalises each head of queries and keys."""

from dataclasses import replace
from functools import partial

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.families.family import Family, layer_weights, read_config
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import gqa, rope
from jaxkv.models.layers.block import pre_norm


def _read(fields: JsonObject) -> ModelConfig:
    return _read_with(fields, None)


def _read_moe(fields: JsonObject) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers")
    dense = _num_dense_layers(fields, num_layers)
    return _read_with(fields, (dense, read_experts(fields) if dense < num_layers else None))


def _read_with(fields: JsonObject, layers: tuple[int, Experts | None] | None) -> ModelConfig:
    for key in ("head_dim", "num_key_value_heads"):
        fields.integer(key)  # required: the defaults of transformers are the sizes of certain models
    fields.choice("use_sliding_window", False, default=False)
    if "layer_types" in fields:
        fields.per_layer("layer_types", "full_attention", count=fields.integer("num_hidden_layers"))
    attention = replace(gqa.read(fields), normed=True)
    rotary = rope.read(fields, {"yarn": rope.read_yarn}, interleaved=False)
    return read_config(fields, attention, rotary, layers, biases=attention.biases)


def _num_dense_layers(fields: JsonObject, num_layers: int) -> int:
    """The number of leading dense layers: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th."""
    step_key, only_key = "decoder_sparse_step", "mlp_only_layers"
    step = fields.integer(step_key) if step_key in fields else 1
    only = fields.value(only_key) if only_key in fields else []
    if not isinstance(only, list) or not all(type(one) is int and 0 <= one < num_layers for one in only):
        raise fields.error(only_key, f"a list of layers from 0 to {num_layers - 1}")
    dense = [layer in only or (layer + 1) % step != 0 for layer in range(num_layers)]
    if sorted(dense, reverse=True) != dense:
        key = only_key if step == 1 else step_key
        raise fields.error(key, f"a value by which dense ones of {num_layers} layers come before those with experts")
    return sum(dense)


def read_experts(fields: JsonObject, *, shared_size: int = 0) -> Experts:
    """Experts chosen by a softmax, and a shared expert of `shared_size` inner values, if any."""
    key = fields.spelling("num_experts", "num_local_experts")  # transformers writes the second for Qwen3
    count, per_token = fields.integer(key), fields.integer("num_experts_per_tok")
    if per_token > count:
        raise fields.error("num_experts_per_tok", f"at most the {count} experts")
    return Experts(
        count=count,
        per_token=per_token,
        scoring="softmax",
        normalize=fields.flag("norm_topk_prob"),
        scale=1.0,
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=shared_size,
    )


QWEN3 = Family(_read, partial(layer_weights, gqa.weights), pre_norm(gqa.attention))
QWEN3_MOE = replace(QWEN3, read=_read_moe)
