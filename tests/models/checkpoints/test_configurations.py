"""Configurations of models: published ones are supported, others rejected with the file and the key."""

import json

import pytest

import jaxkv.models
from models.checkpoints.folders import RECORDED, configure, copied, rejects
from models.checkpoints.published import FP8, PUBLISHED, PUBLISHED_V2, YARN
from models.checkpoints.published_gqa import LLAMA_2, LLAMA_3, LLAMA_ROPE, MXFP4

LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture
def folder(tmp_path):
    return copied("deepseek_v3", tmp_path)


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
        ({"rope_parameters": {"rope_type": "linear"}, "rope_theta": 1e4}, ["no `rope_parameters.factor`"]),
        (
            {"rope_parameters": {**LINEAR, "mscale_all_dim": 1.0}, "rope_theta": 1e4},
            ["`rope_parameters.mscale_all_dim` is 1.0: expected None"],
        ),
        (
            {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}, "rope_theta": 1e4},
            ["rope_type` is 'dynamic'", "length"],
        ),
        ({"rope_parameters": {**LINEAR, "rope_type": "longrope"}, "rope_theta": 1e4}, ["rope_type` is 'longrope'"]),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, ["no `rope_parameters.rope_type`"]),
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
        ({"attention_bias": 1}, ["`attention_bias` is 1", "False or True"]),
        ({"mlp_bias": True}, ["`mlp_bias` is True", "False"]),
        ({"num_key_value_heads": 4}, ["`num_key_value_heads` is 4", "a divisor of the 6 `num_attention_heads`"]),
        ({"num_key_value_heads": 0}, ["`num_key_value_heads` is 0", "from 1"]),
        ({"head_dim": 63}, ["`head_dim` is 63", "even"]),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, ["`hidden_size` is 48", "2 x 5"]),
        ({"head_dim": None, "num_attention_heads": 16}, ["`hidden_size` is 48", "2 x 16"]),  # 3 values, no pairs
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            ["`rope_parameters.rope_type` is 'yarn'", "'default' or 'linear' or 'llama3'"],
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


def test_older_spellings_of_rope_mean_the_same(folder):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}
    configure(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **yarn})
    new = jaxkv.models.ModelConfig.read(folder)
    configure(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "yarn", **yarn})
    assert jaxkv.models.ModelConfig.read(folder) == new
    assert new.rope.scaling.factor == 4


WITH_YARN = sorted(file.parent.name for file in RECORDED.glob("*/config.json") if '"yarn"' in file.read_text())
OF_VLLM = {"attn_factor": 0.8782488562869419, "extrapolation_factor": 1, "apply_yarn_scaling": False}


def with_yarn_key(values, key, value):
    """A configuration with one key more wherever it has YaRN."""
    changed = {name: with_yarn_key(x, key, value) if isinstance(x, dict) else x for name, x in values.items()}
    return {**changed, key: value} if "yarn" in (values.get("rope_type"), values.get("type")) else changed


@pytest.mark.parametrize("name", WITH_YARN)
def test_keys_of_yarn_that_libraries_read_differently_are_rejected(name):
    values = json.loads((RECORDED / name / "config.json").read_text())
    assert jaxkv.models.ModelConfig.from_json(with_yarn_key(values, "attn_factor", None))
    for key, value in OF_VLLM.items():
        with pytest.raises(ValueError, match=rf"rope_[\w.]*\.{key}` is {value}: .* `attention_factor` instead"):
            jaxkv.models.ModelConfig.from_json(with_yarn_key(values, key, value))
