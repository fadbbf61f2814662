"""DeepSeek-V4 with weights in float8 and FP4, as published: the model of their values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv import models
from jaxkv_kernels.tile_scaled import TileScaled
from models.checkpoints.folders import rejects
from models.compressed.quantised_checkpoint import FILE, save, write
from models.compressed.test_deepseek_v4 import tables_of

EXPERT, DENSE = "layers.1.ffn.experts.2.w2", "layers.0.attn.wq_b"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The quantised checkpoint, that of its values in float32, and the weights of the former."""
    return save(tmp_path_factory.mktemp("v4"))


def logits(model):
    """The logits after a prompt of 200 tokens."""
    tables, slots = tables_of(model, 1)
    prompt = np.random.default_rng(1).integers(0, 97, (1, 200), np.int32)
    lengths = jnp.asarray([200], jnp.int32)
    return np.asarray(jax.jit(models.prefill)(model, model.cache(1000, 16), prompt, lengths, tables, slots)[1])


def test_weights_in_float8_stay_so(folders):
    small, whole = (models.load(folder, dtype="float32").params for folder in folders[:2])
    layer = small["layers"][1]
    assert layer["attention"]["q"].values.dtype == jnp.float8_e4m3fn
    assert layer["mixture"]["shared"]["down"].values.dtype == jnp.float8_e4m3fn
    assert layer["mixture"]["experts"]["down"].values.dtype == jnp.float8_e4m3fn

    def expanded(weight):
        return weight.dequantised("float32") if isinstance(weight, TileScaled) else weight

    small = jax.tree.map(expanded, small, is_leaf=lambda weight: isinstance(weight, TileScaled))
    assert jax.tree.all(jax.tree.map(np.array_equal, small, whole))


@pytest.mark.slow  # compiles two programs; the weights are compared above
def test_the_model_is_that_of_the_values(folders):
    found, right = (logits(models.load(folder, dtype="float32")) for folder in folders[:2])
    assert np.abs(found - right).max() < 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_expanded_weights_have_the_bits_of_an_independent_decoder(folders, dtype):
    small, whole = (models.load(folder, dtype=dtype, fp8_weights="expand") for folder in folders[:2])
    both = zip(jax.tree.leaves_with_path(small.params), jax.tree.leaves(whole.params), strict=True)
    for (path, found), expected in both:
        assert found.dtype == expected.dtype, path
        np.testing.assert_array_equal(found, expected, err_msg=jax.tree_util.keystr(path))


def test_experts_whose_exponents_differ_too_much_can_be_expanded(folders, tmp_path):
    small, _, weights = folders
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    for least, works in ((2.0**-17, True), (2.0**-18, False)):  # the largest scales are 2**-5, but for the first
        scales = weights[f"{EXPERT}.scale"].copy()
        scales[0, 0], scales[1, 0] = 2.0**-3, least
        packed = weights[f"{EXPERT}.weight"].copy()
        packed[:2] = 0x71  # 0.5, and 6
        write(tmp_path / FILE, {**weights, f"{EXPERT}.scale": scales, f"{EXPERT}.weight": packed})
        expanded = models.load(tmp_path, dtype="float32", fp8_weights="expand")
        right = expanded.params["layers"][1]["mixture"]["experts"]["down"][2]
        assert right[:2, :2].tolist() == [[2.0**-4, 6 * 2.0**-3], [least / 2, 6 * least]]
        if works:
            found = models.load(tmp_path, dtype="float32").params["layers"][1]["mixture"]["experts"]["down"]
            np.testing.assert_array_equal(found.dequantised("float32")[2], right)
        else:
            rejects(tmp_path, EXPERT, "float8", "expand")


def test_damaged_weights(folders, tmp_path):
    small, _, weights = folders
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())

    def refused(changes, *words):
        held = {name: value for name, value in {**weights, **changes}.items() if value is not None}
        write(tmp_path / FILE, held)
        rejects(tmp_path, *words)

    for name, kind in ((EXPERT, "I8"), (DENSE, "F8_E4M3")):
        scales = weights[f"{name}.scale"]
        refused({f"{name}.scale": None}, f"{name}.weight", kind, "scales", "missing")
        refused({f"{name}.scale": scales.astype(np.float32)[:, :1]}, f"{name}.scale", "is F32", "expected", "F8_E8M0")
        spoilt = scales.copy()
        spoilt[0, 0] = np.nan
        refused({f"{name}.scale": spoilt}, f"{name}.scale", "holds 1 NaN")
    refused({f"{EXPERT}.scale": weights[f"{EXPERT}.scale"].astype(np.float32)}, f"{EXPERT}.scale", "is F32")
    refused({f"{EXPERT}.weight": weights[f"{EXPERT}.weight"][:, :16].copy()}, "is I8 (160, 16)", "U8 or I8 (160, 32)")
    refused({f"{DENSE}.weight": weights[f"{DENSE}.weight"].view(np.int8)}, f"{DENSE}.weight", "has dtype I8")
    refused({"layers.0.attn.wkv.weight_scale_inv": np.ones((1, 2), np.float32)}, "does not have", "wkv.")


@pytest.mark.parametrize(("scales", "ids"), [(np.float32, np.int64), (ml_dtypes.bfloat16, np.int32)])
def test_other_dtypes_of_auxiliary_tensors(folders, scales, ids, tmp_path):
    small, _, weights = folders

    def other(name, value):
        if ".experts." in name:
            return value.view(np.uint8)  # FP4 values, and their scales
        return value.astype(scales if name.endswith(".scale") else ids if "tid2eid" in name else value.dtype)

    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    write(tmp_path / FILE, {name: other(name, value) for name, value in weights.items()})
    both = (models.load(folder, dtype="float32").params for folder in (tmp_path, small))
    assert jax.tree.all(jax.tree.map(np.array_equal, *both))


@pytest.mark.parametrize("use", ["dequantise", "expand"])
def test_values_times_scales_that_are_not_finite(folders, use, tmp_path):
    small, _, weights = folders
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    for name, scale, dtype, words in (
        (EXPERT, 2.0**15, "float16", "times their scales beyond 65504, the largest of float16"),
        (EXPERT, 2.0**127, "float32", "infinite"),
        (DENSE, 2.0**16, "float16", "times their scales beyond 65504, the largest of float16"),
        (DENSE, 2.0**127, "float32", "infinite"),
    ):
        scales = weights[f"{name}.scale"].copy()
        scales[0, 0] = scale
        write(tmp_path / FILE, {**weights, f"{name}.scale": scales})
        rejects(tmp_path, f"weight '{name}.weight' holds", words, dtype=dtype, fp8_weights=use)
