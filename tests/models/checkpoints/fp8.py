"""Checkpoints with weights in float8 and a scale per tile, as published, and the same with their values in float32."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

import jaxkv.models
from jaxkv.models.weights.parameters import parameters
from models.checkpoints.published import FP8

RECORDED = Path(__file__).parents[2] / "data" / "models"
FILE = "model.safetensors"
KEPT = re.compile(r"mlp\.gate\.|weights_proj|embed_tokens|shared_head")
"""The router, the indexer's weights of heads, and the MTP layer's copies of the embedding and the head."""
LARGER = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "v_head_dim": 64}
LARGER |= {"q_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16}
"""Sizes of which tensor parallelism over two devices cuts no tile."""


def tiled(shape, rng):
    """Random float8 numbers, and a scale per tile, as bits that no rounding helps to guess."""
    stored = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = 2.0 ** rng.uniform(-8, -3, [-(-size // 128) for size in shape])
    return stored, scales.astype(np.float32)


def expanded(stored, scales):
    """Every value by itself, by the definition."""
    values = np.empty(stored.shape, np.float32)
    for i, j in np.ndindex(stored.shape):
        values[i, j] = np.float32(stored[i, j]) * scales[i // 128, j // 128]
    return values


def save(folder, values, weights):
    """Writes `small`, with float8 weights, and `whole`, with their values in float32; returns both folders.

    As published, the products of the layers are in float8, but not those in `KEPT`.
    """
    rng, small, whole = np.random.default_rng(0), {}, {}
    for name, value in weights.items():
        if ".layers." in name and value.ndim == 2 and not KEPT.search(name):
            stored, scales = tiled(value.shape, rng)
            small[name], small[f"{name}_scale_inv"] = stored, scales
            rows, columns = value.shape
            factors = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:rows, :columns]
            whole[name] = stored.astype(np.float32) * factors
        else:
            small[name] = whole[name] = value
    for name, held, changes in (("small", small, {"quantization_config": FP8}), ("whole", whole, {})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**values, **changes}))
        safetensors.numpy.save_file(held, folder / name / FILE)
    return folder / "small", folder / "whole"


def recorded(family, folder):
    """The recorded model of a family, its products of layers replaced."""
    values = json.loads((RECORDED / family / "config.json").read_text())
    return save(folder, values, safetensors.numpy.load_file(RECORDED / family / FILE))


def larger(folder, family="deepseek_v3"):
    """A model of two layers with the sizes `LARGER` and random weights."""
    values = json.loads((RECORDED / family / "config.json").read_text())
    values |= {**LARGER, "num_hidden_layers": 2}
    config, rng = jaxkv.models.ModelConfig.from_json(values), np.random.default_rng(1)
    weights = {}
    for weight in jax.tree.leaves(parameters(config, mtp=False)):
        for name in weight.all_names():
            weights[name] = rng.standard_normal(weight.shape, np.float32) * np.float32(weight.shape[-1] ** -0.5)
    return save(folder, values, weights)


def logits(model):
    """The logits after a prompt of 20 tokens."""
    tables, lengths = np.asarray([[0, 1]], np.int32), np.asarray([20], np.int32)
    slots = np.arange(20, dtype=np.int32)[None]
    return np.asarray(
        jax.jit(jaxkv.models.prefill)(model, model.cache(2, 16), slots * 7 % 97, lengths, tables, slots)[1]
    )
