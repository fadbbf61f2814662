"""A checkpoint of DeepSeek-V4 as published, float8 with powers of two as scales and FP4 experts, and its values."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jaxkv.models import ModelConfig
from jaxkv.models.weights.parameters import parameters

RECORDED = Path(__file__).parents[2] / "data" / "models" / "deepseek_v4"
FILE = "model.safetensors"
CONFIG = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
SIZES = {"hidden_size": 160, "moe_intermediate_size": 64, "q_lora_rank": 136, "n_routed_experts": 4}
"""More than one tile, and experts whose rows are whole groups of 32 values."""
FLOAT8 = re.compile(r"attn\.(indexer\.)?(wq_a|wq_b|wkv|wo_a|wo_b)\.weight|shared_experts")
EXPERT = re.compile(r"\.experts\.\d")
NAMES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8"}
NAMES |= {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write(file, weights):
    """A safetensors file, written here because the library's NumPy interface lacks these dtypes."""
    header, start = {}, 0
    for name, value in weights.items():
        offsets = [start, start + value.nbytes]
        header[name] = {"dtype": NAMES[value.dtype.name], "shape": value.shape, "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header).encode()
    contents = [np.ascontiguousarray(value).view(np.uint8).tobytes() for value in weights.values()]
    file.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *contents]))


def powers(rng, shape, low, high):
    return (2.0 ** rng.integers(low, high, shape)).astype(ml_dtypes.float8_e8m0fnu)


def float8(rng, shape):
    """Numbers, scales, and every value by itself, by the definition."""
    stored = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = powers(rng, [-(-size // 128) for size in shape], -7, -3)
    places = np.ix_(*(np.arange(size) // 128 for size in shape))
    return stored, scales, stored.astype(np.float32) * scales.astype(np.float32)[places]


def float4(rng, shape):
    """The same of an expert, two numbers per byte."""
    codes = rng.integers(0, 16, shape)
    scales = powers(rng, (shape[0], shape[1] // 32), -7, -4)
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * np.repeat(scales.astype(np.float32), 32, axis=1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8), scales, values.astype(np.float32)


def save(folder):
    """The folders of both checkpoints, and the weights of the first."""
    values = {**json.loads((RECORDED / "config.json").read_text()), **SIZES}
    config, rng = ModelConfig.from_json(values), np.random.default_rng(0)
    small, whole = {}, {}
    for weight in jax.tree.leaves(parameters(config, mtp=False)):
        for name in weight.all_names():
            make = float8 if FLOAT8.search(name) else float4 if EXPERT.search(name) else None
            if make is not None:
                small[name], small[name.replace(".weight", ".scale")], whole[name] = make(rng, weight.shape)
            elif weight.below:
                small[name] = whole[name] = np.stack(
                    [rng.permutation(weight.below)[: weight.shape[1]] for _ in range(weight.shape[0])]
                )
            else:
                value = rng.standard_normal(weight.shape, np.float32) * np.float32(weight.shape[-1] ** -0.5)
                small[name] = whole[name] = value
    for name, held, changes in (("small", small, CONFIG), ("whole", whole, {})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**values, **changes}))
        write(folder / name / FILE, held)
    return folder / "small", folder / "whole", small
