"""The configurations of the tiny models of `record.py`, and what is peculiar to the weights and files of a family."""

from typing import Any

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,  # the default special tokens lie outside so small a vocabulary
    "bos_token_id": None,
    "eos_token_id": None,
}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 128,  # one tile of the fp8_ds_mla format
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
MOE = {
    **MLA,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
# V3 scores a group by its two best experts: with four in a group, not by all.
V3 = {**MOE, "n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_mtp_layers": 0}
V3_2 = {name: value for name, value in V3.items() if name != "num_mtp_layers"}
GLM = {name: value for name, value in MOE.items() if name != "first_k_dense_replace"}  # its default is one, too
KIMI = {**V3, **NO_GROUPS, "num_hidden_layers": 2, "n_routed_experts": 8, "rms_norm_eps": 1e-5}
TWO_LAYERS = {"num_hidden_layers": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}

# family: (model type, what its configuration has that TINY has not)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "axk1": ("axk1", {**V3_2, **TWO_LAYERS}),
    "deepseek_v2": (
        "deepseek_v2",
        {**MOE, **GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        {
            **MOE,
            **NO_GROUPS,
            **TWO_LAYERS,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": ("deepseek_v3", V3),
    # Unequal, so that cos and sin get a factor of their own.
    "deepseek_v3_yarn": ("deepseek_v3", {**V3, **TWO_LAYERS, "rope_parameters": {**YARN, "mscale_all_dim": 0.8}}),
    "deepseek_v3_sharded": ("deepseek_v3", {**V3, **TWO_LAYERS, "rope_interleave": False}),
    "deepseek_v32": ("deepseek_v32", {**V3_2, "index_topk": 64, "index_n_heads": 8, "index_head_dim": 32}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**GLM, **NO_GROUPS, "v_head_dim": 24, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5},
    ),
    # Every kind of attention and of routing.  Windows end between blocks, queries see more compressed entries than the
    # indexer selects, and the limit of the experts' inner values is so low that it cuts some.
    "deepseek_v4": (
        "deepseek_v4",
        {
            "num_key_value_heads": 1,
            "head_dim": 96,  # 64 values and 32 that are rotated: one tile of formats of V4, and of V4.1
            "partial_rotary_factor": 1 / 3,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 12,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "sliding_window": 24,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "compress_rope_theta": 40000.0,
            "rope_parameters": {name: YARN[name] for name in YARN if not name.startswith("mscale")},
            "index_n_heads": 8,
            "index_head_dim": 32,
            "index_topk": 16,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "swiglu_limit": 1.5,
        },
    ),
    # The indexer's keys of layer 2 are the second ones of the cache: layer 1 has none.
    "glm5": (
        "glm_moe_dsa",
        {
            **GLM,
            **NO_GROUPS,
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "indexer_types": ["full", "shared", "full"],
            "v_head_dim": 24,
            "index_topk": 64,
            "index_n_heads": 8,
            "index_head_dim": 32,
        },
    ),
    "kimi": (
        "deepseek_v3",
        {
            **KIMI,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**YARN, "rope_theta": 50000.0, "beta_fast": 1},
        },
    ),
    # The text model inside a model for images, whose own weights are as small as they can be.
    "kimi_k25": (
        "kimi_k25",
        {
            "text_config": {
                **TINY,
                **KIMI,
                "model_type": "deepseek_v3",
                "routed_scaling_factor": 2.827,
                "rope_parameters": {**YARN, "rope_theta": 50000.0},
            },
            "vision_config": {
                "patch_size": 2,
                "pos_emb_height": 2,
                "pos_emb_width": 2,
                "pos_emb_time": 1,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "intermediate_size": 8,
            },
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
        },
    ),
    # A layer with latents between two with states, whose heads are fewer.  No layer has rotary embedding.
    "kimi_linear": (
        "kimi_linear",
        {
            **{name: size for name, size in MLA.items() if name != "q_lora_rank"},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
        },
    ),
    # Heads as Llama's below.  The window is shorter than a block, and two of three layers have it.
    "gpt_oss": (
        "gpt_oss",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 48,
            "swiglu_limit": 2.0,  # so low that it clamps
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # Three query heads per KV head, of a size that GPU kernels support.  The original length puts pairs of the rotary
    # embedding on both sides of the frequencies that are blended.
    "llama": (
        "llama",
        {
            **TWO_LAYERS,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # Four attentions, because a layer has two.  Tokens pass through 8 experts and 4 without weights.
    "longcat_flash": (
        "longcat_flash",
        {
            **MLA,
            "num_layers": 2,
            "head_dim": MLA["qk_rope_head_dim"],
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 3,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
        },
    ),
    # The original length is so short that most queries are scaled.
    "mistral4": (
        "mistral4",
        {
            **MOE,
            **TWO_LAYERS,
            "kv_lora_rank": 256,
            "qk_rope_head_dim": 16,
            "first_k_dense_replace": 0,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
        },
    ),
    "moonlight": (
        "deepseek_v3",
        {
            **V3,
            **NO_GROUPS,
            **TWO_LAYERS,
            "n_routed_experts": 8,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.446,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    # The query heads of a token have more values than the hidden size.  The head is the embedding.
    "qwen3": (
        "qwen3",
        {
            **TWO_LAYERS,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    # A dense layer, then one with experts.
    "qwen3_moe": (
        "qwen3_moe",
        {
            **TWO_LAYERS,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "decoder_sparse_step": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    # Two layers with states around one with attention.  Value heads of another size than key heads show which is which.
    "qwen3_next": (
        "qwen3_next",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    # One of the layers has no rotary embedding.
    "smollm3": (
        "smollm3",
        {
            **TWO_LAYERS,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "no_rope_layers": [1, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
        },
    ),
    "youtu": ("youtu", MLA),  # dense, and the head is the embedding
}

BIAS = {"longcat_flash": 0.02}
"""The size of biases, where it is not 0.25: smaller than the scores of a softmax, so that these also choose experts."""
CENTRED = {"qwen3_next"}
"""Families whose norms multiply by 1 + weight, but for those of states."""
LATENT_EPS = {"glm4_moe_lite", "glm_moe_dsa"}
"""Model types whose norms of latents have `rms_norm_eps`; see `jaxkv/models/families/glm4_moe_lite.py`."""
SHARDS = {"deepseek_v3_sharded": "290KB"}

# Families whose config.json gets the keys of the published checkpoints, and what these say besides.
PUBLISHED = {
    "deepseek_v2_lite": {"scoring_func": "softmax", "moe_layer_freq": 1},
    "kimi_k25": {"architectures": ["KimiK25ForConditionalGeneration"]},
    "kimi": {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "moonlight": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
}
TODAYS_KEYS = ("head_dim", "mlp_bias", "output_router_logits", "qk_head_dim", "rope_interleave")  # not in those
