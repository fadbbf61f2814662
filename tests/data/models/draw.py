"""Drawn configurations: tiny ones of every family, with all values that the family's reader supports."""

from typing import Any

import numpy as np

Draw = np.random.Generator


def among(rng: Draw, *choices: Any) -> Any:
    """One of `choices`."""
    return choices[rng.integers(len(choices))]


def between(rng: Draw, least: int, most: int) -> int:
    """An integer from `least` to `most`."""
    return int(rng.integers(least, most + 1))


def even(rng: Draw, least: int, most: int) -> int:
    """An even one, of even bounds."""
    return 2 * between(rng, least // 2, most // 2)


def common(rng: Draw) -> dict[str, Any]:
    """What all families have.  The stop tokens say nothing about logits, but have to be read."""
    vocab, heads = between(rng, 40, 130), between(rng, 1, 6)
    return {
        "vocab_size": vocab,
        "hidden_size": heads * even(rng, 6, 14) if rng.random() < 0.7 else heads * between(rng, 5, 15),
        "intermediate_size": between(rng, 9, 80),
        "num_hidden_layers": between(rng, 1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": between(rng, 128, 600),
        "rms_norm_eps": among(rng, 1e-6, 1e-5, 1e-4),
        "tie_word_embeddings": bool(rng.random() < 0.3),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": among(rng, None, vocab - 1, [vocab - 1, 3]),
    }


def mla(rng: Draw, *, q_latent: bool = False) -> dict[str, Any]:
    """The ranks and head sizes of latent attention."""
    return {
        "q_lora_rank": between(rng, 5, 40) if q_latent or rng.random() < 0.7 else None,
        "kv_lora_rank": between(rng, 8, 130),
        "qk_nope_head_dim": between(rng, 3, 24),
        "qk_rope_head_dim": even(rng, 2, 16),
        "v_head_dim": between(rng, 3, 24),
    }


def routing(rng: Draw, *, groups: bool = True) -> dict[str, Any]:
    """Experts with the routing of DeepSeek V3: of groups with two or more each, if there are several."""
    number = between(rng, 1, 4) if groups else 1
    in_group = between(rng, 2, 4)
    kept = between(rng, 1, number)
    return {
        "n_routed_experts": number * in_group,
        "n_shared_experts": between(rng, 1, 2),
        "num_experts_per_tok": between(rng, 1, kept * in_group),
        "moe_intermediate_size": between(rng, 5, 30),
        "n_group": number,
        "topk_group": kept,
        "norm_topk_prob": bool(rng.random() < 0.7),
        "routed_scaling_factor": among(rng, 1.0, 2.5, 0.7),
    }


def dense_first(rng: Draw, config: dict[str, Any], *, types: bool) -> dict[str, Any]:
    """How many layers are dense, under either key."""
    count = config["num_hidden_layers"]
    dense = between(rng, 0, count)
    if types:
        return {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (count - dense)}
    return {"first_k_dense_replace": dense}


def plain_rope(rng: Draw) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": among(rng, 1e4, 5e5, 123.0)}


def yarn(rng: Draw) -> dict[str, Any]:
    """YaRN, with the factors of attention in all of their combinations."""
    values = {
        "rope_type": "yarn",
        "rope_theta": among(rng, 1e4, 5e5),
        "factor": among(rng, 1.0, 4.0, 16.0, 40.0),
        "original_max_position_embeddings": among(rng, 16, 32, 64),
    }
    if rng.random() < 0.7:
        values |= {"beta_fast": among(rng, 32, 4), "beta_slow": among(rng, 1, 2)}
    values |= among(
        rng,
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {"mscale": 1.0, "mscale_all_dim": 0.8},
        {"mscale_all_dim": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"attention_factor": 1.2},
    )
    return values | among(rng, {}, {"truncate": False}, {"truncate": True})


def llama3(rng: Draw) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": among(rng, 1e4, 5e5),
        "factor": among(rng, 1.0, 8.0, 32.0),
        "low_freq_factor": among(rng, 1.0, 0.5),
        "high_freq_factor": among(rng, 4.0, 2.0),
        "original_max_position_embeddings": among(rng, 16, 64),
    }


def rope(rng: Draw) -> dict[str, Any]:
    """That of most families with latents: default or YaRN."""
    return {"rope_parameters": plain_rope(rng) if rng.random() < 0.4 else yarn(rng)}


def interleave(rng: Draw) -> dict[str, Any]:
    return {"rope_interleave": bool(rng.random() < 0.7)}


def indexer(rng: Draw, rotary: int) -> dict[str, Any]:
    """The sparse indexer; prompts are longer than most of its selections."""
    return {
        "index_topk": between(rng, 4, 40),
        "index_n_heads": between(rng, 2, 8),
        "index_head_dim": rotary + between(rng, 0, 24),
    }


def _mixed(rng: Draw, count: int, *kinds: str) -> list[str]:
    """The kinds of `count` layers, each kind at least once."""
    order = [*kinds, *(among(rng, *kinds) for _ in range(count - len(kinds)))]
    return [order[i] for i in rng.permutation(count)]


def deepseek_v2(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), **mla(rng), **routing(rng), **rope(rng)}
    for name in ("kv_lora_rank", "qk_nope_head_dim"):  # torch views pairs of what follows as complex numbers
        config[name] += config[name] % 2
    if rng.random() < 0.5:
        config |= {"topk_method": "greedy"}
        config["num_experts_per_tok"] = between(rng, 1, config["n_routed_experts"])
    else:
        config |= {"topk_method": "group_limited_greedy"}
    return {**config, "norm_topk_prob": False, **dense_first(rng, config, types=False)}


