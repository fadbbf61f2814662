"""GPT-OSS: experts in MXFP4, as published, and what a checkpoint may not have."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxkv import models
from models.checkpoints.folders import rejects
from models.checkpoints.published import PUBLISHED
from models.checkpoints.published_gqa import MXFP4
from models.compressed.quantised_checkpoint import write
from models.test_families import FILE, RECORDED, changed

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def decoded(blocks, scales):
    """Every value by itself, by the definition: float32 [experts, columns, rows], the order of plain checkpoints."""
    experts, rows, groups, _ = blocks.shape
    found = np.empty((experts, 32 * groups, rows), np.float32)
    for e, row, column in np.ndindex(experts, rows, 32 * groups):
        group, place = divmod(column, 32)
        code = blocks[e, row, group, place // 2] >> 4 * (place % 2) & 15
        value = np.ldexp(np.float32(E2M1[code & 7]), int(scales[e, row, group]) - 127)
        found[e, column, row] = -value if code & 8 else value
    return found


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Two checkpoints of a layer: with experts in MXFP4, and with the same values as plain floats."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("gpt_oss")
    values = json.loads((RECORDED / "gpt_oss" / "config.json").read_text())
    values |= {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1, "layer_types": None}
    hidden, size, small, whole = SIZES["hidden_size"], SIZES["intermediate_size"], {}, {}
    heads, kv = 6 * 64, 2 * 64
    plain = {
        "model.embed_tokens.weight": (97, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (97, hidden),
    }
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{n}_proj.weight": (rows, hidden) for n, rows in (("q", heads), ("k", kv), ("v", kv))},
        **{f"self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", heads), ("k", kv), ("v", kv), ("o", hidden))},
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.sinks": (6,),
        "mlp.router.weight": (3, hidden),
        "mlp.router.bias": (3,),
        "mlp.experts.gate_up_proj_bias": (3, 2 * size),
        "mlp.experts.down_proj_bias": (3, hidden),
    }
    plain |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    small |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in plain.items()}
    whole |= small
    for name, rows, columns in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
        full = f"model.layers.0.mlp.experts.{name}"
        blocks = rng.integers(0, 256, (3, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(118, 125, blocks.shape[:3], np.uint8)
        scales[0, 0, 0], scales[0, 1, 0] = 2, 252  # products with 0.5 and with 6 are just inside the range of float32
        small |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
        whole[full] = decoded(blocks, scales)
    for name, held, changes in (("small", small, {"quantization_config": MXFP4}), ("whole", whole, {})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**values, **changes}))
        safetensors.numpy.save_file(held, folder / name / FILE)
    return folder / "small", folder / "whole", small


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_have_the_bits_of_an_independent_decoder(quantised, dtype):
    small, whole, _ = quantised
    model, right = (models.load(folder, dtype=dtype) for folder in (small, whole))
    assert jax.tree.structure(model.params) == jax.tree.structure(right.params)
    both = zip(jax.tree.leaves_with_path(model.params), jax.tree.leaves(right.params), strict=True)
    for (path, found), expected in both:
        assert found.dtype == expected.dtype, path
        np.testing.assert_array_equal(found, expected, err_msg=jax.tree_util.keystr(path))
    gate = model.params["layers"][0]["mixture"]["experts"]["gate"]
    assert gate.shape == (3, 96, 64)
    assert len(np.unique(np.asarray(gate, np.float32))) > 20


def test_other_dtypes_of_the_same_bytes(quantised, tmp_path):
    small, _, weights = quantised
    views = {"_blocks": np.int8, "_scales": ml_dtypes.float8_e8m0fnu}
    same = {name: weight.view(views.get(name[-7:], weight.dtype)) for name, weight in weights.items()}
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    write(tmp_path / FILE, same)
    both = (models.load(folder).params for folder in (tmp_path, small))
    assert jax.tree.all(jax.tree.map(np.array_equal, *both))


def test_values_beyond_float16_are_rejected(quantised):
    rejects(quantised[0], "down_proj_blocks' holds", "times their scales beyond 65504", "float16", dtype="float16")


def test_damaged_mxfp4(quantised, tmp_path):
    small, _, weights = quantised
    blocks, scales = (f"model.layers.0.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())

    def refused(changes, *words):
        held = {name: value for name, value in {**weights, **changes}.items() if value is not None}
        safetensors.numpy.save_file(held, tmp_path / FILE)
        rejects(tmp_path, *words)

    refused({scales: None}, "lacks", scales, "MXFP4")
    refused({blocks: None}, "lacks", blocks, "MXFP4")
    refused({blocks: weights[blocks][:, :, :, :8].copy()}, blocks, "expected U8 or I8 (3, 64, 3, 16)")
    refused({scales: weights[scales].astype(np.float32)}, scales, "is F32", "expected U8 or F8_E8M0 (3, 64, 3)")
    refused({scales: np.full_like(weights[scales], 255)}, scales, "NaN")
    plain = np.zeros((3, 96, 64), np.float32)
    refused({"model.layers.0.mlp.experts.down_proj": plain}, "does not have", blocks)


def test_other_quantised_weights_are_rejected(tmp_path):
    for method in ("fp8", "gptq"):
        values = {"quantization_config": {"quant_method": method}}
        rejects(changed("gpt_oss", tmp_path, **values), f"`quantization_config.quant_method` is {method!r}", "'mxfp4'")
    with pytest.raises(ValueError, match=r"`quantization_config\.quant_method` is 'mxfp4'"):
        models.ModelConfig.from_json({**PUBLISHED["GLM-5"], "quantization_config": MXFP4})


def test_layers_with_a_window():
    config = models.ModelConfig.from_json(PUBLISHED["GPT-OSS"])
    assert config.attention.window == 128
    assert config.attention.windowed == tuple(range(0, 24, 2))
    every = models.ModelConfig.from_json({**PUBLISHED["GPT-OSS"], "layer_types": ["full_attention"] * 24})
    assert (every.attention.window, every.attention.windowed) == (None, ())
    for types in (["full_attention"] * 23, ["full_attention"] * 23 + ["chunked_attention"], "full_attention"):
        with pytest.raises(ValueError, match=re.escape("for each of 24 layers")):
            models.ModelConfig.from_json({**PUBLISHED["GPT-OSS"], "layer_types": types})
    with pytest.raises(ValueError, match="at most `num_local_experts`, which is 32"):
        models.ModelConfig.from_json({**PUBLISHED["GPT-OSS"], "num_experts_per_tok": 33})


def test_biases_are_not_divided():
    mesh = jax.make_mesh((1,), ("x",))
    for kind in (models.TensorParallel, models.ExpertParallel):
        with pytest.raises(ValueError, match="the model has biases"):
            models.load(RECORDED / "gpt_oss", parallel=kind(mesh, "x"))
