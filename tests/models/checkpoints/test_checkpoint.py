"""Reading checkpoints: missing, damaged and unsupported parts are rejected, with the file and the key or weight."""

import itertools
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jaxkv.models
from jaxkv.models.weights import safetensors_file
from jaxkv.models.weights.parameters import parameters
from models.checkpoints.folders import RECORDED, configure, copied, rejects

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
EMBED = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    """One file of weights."""
    return copied("deepseek_v3", tmp_path)


@pytest.fixture
def shards(tmp_path):
    """Two files of weights, and an index."""
    return copied("deepseek_v3_sharded", tmp_path)


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
        pytest.param(b'{"weight_map": %s, "architectures": []}' % (b"9" * 5000), ["expected a"], id="5000 digits"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_files_that_cannot_be_read(shards, name, text, words):
    (shards / name).write_bytes(text)
    rejects(shards, str(shards / name), *words)


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


def test_weights_that_are_infinite_or_become_so(folder):
    norm = "model.layers.2.post_attention_layernorm.weight"
    for name, value, dtype, words in (
        (GATE, np.inf, None, "holds 1 infinite values of 768"),
        (EMBED, -np.inf, "bfloat16", "holds 1 infinite values of 4656"),
        (GATE, 7e4, "float16", "holds 1 of 768 values beyond 65504, the largest of float16"),
        (norm, -7e4, "float16", "holds 1 of 48 values beyond 65504"),
        ("lm_head.weight", 3.4e38, "bfloat16", "holds 1 of 4656 values beyond 3.38953e+38, the largest of bfloat16"),
    ):

        def change(weights, name=name, value=value):
            weights[name].reshape(-1)[5] = value

        copied("deepseek_v3", folder)
        spoil(folder, change)
        rejects(folder, str(folder / "model.safetensors"), repr(name), words, dtype=dtype)
    copied("deepseek_v3", folder)
    spoil(folder, lambda weights: weights[GATE].reshape(-1).__setitem__(5, 65504))
    jaxkv.models.load(folder, dtype="float16")


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_next"])
def test_weights_that_are_kept_in_float32_may_be_stored_in_16_bits(family, tmp_path):
    """Correction biases, sinks, and the decays of recurrent layers."""
    folder = copied(family, tmp_path)
    tree = parameters(jaxkv.models.ModelConfig.read(folder), mtp=False)
    exact = [(path, weight.name) for path, weight in jax.tree.leaves_with_path(tree) if weight.exact]
    assert exact

    def change(weights):
        weights |= {
            name: weights[name].astype([np.float16, ml_dtypes.bfloat16][i % 2]) for i, (_, name) in enumerate(exact)
        }
        stored.update(weights)

    stored = {}
    spoil(folder, change)
    found = dict(jax.tree.leaves_with_path(jaxkv.models.load(folder, dtype="bfloat16").params))
    for path, name in exact:
        assert found[path].dtype == np.float32
        assert np.array_equal(found[path], stored[name].astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_routers_are_not_rounded(folder, dtype):
    """They stay in 16 bits if that is the model's dtype, and are float32 otherwise; either way, with all their bits."""
    name = "model.layers.1.mlp.gate.weight"
    stored = []

    def change(weights):
        weights[name] = weights[name].astype(ml_dtypes.bfloat16)
        stored.append(weights[name])

    spoil(folder, change)
    router = jaxkv.models.load(folder, dtype=dtype).params["layers"][1]["mixture"]["router"]
    assert router.dtype == ("bfloat16" if dtype == "bfloat16" else "float32")
    assert np.array_equal(router.astype(np.float32), stored[0].astype(np.float32))


def test_weights_that_are_kept_in_float32_may_be_large(folder):
    router = "model.layers.1.mlp.gate.weight"
    spoil(folder, lambda weights: weights[router].reshape(-1).__setitem__(5, 1e30))
    assert jaxkv.models.load(folder, dtype="float16").params["layers"][1]["mixture"]["router"].max() == np.float32(1e30)


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