def deepseek_v3(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), **mla(rng), **routing(rng), **rope(rng), **interleave(rng)}
    return {**config, **dense_first(rng, config, types=False), "num_mtp_layers": between(rng, 0, 1)}


def deepseek_v32(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), **mla(rng, q_latent=True), **routing(rng), **rope(rng)}
    return {**config, **dense_first(rng, config, types=True), **indexer(rng, config["qk_rope_head_dim"])}


def glm4_moe_lite(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), **mla(rng), **routing(rng), **rope(rng), **interleave(rng)}
    return {**config, **dense_first(rng, config, types=True)}


def glm5(rng: Draw) -> dict[str, Any]:
    config = {**deepseek_v32(rng), "n_group": 1, "topk_group": 1}
    config["num_experts_per_tok"] = between(rng, 1, config["n_routed_experts"])
    rest = [among(rng, "full", "shared") for _ in range(config["num_hidden_layers"] - 1)]
    return {**config, "indexer_types": ["full", *rest]}


def axk1(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), **mla(rng, q_latent=True), **routing(rng), **rope(rng), **interleave(rng)}
    return {**config, **dense_first(rng, config, types=True)}


def youtu(rng: Draw) -> dict[str, Any]:
    return {**common(rng), **mla(rng), **rope(rng), **interleave(rng)}


def mistral4(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), **mla(rng), **routing(rng, groups=False), **interleave(rng)}
    scaling = {**yarn(rng), "llama_4_scaling_beta": among(rng, 0.1, 0.5)}
    return {**config, "rope_parameters": scaling, **dense_first(rng, config, types=False)}


def mistral3(rng: Draw) -> dict[str, Any]:
    """Mistral 4 inside a model for images, whose own weights are as small as they can be."""
    images = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "patch_size": 2,
        "image_size": 4,
    }
    text = {**mistral4(rng), "model_type": "mistral4"}
    return {"text_config": text, "vision_config": images, "tie_word_embeddings": text["tie_word_embeddings"]}


