"""The configuration and weights of multi-head latent attention."""

from typing import Any

from jaxkv.models.config import MLA, ModelConfig
from jaxkv.models.json_object import JsonObject

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents in most families, whatever `rms_norm_eps` of config.json is.

Published modelling code makes these norms without an epsilon, so that they have the default of their class, while the
other norms get `rms_norm_eps`:

- `modeling_deepseek.py` of deepseek-ai/DeepSeek-V2 and V3, and of moonshotai/Moonlight-16B-A3B, Kimi-K2 and Kimi-K2.5.
  Moonlight and Kimi-K2.5 state an `rms_norm_eps` of 1e-5.
- `inference/model.py` of deepseek-ai/DeepSeek-V3.2, which has 1e-6 for all norms.
- `modeling_kimi.py` of moonshotai/Kimi-Linear-48B-A3B and `modeling_longcat_flash.py` of
  meituan-longcat/LongCat-Flash-Chat, which both state an `rms_norm_eps` of 1e-5.

transformers 5.24 does the same in all of its models with latents except GLM-5-Next and DeepSeek-V4.  For A.X K1,
Mistral 4 and Youtu, whose `rms_norm_eps` is 1e-6, nothing else is known.  vLLM and SGLang use `rms_norm_eps` for all
models.
"""


def read(fields: JsonObject, *, q_latent: bool = False, latent_eps: float = LATENT_EPS) -> MLA:
    """Reads the ranks and head sizes; the result has no indexer.

    Args:
      fields: the object of `config.json` that describes the text model.
      q_latent: whether to reject a `q_lora_rank` of null, which stands for queries without a latent.
      latent_eps: epsilon of the norms of latents; see `LATENT_EPS` and `rms_norm_eps`.
    """
    if q_latent and fields.value("q_lora_rank") is None:
        raise fields.error("q_lora_rank", "an integer: models of this architecture make queries from a latent")
    rope_head_dim = fields.integer("qk_rope_head_dim", least=2)
    if rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number: rotary embedding rotates pairs")
    return MLA(
        # Null if queries have no latent.  The key is required, because families differ in what its absence means.
        q_lora_rank=None if fields.value("q_lora_rank") is None else fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_head_dim,
        v_head_dim=fields.integer("v_head_dim"),
        latent_eps=latent_eps,
    )


def weights(config: ModelConfig, attention: MLA, weight) -> dict[str, Any]:
    """The weights of the attention; `weight` as in `decoder.weights`."""
    hidden, heads = config.hidden_size, config.num_heads
    latent, nope, value = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.v_head_dim
    q_size = heads * (nope + attention.qk_rope_head_dim)
    tree: dict[str, Any] = {
        "kv_a": weight("self_attn.kv_a_proj_with_mqa.weight", latent + attention.qk_rope_head_dim, hidden),
        "kv_a_norm": weight("self_attn.kv_a_layernorm.weight", latent),
        "kv_b": weight("self_attn.kv_b_proj.weight", heads * (nope + value), latent, expanded=True),
        "o": weight("self_attn.o_proj.weight", hidden, heads * value),
    }
    if attention.q_lora_rank is None:
        return {**tree, "q": weight("self_attn.q_proj.weight", q_size, hidden)}
    tree["q_a"] = weight("self_attn.q_a_proj.weight", attention.q_lora_rank, hidden)
    tree["q_a_norm"] = weight("self_attn.q_a_layernorm.weight", attention.q_lora_rank)
    tree["q"] = weight("self_attn.q_b_proj.weight", q_size, attention.q_lora_rank)
    return tree


def arrange(config: ModelConfig, attention: MLA, layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with `kv_b` split into W_UK and W_UV, as absorbed attention needs them.

    For each head, `kv_b` has the rows of W_UK and then those of W_UV.
    """
    tree = dict(layer["attention"])
    kv_b = tree.pop("kv_b")
    kv_b = kv_b.reshape(config.num_heads, -1, attention.kv_lora_rank)
    tree["w_uk"], tree["w_uv"] = kv_b[:, : attention.qk_nope_head_dim], kv_b[:, attention.qk_nope_head_dim :]
    return {**layer, "attention": tree}
