"""Reading checkpoints: missing, damaged and unsupported parts are rejected, with the file and the key or weight."""

import itertools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import jaxkv.models
from jaxkv.models.weights import safetensors_file
from models.published import FP8, LLAMA_2, LLAMA_3, LLAMA_ROPE, MXFP4, PUBLISHED, PUBLISHED_V2, YARN

RECORDED = Path(__file__).parents[1] / "data" / "models"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
EMBED = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def copied(family, folder):
    """A copy of a checkpoint, which the test may corrupt."""
    shutil.copytree(RECORDED / family, folder, ignore=shutil.ignore_patterns("truth.npz"), dirs_exist_ok=True)
    return folder


@pytest.fixture
def folder(tmp_path):
    """One file of weights."""
    return copied("deepseek_v3", tmp_path)


@pytest.fixture
def shards(tmp_path):
    """Two files of weights, and an index."""
    return copied("deepseek_v3_sharded", tmp_path)


def configure(folder, **changes):
    """Changes fields of config.json; None removes them."""
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def spoil(folder, change, file="model.safetensors"):
    """Writes the weights again as `change` makes them."""
    weights = safetensors.numpy.load_file(folder / file)
    change(weights)
    safetensors.numpy.save_file(weights, folder / file)


def spoil_index(folder, change):
    """Writes the index again with the weight map as `change` makes it."""
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def assert_same(model, other):
    """Every weight is equal."""
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, other.params))


