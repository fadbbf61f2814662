"""Grouped-query attention, which includes multi-head attention (one KV head per query head)."""

from typing import Any

from jaxkv.models.config import GQA, ModelConfig
from jaxkv.models.json_object import JsonObject


def read(fields: JsonObject) -> GQA:
    """Reads the number of KV heads (default: that of query heads), the head size (default: hidden_size / heads), and
    whether there are biases (`attention_bias`, default false).
    """
    biases = fields.flag("attention_bias", default=False)
    heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads") if "num_key_value_heads" in fields else heads
    if heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} `num_attention_heads`")
    if "head_dim" not in fields:
        hidden = fields.integer("hidden_size")
        if hidden % (2 * heads):
            raise fields.error("hidden_size", f"a multiple of 2 x {heads} `num_attention_heads`, or a `head_dim`")
        return GQA(num_kv_heads, hidden // heads, biases)
    head_dim = fields.integer("head_dim")
    if head_dim % 2:
        raise fields.error("head_dim", "an even number: rotary embedding rotates pairs")
    return GQA(num_kv_heads, head_dim, biases)


def weights(config: ModelConfig, attention: GQA, weight) -> dict[str, Any]:
    """The weights of the attention; `weight` as in `decoder.weights`."""
    hidden = config.hidden_size
    q_size, kv_size = (heads * attention.head_dim for heads in (config.num_heads, attention.num_kv_heads))
    tree = {
        "q": weight("self_attn.q_proj.weight", q_size, hidden),
        "k": weight("self_attn.k_proj.weight", kv_size, hidden),
        "v": weight("self_attn.v_proj.weight", kv_size, hidden),
        "o": weight("self_attn.o_proj.weight", hidden, q_size),
    }
    if attention.biases:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
        tree |= {f"{name}_bias": weight(f"self_attn.{name}_proj.bias", size) for name, size in sizes.items()}
    return tree
