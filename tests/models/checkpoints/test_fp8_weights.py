"""Checkpoints with weights in float8 and a scale per tile: their models are those of the expanded weights."""

import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv.models.weights import fp8
from jaxkv.models.weights.safetensors_file import SafetensorsFile
from jaxkv_kernels.tile_scaled import TileScaled, rounded_to_e4m3
from models.checkpoints.fp8 import FILE, RECORDED, expanded, logits, recorded, tiled
from support.cases import further

WEIGHT = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(params=["deepseek_v3", further("deepseek_v32"), further("llama")])
def folders(request, tmp_path):
    """The same model with float8 weights, and with their values in float32."""
    return recorded(request.param, tmp_path)


def assert_near(found, right, bound):
    """The largest error is below the bound, as a fraction of the largest value."""
    assert np.abs(found - right).max() < bound * np.abs(right).max()


@pytest.mark.ci
def test_a_model_with_float8_weights_is_that_of_their_values(folders):
    small, whole = (jaxkv.models.load(folder, dtype="float32") for folder in folders)
    held = [leaf for leaf in jax.tree.leaves(small.params) if leaf.dtype == jnp.float8_e4m3fn]
    assert sum(leaf.size for leaf in held) > 0.5 * sum(leaf.size for leaf in jax.tree.leaves(whole.params["layers"]))
    assert_near(logits(small), logits(whole), 1e-5)


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_products_of_e4m3_numbers_are_less_accurate(folders):
    small, whole = folders
    right = logits(jaxkv.models.load(whole))
    model = jaxkv.models.load(small, fp8_weights="e4m3")
    found = logits(model)
    assert_near(found, right, 0.2)
    assert np.abs(found - right).max() > 1e-3 * np.abs(right).max()
    assert jaxkv.models.fingerprint(model) != jaxkv.models.fingerprint(jaxkv.models.load(small))


@pytest.mark.parametrize("size", [128, 256, 300])
def test_activations_as_e4m3_numbers(size):
    x = np.random.default_rng(0).standard_normal((3, size), np.float32) * np.float32([[1e-3], [1], [1e3]])
    x[1, :128] = 0
    right = np.empty_like(x)
    for row, start in np.ndindex(3, -(-size // 128)):
        some = x[row, start * 128 : (start + 1) * 128]
        scale = np.abs(some).max() / np.float32(448)
        scaled = (some / scale).astype(ml_dtypes.float8_e4m3fn) if scale else some
        right[row, start * 128 : (start + 1) * 128] = scaled.astype(np.float32) * scale
    found = np.asarray(rounded_to_e4m3(jnp.asarray(x)))
    assert_near(found, right, 1e-6)  # a division may be rounded differently, but no value by a step of e4m3
    assert np.abs(found - x).max() <= np.abs(x).max() / 16


def test_an_unknown_choice_is_rejected():
    with pytest.raises(ValueError, match="`fp8_weights` is 'bf16': expected 'dequantise' or 'e4m3' or 'expand'"):
        jaxkv.models.load(RECORDED / "deepseek_v3", fp8_weights="bf16")


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


def read(folder):
    """All weights, of any dtype."""
    with SafetensorsFile(folder / FILE) as file:
        return {name: file.read(name, tuple(slice(0, n) for n in of.shape)) for name, of in file.entries.items()}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("folders", ["deepseek_v3"], indirect=True)
def test_scales_of_other_dtypes_and_names(folders, dtype, suffix, tmp_path):
    folder, _ = folders
    weights = read(folder)
    for name in [name for name in weights if name.endswith("_scale_inv")]:
        weights[name.removesuffix("_scale_inv") + suffix] = weights.pop(name).astype(dtype)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    safetensors.numpy.save_file(weights, tmp_path / FILE)
    scales = weights[WEIGHT + suffix].astype(np.float32)
    for use in ("dequantise", "expand"):
        model = jaxkv.models.load(tmp_path, fp8_weights=use)
        found = model.params["layers"][0]["dense"]["gate"]
        right = expanded(weights[WEIGHT], scales)
        assert np.array_equal(found if use == "expand" else found.dequantised("float32"), right)
        if use == "dequantise":
            assert found.scales.dtype == np.float32


@pytest.mark.parametrize("use", ["dequantise", "expand"])
@pytest.mark.parametrize("folders", ["deepseek_v3"], indirect=True)
def test_values_times_scales_that_are_not_finite(folders, use, tmp_path):
    folder, _ = folders
    weights = read(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    largest = float(np.abs(weights[WEIGHT].astype(np.float32)).max())
    for scale, dtype, words in (
        (1.01 * 65520 / largest, "float16", "times their scales beyond 65504, the largest of float16"),
        (3e38, "float32", "infinite values of .* times their scales"),
        (np.inf, "float32", "_scale_inv' holds 1 infinite values of 1"),
        (0.99 * 65504 / largest, "float16", None),
    ):
        weights[f"{WEIGHT}_scale_inv"] = np.full((1, 1), scale, np.float32)
        safetensors.numpy.save_file(weights, tmp_path / FILE)
        if words is None:
            jaxkv.models.load(tmp_path, dtype=dtype, fp8_weights=use)
            continue
        with pytest.raises(
            ValueError, match=rf"^{re.escape(str(tmp_path / FILE))}: weight '{re.escape(WEIGHT)}.*{words}"
        ):
            jaxkv.models.load(tmp_path, dtype=dtype, fp8_weights=use)


def without(name):
    return lambda weights: weights.pop(name)


def with_(name, value):
    return lambda weights: weights.update({name: value})


SCALES = f"{WEIGHT}_scale_inv"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(SCALES), [WEIGHT, "F8_E4M3", "scales", "missing"]),
        (
            with_(SCALES, np.ones((2, 1), np.float32)),
            [SCALES, "is F32 (2, 1)", "expected F32 or BF16 or F16 or F8_E8M0 (1, 1)", "128 x 128"],
        ),
        (with_(SCALES, np.ones((1, 1), np.float64)), [SCALES, "is F64 (1, 1)", "expected F32"]),
        (with_(SCALES, np.ones((1, 1), np.uint8)), [SCALES, "is U8 (1, 1)", "expected F32"]),
        (with_(SCALES, np.full((1, 1), np.nan, np.float32)), [SCALES, "holds 1 NaN"]),
        (with_("model.norm.weight", np.ones(48, ml_dtypes.float8_e4m3fn)), ["model.norm.weight", "for a matrix"]),
        (with_("lm_head.weight_scale_inv", np.ones((1, 1), np.float32)), ["does not have", "lm_head.weight_scale_inv"]),
    ],
)
@pytest.mark.parametrize("folders", ["deepseek_v3"], indirect=True)
def test_wrong_scales_are_rejected(folders, change, words):
    folder, _ = folders
    weights = read(folder)
    change(weights)
    safetensors.numpy.save_file(weights, folder / FILE)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, [str(folder / FILE), *words]))) as error:
        jaxkv.models.load(folder)
    assert "\n" not in str(error.value)