def rejects(folder, *words, **options):
    """Loading raises a ValueError of one line with all of the words."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))) as error:
        jaxkv.models.load(folder, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            ["'MistralForCausalLM'", "DeepseekV3ForCausalLM", "YoutuForCausalLM"],
        ),
        ({"architectures": None}, ["no `architectures`"]),
        ({"kv_lora_rank": None}, ["no `kv_lora_rank`"]),
        ({"hidden_act": "gelu"}, ["`hidden_act` is 'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["`attention_bias` is True", "False"]),
        ({"quantization_config": "fp8"}, ["`quantization_config` is 'fp8'", "an object"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["`quantization_config.quant_method` is 'awq'", "'fp8'"]),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, ["`quantization_config.fmt` is 'e5m2'", "'e4m3'"]),
        ({"quantization_config": {**FP8, "weight_block_size": [64, 64]}}, ["weight_block_size` is [64, 64]", "128"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["no `quantization_config.weight_block_size`"]),
        ({"topk_method": "greedy"}, ["`topk_method` is 'greedy'", "'noaux_tc'"]),
        ({"scoring_func": "softmax"}, ["`scoring_func` is 'softmax'", "'sigmoid'"]),
        ({"n_group": 5}, ["`n_group` is 5", "12"]),
        ({"num_experts_per_tok": 9}, ["`num_experts_per_tok` is 9", "8 experts"]),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, ["`mlp_layer_types`", "dense ones first"]),
        ({"rope_parameters": {"rope_type": "linear"}, "rope_theta": 1e4}, ["`rope_parameters.rope_type` is 'linear'"]),
        ({"rope_parameters": {"rope_theta": 1e4}}, ["no `rope_parameters.rope_type`"]),
        ({"rope_parameters": {"rope_theta": 0, "rope_type": "default"}}, ["`rope_parameters.rope_theta` is 0", "1 <"]),
        ({"rope_theta": 5e4}, ["`rope_theta` is 50000.0", "10000.0, as in `rope_parameters`"]),
        ({"rope_scaling": YARN}, ["`rope_scaling` is {", "the same as `rope_parameters`"]),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_fast": 0}}, ["`rope_parameters.beta_fast` is 0"]),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_fast": 0.5}}, ["beta_fast` is 0.5", "at least"]),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e4, "rope_type": "default"}},
            ["`rope_parameters.type` is 'yarn'"],
        ),
        ({"partial_rotary_factor": 0.5}, ["`partial_rotary_factor` is 0.5"]),
        ({"num_experts_per_tok": 0}, ["`num_experts_per_tok` is 0", "from 1"]),
        ({"n_group": 12}, ["`n_group` is 12", "2 or more"]),
        ({"topk_group": 4}, ["`topk_group` is 4", "at most `n_group`, which is 3"]),
        ({"eos_token_id": "a"}, ["`eos_token_id` is 'a'", "from 0 to 96"]),
        ({"eos_token_id": [1, 97]}, ["`eos_token_id` is [1, 97]", "from 0 to 96"]),
        ({"eos_token_id": True}, ["`eos_token_id` is True"]),
        ({"num_hidden_layers": "3"}, ["`num_hidden_layers` is '3'", "an integer"]),
        ({"num_hidden_layers": True}, ["`num_hidden_layers` is True", "an integer"]),
        ({"num_hidden_layers": 3.0}, ["`num_hidden_layers` is 3.0", "an integer"]),
        ({"hidden_size": 10**30}, ["`hidden_size` is 1000000000000000000000000000000", "to 2147483647"]),
        ({"rms_norm_eps": float("nan")}, ["`rms_norm_eps` is nan", "a number"]),
        ({"rms_norm_eps": 10**400}, ["`rms_norm_eps` is 1000", "a number"]),
        ({"qk_rope_head_dim": 7}, ["`qk_rope_head_dim` is 7", "even"]),
        ({"attention_bias": 0}, ["`attention_bias` is 0", "False"]),
        ({"tie_word_embeddings": "no"}, ["`tie_word_embeddings` is 'no'", "False or True"]),
        ({"architectures": "DeepseekV3ForCausalLM"}, ["`architectures` is 'DeepseekV3ForCausalLM'", "a list"]),
        ({"dtype": "float64"}, ["`dtype` is 'float64'", "'bfloat16' or 'float16' or 'float32'"]),
        ({"torch_dtype": "bfloat16"}, ["`torch_dtype` is 'bfloat16'", "the same as `dtype`"]),
        ({"dtype": None}, ["no `dtype`"]),
        ({"mlp_layer_types": "dense"}, ["`mlp_layer_types` is 'dense'", "3 layers"]),
        ({"rope_parameters": [1]}, ["`rope_parameters` is [1]", "object"]),
    ],
)
def test_unsupported_configurations_are_rejected(folder, changes, words):
    configure(folder, **changes)
    rejects(folder, str(folder / "config.json"), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, ["`attention_bias` is True", "False"]),
        ({"mlp_bias": True}, ["`mlp_bias` is True", "False"]),
        ({"num_key_value_heads": 4}, ["`num_key_value_heads` is 4", "a divisor of the 6 `num_attention_heads`"]),
        ({"num_key_value_heads": 0}, ["`num_key_value_heads` is 0", "from 1"]),
        ({"head_dim": 63}, ["`head_dim` is 63", "even"]),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, ["`hidden_size` is 48", "2 x 5"]),
        ({"head_dim": None, "num_attention_heads": 16}, ["`hidden_size` is 48", "2 x 16"]),  # 3 values, no pairs
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            ["`rope_parameters.rope_type` is 'yarn'", "'default' or 'llama3'"],
        ),
        ({"rope_parameters": {**LLAMA_ROPE, "low_freq_factor": 4.0}}, ["high_freq_factor` is 4.0", "more than"]),
        ({"rope_parameters": {**LLAMA_ROPE, "factor": 0.5}}, ["`rope_parameters.factor` is 0.5", "1 <="]),
        ({"rope_parameters": {"rope_type": "llama3"}}, ["no `rope_parameters.low_freq_factor`"]),
        ({"rope_parameters": {**LLAMA_ROPE, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor` is 0.5"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["`quantization_config.quant_method` is 'gptq'"]),
    ],
)
def test_unsupported_llama_configurations_are_rejected(tmp_path, changes, words):
    folder = copied("llama", tmp_path)
    configure(folder, **changes)
    rejects(folder, str(folder / "config.json"), *words)


def test_the_heads_of_llama_by_default():
    def attention(**changes):
        values = {name: value for name, value in {**LLAMA_3, **changes}.items() if value is not None}
        return jaxkv.models.ModelConfig.from_json(values).attention

    assert attention() == attention(head_dim=128) != attention(head_dim=64)
    assert attention(num_key_value_heads=None) == attention(num_key_value_heads=32)
    assert jaxkv.models.ModelConfig.from_json(LLAMA_2).rope.theta == 10000


@pytest.mark.parametrize("key", ["hidden_size", "norm_topk_prob", "hidden_act", "architectures", "tie_word_embeddings"])
def test_a_null_in_the_configuration(folder, key):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, key: None}))
    rejects(folder, str(folder / "config.json"), f"`{key}` is None: expected ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", ["Expecting value"]),
        (b'{"hidden_size": 48', ["delimiter"]),
        (b"\xff\xfe\xff", ["decode"]),
        (b"[" * 100_000, ["recursion"]),
        (b'["architectures"]', ["['architectures']", "object"]),
        (b"null", ["None", "object"]),
        (b'{"hidden_size": 48, "hidden_size": 24}', ["'hidden_size' appears more than once"]),
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_files_that_cannot_be_read(shards, name, text, words):
    (shards / name).write_bytes(text)
    rejects(shards, str(shards / name), *words)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_supported(name):
    whole = PUBLISHED[name]
    values = whole.get("text_config", whole)
    config = jaxkv.models.ModelConfig.from_json(json.loads(json.dumps(whole)))
    assert config.num_layers == values.get("num_hidden_layers", values.get("num_layers"))
    assert config.dtype == "bfloat16"
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    assert (config.rope.scaling is not None) == ("factor" in scaling)
    stop = values["eos_token_id"]
    assert config.stop_tokens == (tuple(stop) if isinstance(stop, list) else (stop,))
    quantised = MXFP4 if name == "GPT-OSS" else FP8
    assert jaxkv.models.ModelConfig.from_json({**whole, "quantization_config": quantised}) == config


def test_one_value_written_as_an_integer_or_a_float_is_one_model():
    integers = jaxkv.models.ModelConfig.from_json(PUBLISHED_V2)
    floats = {**PUBLISHED_V2, "rope_theta": 10000.0, "rope_scaling": {**YARN, "factor": 40.0, "beta_slow": 1.0}}
    assert repr(jaxkv.models.ModelConfig.from_json(floats)) == repr(integers)  # fingerprints are made from it


def test_a_folder_without_a_checkpoint(tmp_path):
    rejects(tmp_path, str(tmp_path), "config.json")
    shutil.copy(RECORDED / "deepseek_v3" / "config.json", tmp_path)
    rejects(tmp_path, str(tmp_path), "model.safetensors")


def test_a_missing_weight(folder):
    spoil(folder, lambda weights: weights.pop(GATE))
    rejects(folder, "model.safetensors lacks", GATE)


def test_a_missing_shard(shards):
    (shards / FIRST).unlink()
    rejects(shards, INDEX, FIRST, "none of that name")


@pytest.mark.parametrize("length", [0, 4, 100, -1])
@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_a_truncated_shard(shards, name, length):
    (shards / name).write_bytes((shards / name).read_bytes()[:length])
    rejects(shards, str(shards / name), "cannot be read as a safetensors file")


@pytest.mark.parametrize("zeros_in", [FIRST, SECOND])
def test_each_weight_is_read_from_the_file_that_the_index_names(shards, zeros_in):
    weights = safetensors.numpy.load_file(shards / FIRST)
    right = SECOND if zeros_in == FIRST else FIRST
    for name, weight in [(zeros_in, np.zeros_like(weights[EMBED])), (right, weights[EMBED])]:
        spoil(shards, lambda held, weight=weight: held.update({EMBED: weight}), name)
    spoil_index(shards, lambda weight_map: weight_map.update({EMBED: right}))
    assert_same(jaxkv.models.load(shards), jaxkv.models.load(RECORDED / "deepseek_v3_sharded"))


def test_a_shard_without_a_weight_that_the_index_expects_there(shards):
    spoil_index(shards, lambda weight_map: weight_map.update({EMBED: SECOND}))
    rejects(shards, str(shards / SECOND), EMBED, INDEX)


def test_a_weight_that_the_index_omits(shards):
    spoil_index(shards, lambda weight_map: weight_map.pop(EMBED))
    rejects(shards, str(shards / INDEX), "lacks", EMBED)


@pytest.mark.parametrize("name", ["../stolen.safetensors", "a/../../stolen.safetensors", "{parent}/stolen.safetensors"])
def test_an_index_cannot_point_outside_its_folder(tmp_path, name):
    shards = copied("deepseek_v3_sharded", tmp_path / "checkpoint")
    (shards / "a").mkdir()
    shutil.copy(shards / FIRST, tmp_path / "stolen.safetensors")
    name = name.format(parent=tmp_path)
    spoil_index(shards, lambda weight_map: weight_map.update({EMBED: name}))
    rejects(shards, str(shards / INDEX), f"`weight_map.{EMBED}`", "in the folder of the index")


def test_shards_may_be_symbolic_links(tmp_path):
    # The cache of the Hugging Face Hub consists of them.
    shards = copied("deepseek_v3_sharded", tmp_path / "checkpoint")
    (shards / FIRST).rename(tmp_path / "blob")
    (shards / FIRST).symlink_to("../blob")
    assert_same(jaxkv.models.load(shards), jaxkv.models.load(RECORDED / "deepseek_v3_sharded"))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, ["no `weight_map`"]),
        ({"weight_map": [EMBED]}, ["`weight_map` is [", "object"]),
        ({"weight_map": {}}, ["`weight_map` is empty"]),
        ({"weight_map": {EMBED: None}}, [f"`weight_map.{EMBED}` is None", "a file"]),
        ({"weight_map": {EMBED: 1}}, [f"`weight_map.{EMBED}` is 1", "a file"]),
        ({"weight_map": {"a\nb": 1}}, ["`weight_map.a\\nb` is 1", "a file"]),
        ({"weight_map": {EMBED: ""}}, [f"`weight_map.{EMBED}` is ''", "none of that name"]),
        ({"weight_map": {EMBED: "x" * 5000}}, [f"`weight_map.{EMBED}` is 'xxx", "none of that name"]),
        ({"weight_map": {EMBED: "\ud800"}}, [f"`weight_map.{EMBED}` is '\\ud800'", "none of that name"]),
    ],
)
def test_an_index_without_files(shards, index, words):
    (shards / INDEX).write_text(json.dumps(index))
    rejects(shards, str(shards / INDEX), *words)


def test_one_file_and_an_index_of_others(shards):
    shutil.copy(shards / FIRST, shards / "model.safetensors")
    rejects(shards, str(shards), "model.safetensors", INDEX, "remove one")


UNKNOWN = ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight", "enorm.weight", "a\nb"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_weight_that_the_model_does_not_have(folder, name):
    spoil(folder, lambda weights: weights.update({name: np.ones(48, np.float32)}))
    rejects(folder, str(folder / "model.safetensors"), repr(name))


def test_a_weight_that_neither_the_model_nor_the_index_has(shards):
    spoil(shards, lambda weights: weights.update({UNKNOWN[0]: np.ones(96, np.float32)}), SECOND)
    rejects(shards, str(shards / SECOND), UNKNOWN[0])


def test_a_layer_that_the_configuration_omits(folder):
    configure(folder, num_hidden_layers=2, num_nextn_predict_layers=1)
    rejects(folder, str(folder / "model.safetensors"), "config.json", "model.layers.2.")


def test_more_layers_or_experts_than_the_checkpoint_has(folder):
    configure(folder, num_hidden_layers=2**31 - 1)
    rejects(folder, str(folder / "model.safetensors"), "lacks", "model.layers.3.")
    configure(folder, num_hidden_layers=3, n_routed_experts=2**31 - 2)  # divisible by the three groups
    rejects(folder, str(folder / "model.safetensors"), "lacks", "experts.12.")


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm4_moe_lite"])
def test_published_weights_without_a_use_are_skipped(family, tmp_path):
    folder = copied(family, tmp_path)

    def change(weights):
        for name in list(weights):
            if name.startswith("model.layers.2."):  # a layer like the model's last, and what comes before and after it
                weights[name.replace(".2.", ".3.", 1)] = weights[name]
        for name in ("embed_tokens", "shared_head.head"):
            weights[f"model.layers.3.{name}.weight"] = weights[EMBED]
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"model.layers.3.{name}.weight"] = weights["model.norm.weight"]
        weights["model.layers.3.eh_proj.weight"] = np.ones((48, 96), np.float32)
        for layer in range(4):
            weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float64)

    spoil(folder, change)
    assert_same(jaxkv.models.load(folder), jaxkv.models.load(RECORDED / family))
    spoil(folder, lambda weights: weights.pop("model.layers.3.eh_proj.weight"))
    rejects(folder, str(folder / "model.safetensors"), "model.layers.3.")


def test_saved_rotary_frequencies_of_llama_are_skipped(tmp_path):
    folder = copied("llama", tmp_path)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    spoil(folder, lambda weights: weights.update({name: np.ones(32, np.float32)}))
    assert_same(jaxkv.models.load(folder), jaxkv.models.load(RECORDED / "llama"))


def test_llama_may_tie_its_head_to_the_embedding(tmp_path):
    folder = copied("llama", tmp_path)
    spoil(folder, lambda weights: weights.pop("lm_head.weight"))
    rejects(folder, "model.safetensors lacks", "lm_head.weight")
    configure(folder, tie_word_embeddings=True)
    assert "head" not in jaxkv.models.load(folder).params


def test_a_bias_of_llama_is_not_ignored(tmp_path):
    folder, name = copied("llama", tmp_path), "model.layers.0.self_attn.q_proj.bias"
    spoil(folder, lambda weights: weights.update({name: np.ones(384, np.float32)}))
    rejects(folder, str(folder / "model.safetensors"), repr(name))


def test_a_tied_head_is_a_copy_of_the_embedding(tmp_path):
    folder = copied("youtu", tmp_path)
    spoil(folder, lambda weights: weights.update({"lm_head.weight": weights[EMBED]}))
    assert_same(jaxkv.models.load(folder), jaxkv.models.load(RECORDED / "youtu"))
    spoil(folder, lambda weights: weights.update({"lm_head.weight": weights[EMBED] + 1}))
    rejects(folder, str(folder / "model.safetensors"), "lm_head.weight", EMBED)
    spoil(folder, lambda weights: weights.update({"lm_head.weight": weights[EMBED].astype(np.int8)}))
    rejects(folder, str(folder / "model.safetensors"), "lm_head.weight", "I8")


def test_a_misshapen_weight(folder):
    spoil(folder, lambda weights: weights.update({GATE: weights[GATE][:, 1:].copy()}))
    rejects(folder, GATE, "(16, 47)", "(16, 48)")


def test_a_weight_of_integers(folder):
    spoil(folder, lambda weights: weights.update({GATE: weights[GATE].astype(np.int8)}))
    rejects(folder, GATE, "I8", "BF16, F16 or F32")


def test_nan_in_a_weight(folder):
    def change(weights):
        weights[GATE][5, 7] = np.nan

    spoil(folder, change)
    rejects(folder, str(folder / "model.safetensors"), GATE, "1 NaN of 768")


def test_arguments(folder):
    rejects(folder, "`dtype`", "int8", "bfloat16", dtype="int8")
    rejects(folder, "MLAEntry format 'fp4'", "fp8_ds_mla", entry_format="fp4")
    rejects(RECORDED / "llama", "KVEntry format 'fp8_ds_mla'", "fp8", entry_format="fp8_ds_mla")
    configure(folder, kv_lora_rank=96)
    rejects(folder, "fp8_ds_mla", "96", "128", entry_format="fp8_ds_mla")


def test_an_entry_format_that_cannot_hold_the_indexers_keys(tmp_path):
    configure(copied("deepseek_v32", tmp_path), index_head_dim=33)
    rejects(tmp_path, "indexer_fp8", "33", "a multiple of 4", entry_format="fp8_ds_mla")


def test_the_requested_dtype_and_the_progress(folder):
    taken = []

    def progress(pieces):
        for piece in pieces:
            taken.append(piece)
            yield piece

    model = jaxkv.models.load(folder, dtype="bfloat16", progress=progress)
    _, mixture, _ = model.params["layers"]
    assert mixture["attention"]["w_uk"].dtype == "bfloat16"
    assert mixture["mixture"]["router"].dtype == "float32"
    assert model.layout(2).entry.format == "bf16"
    assert len(taken) == 3 + 12 + 2 * (14 + 3 * 12)  # of no layer, of the dense one, of the two with 12 experts


def test_kv_b_proj_is_split_by_head():
    model = jaxkv.models.load(RECORDED / "youtu")
    weights = safetensors.numpy.load_file(RECORDED / "youtu" / "model.safetensors")
    layer = model.params["layers"][1]
    rows = weights["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, 16 + 12, 128)
    assert np.array_equal(layer["attention"]["w_uk"], rows[:, :16])
    assert np.array_equal(layer["attention"]["w_uv"], rows[:, 16:])


def test_older_spellings_of_rope_mean_the_same(folder):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}
    configure(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **yarn})
    new = jaxkv.models.ModelConfig.read(folder)
    configure(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "yarn", **yarn})
    assert jaxkv.models.ModelConfig.read(folder) == new
    assert new.rope.scaling.factor == 4


@pytest.mark.parametrize("band", [1, 100, 2**23])
def test_parts_of_a_weight(tmp_path, monkeypatch, band):
    monkeypatch.setattr(safetensors_file, "BAND_BYTES", band)
    weight = np.random.default_rng(0).standard_normal((23, 6), np.float32)
    safetensors.numpy.save_file({"first": np.ones(3, np.float16), "weight": weight}, tmp_path / "file")
    with safetensors_file.SafetensorsFile(tmp_path / "file") as file:
        for rows, columns in itertools.product((slice(0, 23), slice(5, 22)), (slice(0, 6), slice(2, 5))):
            assert np.array_equal(file.read("weight", (rows, columns)), weight[rows, columns])
        (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-100])
        with pytest.raises(ValueError, match="has been truncated"):
            file.read("weight", (slice(0, 23), slice(0, 6)))
