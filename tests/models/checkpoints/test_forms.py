"""Checkpoints in the forms that are found outside: other names and spellings, parts that are quantised or missing."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from data.models import forms
from jaxkv import models
from jaxkv.models.families import FAMILIES
from jaxkv.models.weights.parameters import parameters, spellings, unused
from models.checkpoints.folders import RECORDED, configure, copied, rejects
from models.checkpoints.published import FP8
from support.recorded import model

FILE, EMBED, HEAD = "model.safetensors", "model.embed_tokens.weight", "lm_head.weight"


def rename(folder, new_name):
    """Writes the weights again under the names that `new_name` returns; without those for which it returns None."""
    held = safetensors.numpy.load_file(folder / FILE)
    named = {new_name(name): weight for name, weight in held.items()}
    safetensors.numpy.save_file({name: weight for name, weight in named.items() if name is not None}, folder / FILE)


def add(folder, **weights):
    held = safetensors.numpy.load_file(folder / FILE)
    safetensors.numpy.save_file({**held, **weights}, folder / FILE)


def assert_same(found, family):
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, model(family).params))


def without_model(name):
    return name.removeprefix("model.")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3_sharded", "kimi_linear", "gpt_oss"])
def test_names_without_model(family, tmp_path):
    folder = copied(family, tmp_path)
    for file in folder.glob("*.safetensors"):
        held = safetensors.numpy.load_file(file)
        safetensors.numpy.save_file({without_model(name): weight for name, weight in held.items()}, file)
    for index in folder.glob("*.index.json"):
        held = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"weight_map": {without_model(name): file for name, file in held.items()}}))
    assert_same(models.load(folder), family)


def test_a_model_without_a_head(tmp_path):
    folder = copied("youtu", tmp_path)  # which ties its head to the embedding
    configure(folder, architectures=["YoutuModel"])
    rename(folder, without_model)
    assert_same(models.load(folder), "youtu")
    folder = copied("llama", tmp_path)
    configure(folder, architectures=["LlamaModel"])
    rename(folder, lambda name: None if name == HEAD else without_model(name))
    rejects(folder, str(folder / FILE), "lacks", HEAD)
    configure(folder, tie_word_embeddings=True)
    assert models.load(folder).config.stop_tokens == ()


def test_errors_name_weights_as_the_file_does(tmp_path):
    folder, name = copied("llama", tmp_path), "layers.1.mlp.up_proj.weight"
    rename(folder, without_model)
    held = safetensors.numpy.load_file(folder / FILE)[name]
    add(folder, **{name: held[1:].copy()})
    rejects(folder, f"weight '{name}' has shape (63, 48)")
    add(folder, **{name: held, f"model.{name}": held})
    rejects(folder, str(folder / FILE), f"has the same weight as '{name}' and 'model.{name}'")


def test_a_tied_head_without_an_embedding(tmp_path):
    folder = copied("youtu", tmp_path)
    rename(folder, lambda name: HEAD if name == EMBED else name)
    assert_same(models.load(folder), "youtu")
    configure(folder, tie_word_embeddings=False)
    rejects(folder, str(folder / FILE), "lacks", EMBED)


def test_saved_rotary_frequencies_of_the_whole_model_are_skipped(tmp_path):
    folder = copied("llama", tmp_path)
    add(folder, **{"model.rotary_emb.inv_freq": np.ones(32, np.float32)})
    assert_same(models.load(folder), "llama")


@pytest.mark.parametrize("form", forms.FORMS)
def test_the_logits_of_other_forms(form, tmp_path):
    forms.write(form, tmp_path)
    found, count = models.load(tmp_path), len(forms.PROMPT)
    tables, slots = jnp.zeros((1, 1), jnp.int32), jnp.arange(count)[None]
    prompt, lengths = jnp.asarray([forms.PROMPT]), jnp.asarray([count])
    _, logits = jax.jit(models.prefill)(found, found.cache(1), prompt, lengths, tables, slots)
    right = np.load(forms.FILE)[form]
    assert np.abs(logits[0] - right).max() < 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("changes", [{"dtype": None}, {"dtype": "auto"}, {"dtype": None, "torch_dtype": "auto"}])
def test_a_dtype_that_config_json_does_not_state(changes, tmp_path):
    folder = copied("llama", tmp_path)
    configure(folder, **changes)
    rejects(folder, "`dtype` is None", "config.json states no `dtype`", "'bfloat16', 'float16', 'float32'")
    assert_same(models.load(folder, dtype="float32"), "llama")
    with pytest.raises(ValueError, match="states no `dtype`"):
        models.random_model(models.ModelConfig.read(folder))


def test_a_null_for_the_dtype(tmp_path):
    folder = copied("llama", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "dtype": None, "torch_dtype": "float32"}))
    assert models.ModelConfig.read(folder).dtype == "float32"


def test_the_dtype_of_a_model_around_the_text_model():
    values = json.loads((RECORDED / "kimi_k25" / "config.json").read_text())
    text = {name: value for name, value in values["text_config"].items() if name not in ("dtype", "torch_dtype")}
    for whole, inner, expected in (
        ("bfloat16", {}, "bfloat16"),
        ("bfloat16", {"dtype": None}, "bfloat16"),
        ("bfloat16", {"torch_dtype": "float16"}, "float16"),
        (None, {"dtype": "auto"}, None),
    ):
        changed = {**values, "dtype": whole, "text_config": {**text, **inner}}
        assert models.ModelConfig.from_json(changed).dtype == expected


def test_objects_of_rope_without_a_scaling():
    values = json.loads((RECORDED / "llama" / "config.json").read_text())
    del values["rope_parameters"]
    expected = models.ModelConfig.from_json({**values, "rope_theta": 5e5})
    for changes in (
        {"rope_theta": 5e5, "rope_scaling": {}},
        {"rope_theta": 5e5, "rope_parameters": {}, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": None}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}},
    ):
        assert models.ModelConfig.from_json({**values, **changes}) == expected


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
WEIGHTS |= {"dynamic": False, "group_size": None}
SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


def compressed(**changes):
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None, **changes}


def group(weights, **changes):
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, **changes}}


ONLY_ENTRIES = [
    compressed(config_groups={}, kv_cache_scheme=SCHEME),
    compressed(config_groups={}, kv_cache_scheme={**SCHEME, "strategy": "attn_head", "symmetric": True}),
    compressed(config_groups=None, kv_cache_scheme=SCHEME, transform_config={}),
    compressed(config_groups={}),
    {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": SCHEME, "producer": {"name": "modelopt"}},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": SCHEME},
    {**FP8, "kv_cache_scheme": SCHEME},
    compressed(config_groups=group(WEIGHTS, input_activations={"dynamic": True}), format="float-quantized"),
    compressed(config_groups=group({**WEIGHTS, "block_structure": "128x128"}), kv_cache_scheme=SCHEME),
]


@pytest.mark.parametrize("quantised", ONLY_ENTRIES)
def test_supported_quantisations(quantised):
    for family in ("llama", "deepseek_v3", "qwen3_next"):
        values = json.loads((RECORDED / family / "config.json").read_text())
        plain = models.ModelConfig.from_json(values)
        assert models.ModelConfig.from_json({**values, "quantization_config": quantised}) == plain


INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True, "dynamic": False}
INT4 |= {"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
"""That of the published Kimi-K2.5."""


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        (
            compressed(config_groups=group(INT4)),
            [
                "config_groups.group_0.weights` is {",
                "INT4 weights (compressed-tensors, pack-quantized) are not supported",
            ],
        ),
        (
            compressed(config_groups=group({**WEIGHTS, "strategy": "channel"}), format="float-quantized"),
            ["FP8 weights (compressed-tensors, float-quantized)"],
        ),
        (compressed(config_groups=group({"type": [], "num_bits": "x"}), format="a\nb"), ["in this way (compressed-"]),
        (compressed(config_groups=group(WEIGHTS, output_activations=SCHEME)), ["group_0.output_activations` is {"]),
        (compressed(config_groups=group(None, input_activations=SCHEME)), ["group_0.input_activations` is {"]),
        (compressed(config_groups={"FP8": ["Linear"]}), ["config_groups.FP8` is ['Linear']", "an object"]),
        (compressed(config_groups=[1]), ["config_groups` is [1]", "an object"]),
        (compressed(transform_config={"config_groups": {}}), ["transform_config` is {"]),
        (compressed(kv_cache_scheme={**SCHEME, "num_bits": 4}), ["kv_cache_scheme.num_bits` is 4"]),
        (compressed(kv_cache_scheme={**SCHEME, "dynamic": True}), ["kv_cache_scheme.dynamic` is True"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["quant_algo` is 'NVFP4'"]),
        ({"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}, ["kv_cache_scheme` is 'NVFP4'", "an object"]),
        ({"quant_method": "compressed-tensors"}, ["quant_method` is 'compressed-tensors'", "or `config_groups`"]),
        ({"quant_method": "awq", "bits": 4}, ["quant_method` is 'awq'", "'fp8' or 'compressed-tensors' or 'modelopt'"]),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_unsupported_quantisations(quantised, words, inside, tmp_path):
    folder = copied("kimi_k25", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    held = values["text_config"] if inside else values
    held["quantization_config"] = quantised
    (folder / "config.json").write_text(json.dumps(values))
    place = "`text_config.quantization_config." if inside else "`quantization_config."
    rejects(folder, str(folder / "config.json"), place, *words)


@pytest.mark.parametrize("family", sorted(path.parent.name for path in RECORDED.glob("*/config.json")))
def test_weights_of_layers_past_a_models_own(family):
    """They are unused only if an `eh_proj` shows that their layer drafts tokens; whatever their names are, no error."""
    config = models.ModelConfig.read(RECORDED / family)
    own = {name for weight in jax.tree.leaves(parameters(config, mtp=False)) for name in weight.all_names()}
    known = FAMILIES[config.architecture]
    prefix, drafts = known.prefix, known.global_weights is None
    for layer in (config.num_layers, 100, 999_999_999, 10**12):
        further = {name.replace(f"layers.{config.num_layers - 1}.", f"layers.{layer}.") for name in own} - own
        for start in ("", "model.", "layers.", prefix + "model."):
            for name in (f"{start}layers.{layer}.eh_proj.weight", f"{start}layers.{layer}.self_attn.k_scale"):
                spelt = spellings(config, {*own, *further, name})
                names = {spelt.get(one, one) for one in {*own, *further, name}}
                found = unused(config, names)
                drafting = f"{prefix}model.layers.{layer}.eh_proj.weight"
                expected = drafting in names and drafts and layer < 10**9
                assert (drafting in found) == expected
                assert any(not re.fullmatch(known.unused, one) for one in further & found) == expected
