"""Kimi Linear: its configuration, and the arrangement of its weights."""

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxkv import MLAEntry, StateEntry, models
from models.checkpoints.published_gqa import KIMI_LINEAR
from models.test_families import FILE, RECORDED, changed, rejects


def test_published_keys():
    config = models.ModelConfig.from_json(KIMI_LINEAR)
    full = [3, 7, 11, 15, 19, 23, 26]
    assert config.recurrent.layers == tuple(layer for layer in range(27) if layer not in full)
    assert config.recurrent.channel_decays
    assert config.recurrent.state == StateEntry(
        {"conv": ((3, 3 * 32 * 128), "float32"), "delta": ((32, 128, 128), "float32")}
    )
    assert (config.attention.rotated, config.attention.rotary_dim, config.num_attentions) == (False, 0, 7)
    assert (config.num_dense_layers, config.experts.scoring, config.max_position_embeddings) == (1, "sigmoid", 1048576)
    layout = jax.eval_shape(lambda: models.random_model(config)).layout(4)
    assert layout["kv"].entry == MLAEntry("bf16", latent=512, rope=64)


def test_keys_of_transformers_say_the_same():
    held = KIMI_LINEAR["linear_attn_config"]
    kinds = ["full_attention" if layer in held["full_attn_layers"] else "linear_attention" for layer in range(1, 28)]
    own = {
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "mlp_layer_types": ["dense", *["sparse"] * 26],
    }
    values = {name: value for name, value in KIMI_LINEAR.items() if name not in ("linear_attn_config", "mla_use_nope")}
    assert models.ModelConfig.from_json({**values, **own}) == models.ModelConfig.from_json(KIMI_LINEAR)


def test_convolutions_are_joined():
    weights = safetensors.numpy.load_file(RECORDED / "kimi_linear" / FILE)
    layers = models.load(RECORDED / "kimi_linear").params["layers"]
    parts = [weights[f"model.layers.2.self_attn.{name}_conv1d.weight"] for name in "qkv"]
    np.testing.assert_array_equal(layers[2]["attention"]["conv"], np.concatenate(parts))
    gate = weights["model.layers.1.block_sparse_moe.experts.5.w1.weight"]
    np.testing.assert_array_equal(layers[1]["mixture"]["experts"]["gate"][5], gate)


LINEAR = {"full_attn_layers": [2], "head_dim": 16, "kda_layers": [1, 3], "num_heads": 3, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3}, ["`layer_types`", "each kind"]),
        ({"layer_types": ["linear_attention", "full_attention", "mamba"]}, ["`layer_types`", "each of 3 layers"]),
        ({"linear_attn_config": {**LINEAR, "kda_layers": [1]}}, ["`linear_attn_config.kda_layers` is [1]", "1 to 3"]),
        ({"linear_attn_config": {**LINEAR, "full_attn_layers": 2}}, ["`linear_attn_config.kda_layers`", "1 to 3"]),
        ({"linear_attn_config": {**LINEAR, "gate_lower_bound": -5.0}}, ["gate_lower_bound` is -5.0", "None"]),
        ({"linear_attn_config": {**LINEAR, "use_full_rank_gate": True}}, ["use_full_rank_gate` is True"]),
        ({"mla_use_nope": False}, ["`mla_use_nope` is False"]),
        ({"mla_use_output_gate": True}, ["`mla_use_output_gate` is True"]),
        ({"moe_router_activation_func": "softmax"}, ["`moe_router_activation_func` is 'softmax'"]),
        ({"num_experts_per_token": 9}, ["`num_experts_per_token` is 9", "8 experts"]),
    ],
)
def test_unsupported_configurations_are_rejected(tmp_path, values, words):
    values = values if "layer_types" in values else {"layer_types": None, "linear_attn_config": LINEAR, **values}
    rejects(changed("kimi_linear", tmp_path, **values), "config.json", *words)
