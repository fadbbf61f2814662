"""DeepSeek V2, V3 and V3.2, and models like V3: R1, Moonlight, Kimi-K2 (the text model).

MLA and a mixture of experts.  V2 chooses experts by softmax scores, V3 by sigmoid scores with a bias; V3.2 attends to
the tokens that its indexer selects.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxkv.models.config import MLA, Experts, Indexer, ModelConfig
from jaxkv.models.families.family import Family, layer_weights, read_config
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import feed_forward, mla, rope
from jaxkv.models.layers.block import pre_norm, pre_norm_store


def _read_v2(fields: JsonObject) -> ModelConfig:
    return read(fields, mla.read(fields), _experts_v2)


def _read_v3(fields: JsonObject) -> ModelConfig:
    return read(fields, mla.read(fields), feed_forward.read_experts)


def _read_v32(fields: JsonObject) -> ModelConfig:
    attention = mla.read(fields, q_latent=True)  # the indexer's queries are made from it, too
    return read(fields, replace(attention, indexer=read_indexer(fields, attention)), feed_forward.read_experts)


def read(fields: JsonObject, attention: MLA, read_experts, outer: JsonObject | None = None) -> ModelConfig:
    """The configuration of a model with this attention; `read_experts(fields)` reads its experts.

    `outer` is as in `read_config`.
    """
    layers = feed_forward.read_layers(fields, read_experts)
    return read_config(fields, attention, rope.read_with_yarn(fields), layers, outer=outer)


def _experts_v2(fields: JsonObject) -> Experts:
    grouped = fields.choice("topk_method", "greedy", "group_limited_greedy") != "greedy"
    fields.choice("norm_topk_prob", False, default=False)
    return feed_forward.read_routing(fields, "softmax", grouped=grouped, normalize=False)


def read_indexer(fields: JsonObject, attention: MLA) -> Indexer:
    """The indexer of V3.2, for this attention."""
    head_dim = fields.integer("index_head_dim")
    if head_dim < attention.rotary_dim:
        raise fields.error("index_head_dim", f"at least `qk_rope_head_dim`, which is {attention.rotary_dim}")
    return Indexer(heads=fields.integer("index_n_heads"), head_dim=head_dim, topk=fields.integer("index_topk"))


def _attention_weights(config: ModelConfig, attention: MLA, weight) -> dict[str, Any]:
    """The weights of MLA and, for V3.2 and GLM-5, of the indexer."""
    tree, indexer, prefix = mla.weights(config, attention, weight), attention.indexer, "self_attn.indexer"
    if indexer is not None:
        tree["indexer"] = {
            "q": weight(f"{prefix}.wq_b.weight", indexer.heads * indexer.head_dim, attention.q_lora_rank),
            "k": weight(f"{prefix}.wk.weight", indexer.head_dim, config.hidden_size),
            "k_norm": weight(f"{prefix}.k_norm.weight", indexer.head_dim),
            "k_norm_bias": weight(f"{prefix}.k_norm.bias", indexer.head_dim),
            "weights": weight(f"{prefix}.weights_proj.weight", indexer.heads, config.hidden_size, lossless=True),
        }
    return tree


V3 = Family(
    _read_v3,
    partial(layer_weights, _attention_weights),
    pre_norm(mla.attention),
    mla.convert_weights,
    store=pre_norm_store(mla.store),
)
V2 = replace(V3, read=_read_v2)
V32 = replace(V3, read=_read_v32)
