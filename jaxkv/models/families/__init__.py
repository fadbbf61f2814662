"""The families of models that are supported: one file each, and one line here per architecture."""

from jaxkv.models.families import deepseek, llama, youtu
from jaxkv.models.families.family import Family as Family
from jaxkv.models.json_object import JsonObject

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek.V2,
    "DeepseekV3ForCausalLM": deepseek.V3,  # Moonlight's and Kimi-K2's checkpoints, too
    "DeepseekV32ForCausalLM": deepseek.V32,
    "Glm4MoeLiteForCausalLM": deepseek.V3,
    "LlamaForCausalLM": llama.LLAMA,
    "YoutuForCausalLM": youtu.YOUTU,
}
"""By the architecture that `config.json` names."""


def family_of(fields: JsonObject) -> Family:
    """The family of a `config.json`; ValueError if its architecture is not supported."""
    names = fields.value("architectures")
    if names not in [[name] for name in FAMILIES]:
        raise fields.error("architectures", f"a list of one of {', '.join(FAMILIES)}")
    return FAMILIES[names[0]]