def kimi_k25(rng: Draw) -> dict[str, Any]:
    images = {
        "patch_size": 2,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
        "pos_emb_time": 1,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 8,
    }
    text = {**deepseek_v3(rng), "model_type": "deepseek_v3"}
    text["q_lora_rank"] = (
        text["q_lora_rank"] or 8
    )  # without one, transformers mistakes `q_proj` for the images' model's
    return {
        "text_config": text,
        "vision_config": images,
        "projection_hidden_size": 16,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def longcat_flash(rng: Draw) -> dict[str, Any]:
    held, attention = common(rng), mla(rng, q_latent=True)
    inner, layers = held.pop("intermediate_size"), held.pop("num_hidden_layers")
    experts, zero = between(rng, 2, 8), between(rng, 0, 5)
    return {
        **held,
        **attention,
        **rope(rng),
        "head_dim": attention["qk_rope_head_dim"],
        "num_layers": min(layers, 2),
        "ffn_hidden_size": inner,
        "expert_ffn_hidden_size": between(rng, 5, 30),
        "moe_topk": between(rng, 2, experts + zero),  # transformers fails with one
        "n_routed_experts": experts,
        "zero_expert_num": zero,
        "routed_scaling_factor": among(rng, 1.0, 6.0),
    }


def kimi_linear(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), **mla(rng), **routing(rng), "num_hidden_layers": between(rng, 2, 4)}
    config["num_local_experts"] = config.pop("n_routed_experts")
    return {
        **config,
        "tie_word_embeddings": False,  # heads of transformers are never tied, whatever the key says
        **dense_first(rng, config, types=True),
        "layer_types": _mixed(rng, config["num_hidden_layers"], "linear_attention", "full_attention"),
        "linear_num_heads": between(rng, 1, 4),
        "linear_head_dim": between(rng, 4, 20),
        "linear_conv_kernel_dim": between(rng, 2, 5),
    }


def _heads(rng: Draw, config: dict[str, Any]) -> dict[str, Any]:
    """Grouped-query attention."""
    heads = config["num_attention_heads"]
    divisors = [size for size in range(1, heads + 1) if heads % size == 0]
    return {"num_key_value_heads": among(rng, *divisors), "head_dim": even(rng, 4, 24)}


