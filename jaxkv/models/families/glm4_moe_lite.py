"""GLM-4.7-Flash: DeepSeek V3 with `rms_norm_eps` as the epsilon of all norms, those of latents included.

Checkpoints of Z.ai have no modelling code.  The code with which Z.ai trains GLM-4.7-Flash and GLM-5 makes the norms of
latents with `layernorm_epsilon`, which must equal `rms_norm_eps` of config.json: `slime_plugins/models/glm5/glm5.py`
and `slime/backends/megatron_utils/arguments.py` of https://github.com/THUDM/slime at 624b824.  So do vLLM, SGLang, and
`Glm5NextTextAttention` of transformers, which Z.ai wrote.  transformers 5.24 has 1e-6 in `Glm4MoeLiteAttention` and
`GlmMoeDsaAttention`, although published checkpoints state 1e-5:
https://github.com/huggingface/transformers/pull/48762.
"""

from dataclasses import replace

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import deepseek
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import feed_forward, mla


def _read(fields: JsonObject) -> ModelConfig:
    return deepseek.read(fields, mla.read(fields, latent_eps=fields.number("rms_norm_eps")), feed_forward.read_experts)


GLM4_MOE_LITE = replace(deepseek.V3, read=_read)
