"""Reading checkpoints: what is not supported, and weights that are missing, misshapen or NaN, are told by name."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import jaxkv.models

RECORDED = Path(__file__).parents[1] / "data" / "models"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of a checkpoint, to be spoilt."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(RECORDED / "deepseek_v3" / name, tmp_path)
    return tmp_path


def configure(folder, **changes):
    """Changes fields of config.json; None removes them."""
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def spoil(folder, change):
    """Writes the weights again as `change` makes them."""
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def refuses(folder, *words, **options):
    """Loading raises a ValueError with all of the words."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        jaxkv.models.load(folder, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["'LlamaForCausalLM'", "DeepseekV3ForCausalLM", "YoutuForCausalLM"]),
        ({"architectures": None}, ["`architectures`", "None"]),
        ({"kv_lora_rank": None}, ["no `kv_lora_rank`"]),
        ({"hidden_act": "gelu"}, ["`hidden_act` is 'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["`attention_bias` is True", "False"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["`quantization_config`", "unquantised"]),
        ({"topk_method": "greedy"}, ["`topk_method` is 'greedy'", "'noaux_tc'"]),
        ({"scoring_func": "softmax"}, ["`scoring_func` is 'softmax'", "'sigmoid'"]),
        ({"n_group": 5}, ["`n_group` is 5", "12"]),
        ({"num_experts_per_tok": 9}, ["`num_experts_per_tok` is 9", "8 experts"]),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, ["`mlp_layer_types`", "dense ones first"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["`rope_type` is 'linear'", "'yarn'"]),
    ],
)
def test_configurations_that_are_not_supported(folder, changes, words):
    configure(folder, **changes)
    refuses(folder, *words)


def test_a_folder_without_a_checkpoint(tmp_path):
    refuses(tmp_path, str(tmp_path), "config.json")
    shutil.copy(RECORDED / "deepseek_v3" / "config.json", tmp_path)
    refuses(tmp_path, str(tmp_path), "model.safetensors")


def test_a_missing_weight(folder):
    spoil(folder, lambda weights: weights.pop(GATE))
    refuses(folder, "lacks 1 of", GATE)


def test_a_missing_shard(tmp_path):
    for file in (RECORDED / "deepseek_v3_sharded").glob("*.*"):
        shutil.copy(file, tmp_path)
    (shard, *_) = sorted(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    refuses(tmp_path, shard.name)


def test_a_misshapen_weight(folder):
    spoil(folder, lambda weights: weights.update({GATE: weights[GATE][:, 1:].copy()}))
    refuses(folder, GATE, "(16, 47)", "(16, 48)")


def test_a_weight_of_integers(folder):
    spoil(folder, lambda weights: weights.update({GATE: weights[GATE].astype(np.int8)}))
    refuses(folder, GATE, "I8", "BF16, F16 or F32")


def test_nan_in_a_weight(folder):
    def change(weights):
        weights[GATE][5, 7] = np.nan

    spoil(folder, change)
    refuses(folder, GATE, "1 NaN of 768")


def test_arguments(folder):
    refuses(folder, "`dtype`", "int8", "bfloat16", dtype="int8")
    refuses(folder, "MLAEntry format 'fp4'", "fp8_ds_mla", entry_format="fp4")
    configure(folder, kv_lora_rank=96)
    refuses(folder, "fp8_ds_mla", "128", "96", entry_format="fp8_ds_mla")


def test_the_dtype_asked_for_and_the_progress(folder):
    taken = []

    def progress(pieces):
        for piece in pieces:
            taken.append(piece)
            yield piece

    model = jaxkv.models.load(folder, dtype="bfloat16", progress=progress)
    _, mixture = model.params["stacks"]
    assert mixture["attention"]["w_uk"].dtype == "bfloat16"
    assert mixture["mixture"]["router"].dtype == "float32"
    assert model.layout(2).entry.format == "bf16"
    assert len(taken) == 3 + 12 + 2 * 17  # of no layer, of the dense one, of the two with experts


def test_kv_b_proj_is_split_by_head():
    model = jaxkv.models.load(RECORDED / "youtu")
    weights = safetensors.numpy.load_file(RECORDED / "youtu" / "model.safetensors")
    (stack,) = model.params["stacks"]
    rows = weights["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, 16 + 12, 128)
    assert np.array_equal(stack["attention"]["w_uk"][1], rows[:, :16])
    assert np.array_equal(stack["attention"]["w_uv"][1], rows[:, 16:])


def test_older_spellings_of_rope_mean_the_same(folder):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}
    configure(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **yarn})
    new = jaxkv.models.ModelConfig.read(folder)
    configure(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "yarn", **yarn})
    assert jaxkv.models.ModelConfig.read(folder) == new
    assert new.rope.yarn.factor == 4