def qwen3_next(rng: Draw) -> dict[str, Any]:
    config = {**common(rng), "num_hidden_layers": between(rng, 2, 4)}
    factor, keys = among(rng, 0.25, 0.5, 1.0), between(rng, 1, 3)
    experts = between(rng, 2, 8)
    return {
        **config,
        **_heads(rng, config),
        "head_dim": 8 * between(rng, 1, 3),
        "rope_parameters": {**plain_rope(rng), "partial_rotary_factor": factor},
        "layer_types": _mixed(rng, config["num_hidden_layers"], "linear_attention", "full_attention"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * between(rng, 1, 2),
        "linear_key_head_dim": between(rng, 4, 18),
        "linear_value_head_dim": between(rng, 4, 18),
        "linear_conv_kernel_dim": between(rng, 2, 5),
        "num_experts": experts,
        "num_experts_per_tok": between(rng, 1, experts),
        "moe_intermediate_size": between(rng, 5, 30),
        "shared_expert_intermediate_size": between(rng, 5, 30),
        "norm_topk_prob": bool(rng.random() < 0.7),
    }


def qwen3(rng: Draw) -> dict[str, Any]:
    config = common(rng)
    return {**config, **_heads(rng, config), **rope(rng), "attention_bias": bool(rng.random() < 0.3)}


def qwen3_moe(rng: Draw) -> dict[str, Any]:
    config, experts = qwen3(rng), between(rng, 2, 8)
    layers = config["num_hidden_layers"]
    # Dense layers come first: by their numbers, or because the step ends with the last layer, or after it.
    steps = {"decoder_sparse_step": layers}, {"decoder_sparse_step": layers + 1}
    kinds = {"mlp_only_layers": [*range(between(rng, 0, layers))]}, *steps
    return {
        **config,
        **among(rng, *kinds),
        "num_experts": experts,
        "num_experts_per_tok": between(rng, 1, experts),
        "moe_intermediate_size": between(rng, 5, 30),
        "norm_topk_prob": bool(rng.random() < 0.7),
    }


def gpt_oss(rng: Draw) -> dict[str, Any]:
    config = common(rng)
    experts = between(rng, 2, 8)
    return {
        **config,
        **_heads(rng, config),
        **rope(rng),
        "layer_types": [among(rng, "sliding_attention", "full_attention") for _ in range(config["num_hidden_layers"])],
        "sliding_window": between(rng, 3, 40),
        "num_local_experts": experts,
        "num_experts_per_tok": between(rng, 1, experts),
        "swiglu_limit": among(rng, 7.0, 1.5),
        "swiglu_alpha": among(rng, 1.702, 1.0),
    }


def llama(rng: Draw) -> dict[str, Any]:
    config = common(rng)
    heads = _heads(rng, config)
    if config["hidden_size"] // config["num_attention_heads"] % 2 == 0 and rng.random() < 0.5:
        del heads["head_dim"]
    return {**config, **heads, "rope_parameters": among(rng, plain_rope, llama3)(rng)}


def smollm3(rng: Draw) -> dict[str, Any]:
    config = common(rng)
    rotated = [between(rng, 0, 1) for _ in range(config["num_hidden_layers"])]
    choice = among(rng, {"no_rope_layers": rotated}, {"no_rope_layer_interval": between(rng, 1, 3)})
    return {**config, **_heads(rng, config), **choice, "rope_parameters": plain_rope(rng)}


def deepseek_v4(rng: Draw) -> dict[str, Any]:
    held = common(rng)
    del held["intermediate_size"]  # would be that of the experts
    heads, layers, experts = held["num_attention_heads"], held["num_hidden_layers"], between(rng, 2, 8)
    rotary = even(rng, 2, 16)
    head_dim = rotary * between(rng, 2, 4)
    hashed = between(rng, 0, layers)
    compressed = "compressed_sparse_attention", "heavily_compressed_attention"
    kinds = _mixed(rng, layers, among(rng, *compressed))
    kinds = [among(rng, kind, "sliding_attention", *compressed) if i else kind for i, kind in enumerate(kinds)]
    scaling = yarn(rng) if rng.random() < 0.5 else plain_rope(rng)
    return {
        **held,
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "partial_rotary_factor": rotary / head_dim,
        "q_lora_rank": between(rng, 5, 40),
        "o_groups": among(rng, *(size for size in range(1, heads + 1) if heads % size == 0)),
        "o_lora_rank": between(rng, 3, 16),
        "layer_types": [kinds[i] for i in rng.permutation(layers)],
        "sliding_window": between(rng, 3, 40),
        "compress_rates": {compressed[0]: among(rng, 2, 4, 8), compressed[1]: among(rng, 8, 16, 12)},
        "compress_rope_theta": among(rng, 4e4, 1e4),
        "rope_parameters": {name: scaling[name] for name in scaling if not name.startswith(("mscale", "truncate"))},
        "index_n_heads": between(rng, 2, 8),
        "index_head_dim": rotary + between(rng, 0, 24),
        "index_topk": between(rng, 2, 16),
        "hc_mult": between(rng, 1, 4),
        "hc_sinkhorn_iters": between(rng, 1, 6),
        "hc_eps": among(rng, 1e-6, 1e-4),
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "n_routed_experts": experts,
        "num_experts_per_tok": between(rng, 1, experts),
        "moe_intermediate_size": between(rng, 5, 30),
        "routed_scaling_factor": among(rng, 1.0, 1.5),
        "swiglu_limit": among(rng, 10.0, 1.0),
    }


# family: (model type, the function that draws a configuration)
DRAWS = {
    draw.__name__: (model_type, draw)
    for model_type, draw in (
        ("axk1", axk1),
        ("deepseek_v2", deepseek_v2),
        ("deepseek_v3", deepseek_v3),
        ("deepseek_v32", deepseek_v32),
        ("deepseek_v4", deepseek_v4),
        ("glm4_moe_lite", glm4_moe_lite),
        ("glm_moe_dsa", glm5),
        ("gpt_oss", gpt_oss),
        ("kimi_k25", kimi_k25),
        ("kimi_linear", kimi_linear),
        ("llama", llama),
        ("longcat_flash", longcat_flash),
        ("mistral3", mistral3),
        ("mistral4", mistral4),
        ("qwen3", qwen3),
        ("qwen3_moe", qwen3_moe),
        ("qwen3_next", qwen3_next),
        ("smollm3", smollm3),
        ("youtu", youtu),
    )
}
