"""The keys of the recorded configurations: which may be absent, null, or anything at all, by family."""

Q_LATENT = {"deepseek_v32", "deepseek_v4", "glm5", "longcat_flash"}
"""Families that have no configuration without a latent of the queries."""

IGNORED = {
    "attention_dropout",
    "bos_token_id",
    "embedding_initializer_range",
    "head_dim",
    "initializer_range",
    "layer_types",
    "model_type",
    "num_key_value_heads",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "router_aux_loss_coef",
    "sliding_window",
    "transformers_version",
    "use_cache",
}
"""Keys of the recorded configurations on which no model depends."""
IGNORED_OBJECTS = {"vision_config"}
"""Objects of the recorded configurations on which no model depends."""
IGNORED_BESIDE = {
    "deepseek_v32": {"first_k_dense_replace"},  # has mlp_layer_types, too
    "deepseek_v4": {"router_jitter_noise"},
    "glm5": {"first_k_dense_replace"},
    "qwen3": {"max_window_layers"},  # without windows
    "smollm3": {"no_rope_layer_interval"},  # has no_rope_layers, too
    "kimi_k25": {
        "dtype",  # of the whole; the text model's is `torch_dtype`
        "image_token_id",
        "projection_hidden_size",
        "projection_layer_norm_eps",
        "text_config.tie_word_embeddings",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    },
    "deepseek_v2_lite": {"n_group", "topk_group"},  # greedy
}
NOT_IGNORED = {
    "deepseek_v4": {"head_dim", "layer_types", "num_key_value_heads", "sliding_window"},
    "gpt_oss": {"head_dim", "layer_types", "num_key_value_heads", "sliding_window"},
    "kimi_k25": {"text_config.model_type"},
    "kimi_linear": {"layer_types"},
    "llama": {"head_dim", "num_key_value_heads"},
    "longcat_flash": {"head_dim"},
    "qwen3": {"head_dim", "layer_types", "num_key_value_heads"},
    "qwen3_moe": {"head_dim", "num_key_value_heads"},
    "qwen3_next": {"head_dim", "layer_types", "num_key_value_heads"},
    "smollm3": {"head_dim", "num_key_value_heads"},
}
"""Keys on which models of a family depend all the same."""
ABSENT = {
    "attention_bias": False,
    "beta_fast": 32,
    "beta_slow": 1,
    "dtype": None,
    "eos_token_id": None,
    "hidden_act": "silu",
    "indexer_types": None,
    "mlp_bias": False,
    "mlp_layer_types": None,
    "moe_layer_freq": 1,
    "mscale": None,
    "mscale_all_dim": None,
    "num_nextn_predict_layers": 0,
    "rope_interleave": True,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_type": "default",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "torch_dtype": None,
    "truncate": True,
    "use_sliding_window": False,
}
"""What a key that may be absent stands for; all others are needed."""
ABSENT_IN = {
    "deepseek_v4": {
        "attention_factor": None,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "partial_rotary_factor": 1 / 3,
        "qk_rope_head_dim": 32,
    },
    "deepseek_v2": {"norm_topk_prob": False, "scoring_func": "softmax", "tie_word_embeddings": False},
    "deepseek_v2_lite": {"norm_topk_prob": False, "scoring_func": "softmax", "tie_word_embeddings": False},
    "gpt_oss": {
        "attention_bias": True,
        "dtype": "bfloat16",
        "head_dim": 48 // 6,
        "layer_types": None,
        "num_key_value_heads": 6,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "llama": {
        "head_dim": 48 // 6,
        "num_key_value_heads": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
    },
    "longcat_flash": {
        "dtype": "bfloat16",
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "rope_theta": 1e7,
    },
    "smollm3": {
        "head_dim": 48 // 6,
        "no_rope_layers": None,
        "num_key_value_heads": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e6},
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
    "mistral4": {"n_group": 1, "partial_rotary_factor": 0.5, "topk_group": 1},
    "qwen3": {"layer_types": ["full_attention"] * 2},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": {"decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.25},
    "youtu": {"tie_word_embeddings": True},
}
NEEDED_IN = {
    "deepseek_v4": {"mlp_layer_types", "scoring_func"},
    "deepseek_v2": {"topk_method"},
    "deepseek_v2_lite": {"topk_method"},
    "kimi_k25": {"tie_word_embeddings"},
    "mistral4": {"rope_parameters"},
}
NULLABLE = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "mlp_layer_types", "rope_parameters", "rope_scaling"}
NULLABLE |= {"dtype", "indexer_types", "num_nextn_predict_layers", "rope_type", "torch_dtype"}
"""Keys whose null stands for their absence."""
NULLABLE_IN = {
    "deepseek_v4": set(ABSENT_IN["deepseek_v4"]),
    "gpt_oss": NOT_IGNORED["gpt_oss"] - {"sliding_window"},
    "llama": NOT_IGNORED["llama"],
    "qwen3": {"layer_types"},
    "qwen3_moe": {"decoder_sparse_step", "mlp_only_layers"},
    "qwen3_next": {"layer_types", "mlp_only_layers"},
    "smollm3": {*NOT_IGNORED["smollm3"], "no_rope_layers"},
}
NEEDED_PATHS = {"rope_parameters.compress.partial_rotary_factor", "rope_parameters.main.partial_rotary_factor"}
"""Keys inside an object that are needed, although a key of the same name elsewhere is not."""
OTHER_NAMES = {
    "mlp_layer_types": "first_k_dense_replace",
    "num_local_experts": "num_experts",
    "rope_parameters": "rope_theta",
    "torch_dtype": "dtype",
}
"""What an error may name instead of an absent key: another spelling."""
