"""Record paged-decode truth from the MLA models of Hugging Face transformers.

Every family is built offline from its configuration, tiny, with random float64 weights. Three requests of
different lengths each prefill all tokens but the last and then decode the last one with the cache. What the
attention layers of that decode step saw and returned is written to `<family>.npz` next to this file:

    q_latent      [layers, requests, heads, R]  the query's nope part, absorbed through W_UK
    q_pe          [layers, requests, heads, P]  the query's rotated part, in the order the cache keeps k_pe
    kv_c          [layers, tokens, R]           the model's cached latents, requests concatenated
    k_pe          [layers, tokens, P]           the model's cached rotary keys, requests concatenated
    cu_seq_lens   [requests + 1]                where each request starts and ends in kv_c and k_pe (int32)
    w_uv          [layers, heads, V, R]         the value half of kv_b_proj
    out           [layers, requests, heads, V]  the model's own attention output, before o_proj
    scale         []                            the softmax scale the model passed (float64)
    versions      []                            the versions that made the file (string)

Models and attention run in float64 (norms and rotations round to float32 inside the models); arrays are stored
as float32, but for scale. No file is written unless absorbed attention over the cache reproduces its `out`, and
decoding with the cache reproduces the logits of the whole sequence.

Run it on Python 3.11 in an environment of its own, with the CPU build of torch:

    uv venv --python 3.11 /tmp/huggingface
    uv pip install --python /tmp/huggingface --torch-backend cpu torch==2.13.0 transformers==5.23.0
    /tmp/huggingface/bin/python tests/data/huggingface/record.py

Running it again with the same versions on the same machine gives the same bytes.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

LENGTHS = (5, 33, 70)  # tokens in the cache of each request once its last token is decoded

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2560,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "pad_token_id": None,  # the default special tokens lie outside so small a vocabulary
    "bos_token_id": None,
    "eos_token_id": None,
}
DENSE = {"first_k_dense_replace": 2}  # experts would add nothing here: no attention layer comes after the last MLP
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}

# family: (model type, what its configuration has that TINY has not)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", DENSE),
    "deepseek_v3": ("deepseek_v3", {**DENSE, "kv_lora_rank": 128, "qk_rope_head_dim": 16}),
    "deepseek_v3_yarn": ("deepseek_v3", {**DENSE, "rope_parameters": YARN}),
    "deepseek_v3_no_q_lora": ("deepseek_v3", {**DENSE, "q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "dense"]}),
    "minicpm3": ("minicpm3", {"kv_lora_rank": 64, "qk_rope_head_dim": 32}),
    "youtu": ("youtu", {}),
}

# What the latest call of each attention layer was given and returned, by layer index.
seen: dict[int, dict[str, Any]] = {}


def recording_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """The stock attention of transformers over expanded keys and values, noting the last query and its output."""
    out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    seen[module.layer_idx] = {"query": query[0, :, -1], "out": out[0, -1], "scale": scaling}
    return out, weights


def build(family: str) -> torch.nn.Module:
    """A float64 model of the family, its weights large enough for attention to have preferences."""
    model_type, changes = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="recording").double().eval()
    torch.manual_seed(zlib.crc32(family.encode()))
    for weight in model.parameters():
        weight.normal_(0, 0.25) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    return model


def require_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raise unless the two agree to a tolerance relative to the largest expected value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


def decode_last(model: torch.nn.Module, tokens: torch.Tensor) -> Any:
    """Decode the last token over a cache of the others, leave the step in `seen`, and return the cache."""
    whole = model(tokens, use_cache=False)
    prefill = model(tokens[:, :-1], use_cache=True)
    step = model(tokens[:, -1:], past_key_values=prefill.past_key_values, use_cache=True)
    # DeepSeek-V2 rotates queries and keys in float32, which rounds differently with the number of tokens.
    require_close(step.logits, whole.logits[:, -1:], 1e-6 if model.config.model_type == "deepseek_v2" else 1e-9)
    return step.past_key_values


def record_layer(attention: torch.nn.Module, cache: Any) -> dict[str, torch.Tensor]:
    """What one layer of one request's decode step saw and returned, in the absorbed form."""
    step, entry = seen[attention.layer_idx], cache.layers[attention.layer_idx]
    nope, value = attention.qk_nope_head_dim, attention.v_head_dim
    w_kv = attention.kv_b_proj.weight.view(attention.num_heads, nope + value, attention.kv_lora_rank)
    w_uk, w_uv = w_kv[:, :nope], w_kv[:, nope:]
    kv_c, k_pe = entry.keys[0, 0], entry.values[0, 0]
    q_latent = torch.einsum("hn,hnr->hr", step["query"][:, :nope], w_uk)
    q_pe = step["query"][:, nope:]

    scores = (q_latent @ kv_c.T + q_pe @ k_pe.T) * step["scale"]
    absorbed = torch.einsum("hr,hvr->hv", scores.softmax(-1) @ kv_c, w_uv)
    require_close(absorbed, step["out"], 1e-12)
    return {"q_latent": q_latent, "q_pe": q_pe, "kv_c": kv_c, "k_pe": k_pe, "w_uv": w_uv, "out": step["out"]}


def record(family: str) -> dict[str, np.ndarray]:
    """All arrays of one family's file."""
    model = build(family)
    layers = [layer.self_attn for layer in model.model.layers]
    requests = []  # requests[i][name] is [layers, ...]
    scales = set()
    for length in LENGTHS:
        tokens = torch.randint(TINY["vocab_size"], (1, length))
        cache = decode_last(model, tokens)
        steps = [record_layer(attention, cache) for attention in layers]
        requests.append({name: torch.stack([step[name] for step in steps]) for name in steps[0]})
        scales.update(step["scale"] for step in seen.values())
    (scale,) = scales  # one for the whole model

    arrays = {name: torch.stack([request[name] for request in requests], 1) for name in ("q_latent", "q_pe", "out")}
    arrays |= {name: torch.cat([request[name] for request in requests], 1) for name in ("kv_c", "k_pe")}
    arrays["w_uv"] = requests[0]["w_uv"]
    return {
        **{name: array.numpy().astype(np.float32) for name, array in arrays.items()},
        "cu_seq_lens": np.cumsum((0, *LENGTHS), dtype=np.int32),
        "scale": np.float64(scale),
        "versions": np.array(f"transformers {transformers.__version__}, torch {torch.__version__}"),
    }


@torch.no_grad()
def main() -> None:
    """Write one file per family."""
    torch.set_num_threads(1)
    AttentionInterface.register("recording", recording_attention)
    AttentionMaskInterface.register("recording", sdpa_mask)
    for family in FAMILIES:
        path = Path(__file__).with_name(f"{family}.npz")
        np.savez(path, **record(family))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
