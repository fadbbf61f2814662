"""Checkpoints with weights in float8 and a scale per tile: their models are those of the expanded weights."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv.models.weights import fp8
from jaxkv.models.weights.safetensors_file import SafetensorsFile
from jaxkv_kernels.tile_scaled import TileScaled
from models.published import FP8

RECORDED = Path(__file__).parents[1] / "data" / "models"
FILE = "model.safetensors"
WEIGHT = "model.layers.0.mlp.gate_proj.weight"


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


@pytest.fixture(params=["deepseek_v3", "deepseek_v32", "llama"])
def folders(request, tmp_path):
    """The same model with float8 weights, and with their values in float32."""
    weights = safetensors.numpy.load_file(RECORDED / request.param / FILE)
    rng, small, whole = np.random.default_rng(0), {}, {}
    for name, value in weights.items():
        # As published: the products of the layers, but for the router and the indexer's weights of heads.
        if ".layers." in name and value.ndim == 2 and not re.search(r"mlp\.gate\.|weights_proj", name):
            small[name], small[f"{name}_scale_inv"] = tiled(value.shape, rng)
            whole[name] = expanded(small[name], small[f"{name}_scale_inv"])
        else:
            small[name] = whole[name] = value
    for folder, held, changes in (("small", small, {"quantization_config": FP8}), ("whole", whole, {})):
        (tmp_path / folder).mkdir()
        values = json.loads((RECORDED / request.param / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(json.dumps({**values, **changes}))
        safetensors.numpy.save_file(held, tmp_path / folder / FILE)
    return tmp_path / "small", tmp_path / "whole"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_can_be_expanded(folders, dtype):
    small, whole = (jaxkv.models.load(folder, dtype=dtype, fp8_weights="expand") for folder in folders)
    assert jax.tree.structure(small) == jax.tree.structure(whole)
    assert jax.tree.all(jax.tree.map(np.array_equal, small.params, whole.params))
    assert jaxkv.models.fingerprint(small) == jaxkv.models.fingerprint(whole)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 513)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tiles_at_the_edges(shape, dtype):
    stored, scales = tiled(shape, np.random.default_rng(1))
    assert fp8.scale_shape(shape) == scales.shape
    found = TileScaled(jnp.asarray(stored), jnp.asarray(scales)).dequantised(dtype)
    assert found.dtype == dtype
    assert np.array_equal(found, expanded(stored, scales).astype(dtype))


def test_weights_of_multi_token_prediction_and_their_scales_are_skipped(tmp_path):
    folder = shutil.copytree(RECORDED / "deepseek_v3", tmp_path, dirs_exist_ok=True)
    weights, rng = safetensors.numpy.load_file(folder / FILE), np.random.default_rng(0)
    last = {name: value for name, value in weights.items() if ".layers.2." in name}
    for name, value in last.items():
        weights[name.replace(".layers.2.", ".layers.3.")] = value
    extra = "model.layers.3.eh_proj.weight"
    weights[extra], weights[f"{extra}_scale_inv"] = tiled((48, 96), rng)
    safetensors.numpy.save_file(weights, folder / FILE)
    model, right = jaxkv.models.load(folder), jaxkv.models.load(RECORDED / "deepseek_v3")
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, right.params))


def without(name):
    return lambda weights: weights.pop(name)


def with_(name, value):
    return lambda weights: weights.update({name: value})


SCALES = f"{WEIGHT}_scale_inv"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(SCALES), [WEIGHT, "F8_E4M3", "scales", "missing"]),
        (with_(SCALES, np.ones((2, 1), np.float32)), [SCALES, "is F32 (2, 1)", "expected F32 (1, 1)", "128 x 128"]),
        (with_(SCALES, np.ones((1, 1), np.float16)), [SCALES, "is F16 (1, 1)", "expected F32 (1, 1)"]),
        (with_(SCALES, np.full((1, 1), np.nan, np.float32)), [SCALES, "holds 1 NaN"]),
        (with_("model.norm.weight", np.ones(48, ml_dtypes.float8_e4m3fn)), ["model.norm.weight", "for a matrix"]),
        (with_("lm_head.weight_scale_inv", np.ones((1, 1), np.float32)), ["does not have", "lm_head.weight_scale_inv"]),
    ],
)
@pytest.mark.parametrize("folders", ["deepseek_v3"], indirect=True)
def test_wrong_scales_are_rejected(folders, change, words):
    folder, _ = folders
    with SafetensorsFile(folder / FILE) as file:
        weights = {name: file.read(name, tuple(slice(0, n) for n in of.shape)) for name, of in file.entries.items()}
    change(weights)
    safetensors.numpy.save_file(weights, folder / FILE)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, [str(folder / FILE), *words]))) as error:
        jaxkv.models.load(folder)
    assert "\n" not in str(error.value)
