"""The supported families of models.  Each has a file here, and each architecture an entry in `FAMILIES`."""

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import (
    axk1,
    deepseek,
    deepseek_v4,
    glm4_moe_lite,
    glm5,
    gpt_oss,
    kimi_k25,
    kimi_linear,
    llama,
    longcat_flash,
    mistral4,
    qwen3,
    qwen3_next,
    smollm3,
    youtu,
)
from jaxkv.models.families.family import Family as Family
from jaxkv.models.json_object import JsonObject

FAMILIES: dict[str, Family] = {
    "AXK1ForCausalLM": axk1.AXK1,
    "DeepseekV2ForCausalLM": deepseek.V2,
    "DeepseekV3ForCausalLM": deepseek.V3,  # also used by checkpoints of Moonlight and Kimi-K2
    "DeepseekV32ForCausalLM": deepseek.V32,
    "DeepseekV4ForCausalLM": deepseek_v4.DEEPSEEK_V4,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.GLM4_MOE_LITE,
    "GlmMoeDsaForCausalLM": glm5.GLM5,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "KimiK25ForConditionalGeneration": kimi_k25.KIMI_K25,  # in published checkpoints
    "Kimi_K25ForConditionalGeneration": kimi_k25.KIMI_K25,  # in those that transformers saves
    "KimiLinearForCausalLM": kimi_linear.KIMI_LINEAR,
    "LlamaForCausalLM": llama.LLAMA,
    "LongcatFlashForCausalLM": longcat_flash.LONGCAT_FLASH,
    "Mistral3ForConditionalGeneration": mistral4.MISTRAL4_WITH_IMAGES,
    "Mistral4ForCausalLM": mistral4.MISTRAL4,
    "Qwen3ForCausalLM": qwen3.QWEN3,
    "Qwen3MoeForCausalLM": qwen3.QWEN3_MOE,
    "Qwen3NextForCausalLM": qwen3_next.QWEN3_NEXT,
    "SmolLM3ForCausalLM": smollm3.SMOLLM3,
    "YoutuForCausalLM": youtu.YOUTU,
}
"""Families by the architecture that `config.json` names."""

WITH_HEAD, WITHOUT_HEAD = "ForCausalLM", "Model"
"""How transformers ends the names of architectures.  A `LlamaModel` has no head, but is a language model all the same
if the head is tied to the embedding."""
FAMILIES |= {
    name.removesuffix(WITH_HEAD) + WITHOUT_HEAD: family for name, family in FAMILIES.items() if name.endswith(WITH_HEAD)
}


def family_of(fields: JsonObject) -> Family:
    """The family of a `config.json`; ValueError if its architecture is not supported."""
    names = fields.value("architectures")
    if names not in [[name] for name in FAMILIES]:
        shown = (name for name in FAMILIES if not name.endswith(WITHOUT_HEAD))
        raise fields.error("architectures", f"a list of one of {', '.join(shown)}")
    return FAMILIES[names[0]]


ModelConfig.family_of = staticmethod(family_of)
