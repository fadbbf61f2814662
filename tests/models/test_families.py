"""What sets families apart beyond their recorded tokens: optional and unused weights, and values that are rejected."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv import models
from jaxkv.models.config import MLA
from jaxkv.models.layers.feed_forward import route
from jaxkv.models.layers.rope import query_scales
from models.checkpoints.published import PUBLISHED

RECORDED = Path(__file__).parents[1] / "data" / "models"
FILE = "model.safetensors"
NORM = "post_mlp_layernorm.weight"


def changed(family, folder, change=lambda weights: None, **values):
    """A copy of a recorded checkpoint with other weights, as `change` makes them, and other keys in config.json."""
    weights = safetensors.numpy.load_file(RECORDED / family / FILE)
    change(weights)
    safetensors.numpy.save_file(weights, folder / FILE)
    config = json.loads((RECORDED / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def assert_same(model, other):
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, other.params))


def rejects(folder, *words):
    """Loading raises a ValueError of one line with all of the words."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))) as error:
        models.load(folder)
    assert "\n" not in str(error.value)


def published_v4(name):
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


PUBLISHED_NAMES = {
    "deepseek_v4": published_v4,
    "kimi_k25": lambda name: name.replace("language_model.model.blocks.", "language_model.model.layers."),
    "kimi_linear": lambda name: re.sub(r"\.block_sparse_moe\.(\w+_proj\.)", r".mlp.\1", name),
}
"""The names that published checkpoints have for the weights that transformers saves, for families where some differ."""


def published(family):
    """Gives weights the published names, in place; for `changed`."""

    def change(weights):
        for name in list(weights):
            weights[PUBLISHED_NAMES[family](name)] = weights.pop(name)

    return change


class TestNames:
    """Of weights: those that transformers saves, which the recorded checkpoints have, and the published ones."""

    @pytest.mark.parametrize("family", PUBLISHED_NAMES)
    def test_published_names_load_the_same_model(self, family, tmp_path):
        folder = changed(family, tmp_path, published(family))
        saved, other = (safetensors.numpy.load_file(path / FILE) for path in (RECORDED / family, folder))
        assert saved.keys() != other.keys()
        assert_same(models.load(folder), models.load(RECORDED / family))

    @pytest.mark.parametrize(
        ("family", "names"),
        [
            ("deepseek_v4", ["model.layers.1.attn.norm.weight", "layers.1.attn.kv_norm.weight"]),
            ("deepseek_v4", ["model.hc_head.hc_base", "hc_head_base"]),
            (
                "kimi_k25",
                [f"language_model.model.{layers}.1.mlp.experts.2.up_proj.weight" for layers in ("blocks", "layers")],
            ),
            ("kimi_linear", [f"model.layers.0.{part}.up_proj.weight" for part in ("block_sparse_moe", "mlp")]),
        ],
    )
    def test_a_weight_under_both_names_is_rejected(self, family, names, tmp_path):
        one, other = names
        folder = changed(family, tmp_path, lambda weights: weights.update({other: weights[one]}))
        rejects(folder, FILE, "the same weight as", *map(repr, sorted(names)), "expected one of them")

    def test_shards_with_an_index(self, tmp_path):
        """Each of both spellings in the index; and a weight under both."""
        weights = safetensors.numpy.load_file(RECORDED / "deepseek_v4" / FILE)
        (tmp_path / "config.json").write_bytes((RECORDED / "deepseek_v4" / "config.json").read_bytes())
        halves = list(weights)[::2], list(weights)[1::2]
        index = {}
        for i, names in enumerate(halves):
            spelled = {(published_v4(name) if i else name): weights[name] for name in names}
            safetensors.numpy.save_file(spelled, tmp_path / f"{i}.safetensors")
            index |= dict.fromkeys(spelled, f"{i}.safetensors")
        (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": index}))
        assert_same(models.load(tmp_path), models.load(RECORDED / "deepseek_v4"))
        name = next(name for name in halves[0] if published_v4(name) != name)
        twice = {**index, published_v4(name): "1.safetensors"}
        (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": twice}))
        rejects(tmp_path, "index.json", "has the same weight as", *map(repr, sorted([name, published_v4(name)])))

    def test_errors_have_the_names_of_the_file(self, tmp_path):
        name = "model.layers.1.attn.norm.weight"

        def change(weights):
            weights[name] = weights[name][1:]

        rejects(changed("deepseek_v4", tmp_path, change), f"weight {name!r} has shape (95,)")
        rejects(changed("deepseek_v4", tmp_path, lambda weights: weights[name].fill(np.nan)), f"{name!r} holds 96 NaN")
        unknown = "model.layers.1.attn.other.weight"
        folder = changed("deepseek_v4", tmp_path, lambda weights: weights.update({unknown: np.ones(2, np.float32)}))
        rejects(folder, "does not have", repr(unknown))

    def test_no_other_name_is_one_of_a_weight(self, tmp_path):
        """What looks like a spelling, in a place where transformers does not use it."""
        for family, known, other in (
            ("deepseek_v4", "model.layers.1.attn.norm.weight", "layers.1.attn.norm.weight"),
            ("deepseek_v4", "model.embed_tokens.weight", "embed_tokens.weight"),
            ("kimi_linear", "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.gate.weight"),
            ("kimi_k25", "language_model.model.blocks.0.mlp.up_proj.weight", "model.blocks.0.mlp.up_proj.weight"),
        ):

            def change(weights, known=known, other=other):
                weights[other] = weights.pop(known)

            rejects(changed(family, tmp_path, change), "lacks")


def test_the_indexer_of_v32(tmp_path):
    rejects(changed("deepseek_v32", tmp_path, q_lora_rank=None), "config.json", "`q_lora_rank` is None", "an integer")
    words = "config.json", "`index_head_dim` is 4", "at least `qk_rope_head_dim`, which is 8"
    rejects(changed("deepseek_v32", tmp_path, index_head_dim=4), *words)


def test_the_epsilon_of_the_norms_of_latents():
    """`rms_norm_eps` for the models of Z.ai, and 1e-6 for others, three of which state 1e-5 for their other norms."""
    found = {
        name: (config.rms_norm_eps, config.attention.latent_eps)
        for name in PUBLISHED
        if isinstance((config := models.ModelConfig.from_json(PUBLISHED[name])).attention, MLA)
    }
    large = {"GLM-4.7-Flash": 1e-5, "GLM-5": 1e-5}
    assert {name: latent for name, (_, latent) in found.items()} == {**dict.fromkeys(found, 1e-6), **large}
    stated = {name for name, (eps, _) in found.items() if eps == 1e-5}
    assert stated == {*large, "Kimi-Linear", "LongCat-Flash", "Moonlight"}
    other = models.ModelConfig.from_json({**PUBLISHED["GLM-5"], "rms_norm_eps": 0.5})
    assert other.attention.latent_eps == 0.5


class TestAXK1:
    BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"

    def test_the_norm_of_dense_layers_is_skipped(self, tmp_path):
        norm = np.ones(48, np.float32)
        folder = changed("axk1", tmp_path, lambda weights: weights.update({f"model.layers.0.{NORM}": norm}))
        assert_same(models.load(folder), models.load(RECORDED / "axk1"))
        folder = changed("axk1", tmp_path, lambda weights: weights.pop(f"model.layers.1.{NORM}"))
        rejects(folder, "lacks", NORM)

    def test_a_router_without_a_bias_chooses_by_scores(self, tmp_path):
        biased = models.load(RECORDED / "axk1")
        model = models.load(changed("axk1", tmp_path, lambda weights: weights.pop(self.BIAS)))
        x = jax.random.normal(jax.random.key(0), (50, 48))
        (chosen, shares), (others, _) = (
            route(one.config.experts, one.params["layers"][1]["mixture"], x) for one in (model, biased)
        )
        scores = jax.nn.sigmoid(x @ model.params["layers"][1]["mixture"]["router"].T)
        zero = {**biased.params["layers"][1]["mixture"], "router_bias": np.zeros(12, np.float32)}
        right, right_shares = route(model.config.experts, zero, x)
        np.testing.assert_array_equal(chosen, right)
        np.testing.assert_array_equal(shares, right_shares)
        assert (np.diff(np.take_along_axis(scores, chosen, -1)) <= 0).all()
        assert (chosen != others).any()
        rejects(changed("deepseek_v3", tmp_path, lambda weights: weights.pop(self.BIAS)), "lacks", self.BIAS)

    def test_queries_have_a_latent(self, tmp_path):
        rejects(changed("axk1", tmp_path, q_lora_rank=None), "`q_lora_rank` is None", "an integer")


class TestGLM5:
    @staticmethod
    def read(**values):
        config = models.ModelConfig.from_json({**PUBLISHED["GLM-5"], **values})
        assert config.indexer.interleaved
        return config

    def test_the_layers_with_an_indexer(self):
        full = self.read()
        assert full.indexer.layers is None
        # Of 78 layers, 21 store indexer keys: the figure for GLM-5.2 in https://github.com/ROCm/ATOM/issues/2231.
        every = self.read(index_topk_freq=4)
        assert every.indexer.layers == (0, *range(1, 78, 4))
        assert len(every.indexer.layers) == 21
        pattern = "".join("F" if layer in every.indexer.layers else "S" for layer in range(78))
        types = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
        assert self.read(index_topk_pattern=pattern) == self.read(index_topk_pattern=types) == every
        assert self.read(indexer_types=types, index_topk_pattern="F" * 78) == every  # the first key counts
        assert self.read(index_topk_freq=4, index_skip_topk_offset=5).indexer.layers == (
            0,
            1,
            2,
            3,
            4,
            *range(8, 78, 4),
        )
        assert self.read(indexer_types=["full"] * 78) == full

    def test_the_cache_has_indexer_keys_of_these_layers_only(self):
        config = models.ModelConfig.read(RECORDED / "glm5")
        assert config.indexer.layers == (0, 2)
        layout = models.load(RECORDED / "glm5").layout(4)
        assert (layout["latent"].num_layers, layout["indexer"].num_layers) == (3, 2)
        values = json.loads((RECORDED / "glm5" / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        model = jax.eval_shape(partial(models.random_model, models.ModelConfig.from_json(values), mtp=True))
        assert "indexer" in model.params["mtp"]["layer"]["attention"]  # that of MTP selects by itself
        assert (model.layout(4)["latent"].num_layers, model.layout(4)["indexer"].num_layers) == (4, 3)

    def test_an_indexer_in_a_layer_that_shares_is_not_ignored(self, tmp_path):
        rejects(changed("glm5", tmp_path, indexer_types=["full", "shared", "shared"]), "does not have", ".2.self_attn.")
        rejects(changed("glm5", tmp_path, indexer_types=["full"] * 3), "lacks", ".1.self_attn.indexer.")

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"indexer_types": ["shared", "full", "full"]}, ["`indexer_types` is ['shared'", "the first of which"]),
            ({"indexer_types": ["full", "full"]}, ["`indexer_types`", "each of 3 layers"]),
            ({"indexer_types": ["full", "full", "none"]}, ["`indexer_types`", "'full' or 'shared'"]),
            ({"indexer_types": None, "index_topk_pattern": "FXF"}, ["`index_topk_pattern` is 'FXF'"]),
            ({"indexer_types": None, "index_topk_freq": 0}, ["`index_topk_freq` is 0"]),
            ({"rope_interleave": False}, ["`rope_interleave` is False"]),
            ({"indexer_rope_interleave": False}, ["`indexer_rope_interleave` is False"]),
            ({"q_lora_rank": None}, ["`q_lora_rank` is None"]),
        ],
    )
    def test_unsupported_configurations_are_rejected(self, tmp_path, values, words):
        rejects(changed("glm5", tmp_path, **values), "config.json", *words)


class TestKimiK25:
    def test_weights_of_the_images_model_are_skipped(self, tmp_path):
        def change(weights):
            for name in list(weights):
                if not name.startswith("language_model."):
                    del weights[name]

        model = models.load(RECORDED / "kimi_k25")
        assert_same(models.load(changed("kimi_k25", tmp_path, change)), model)
        # Transformers saves another name of the architecture.
        folder = changed("kimi_k25", tmp_path, architectures=["Kimi_K25ForConditionalGeneration"])
        assert_same(models.load(folder), model)

    def test_other_weights_are_not(self, tmp_path):
        for name in ("other.weight", "model.layers.0.input_layernorm.weight", "language_model.vision_tower.weight"):
            folder = changed("kimi_k25", tmp_path, lambda weights, name=name: weights.update({name: np.ones(48)}))
            rejects(folder, "does not have", repr(name))
        name = "language_model.model.blocks.1.mlp.gate.weight"
        rejects(changed("kimi_k25", tmp_path, lambda weights: weights.pop(name)), "lacks", "1.mlp.gate.weight")

    def test_published_weights_of_the_text_model_are_skipped(self, tmp_path):
        def change(weights):
            published("kimi_k25")(weights)
            layer = "language_model.model.layers"
            for name in list(weights):
                if name.startswith(f"{layer}.1."):
                    weights[name.replace(f"{layer}.1.", f"{layer}.2.")] = weights[name]
            weights[f"{layer}.2.eh_proj.weight"] = np.ones((48, 96), np.float32)
            weights[f"{layer}.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)

        assert_same(models.load(changed("kimi_k25", tmp_path, change)), models.load(RECORDED / "kimi_k25"))

    def test_a_tied_head(self, tmp_path):
        folder = changed("kimi_k25", tmp_path, lambda weights: weights.pop("language_model.lm_head.weight"))
        rejects(folder, "lacks", "language_model.lm_head.weight")
        folder = changed("kimi_k25", tmp_path, tie_word_embeddings=True)
        rejects(folder, "language_model.lm_head.weight", "differs from", "language_model.model.embed_tokens.weight")
        tied = changed("kimi_k25", tmp_path, lambda w: w.pop("language_model.lm_head.weight"), tie_word_embeddings=True)
        assert "head" not in models.load(tied).params

    def test_published_int4_weights_are_rejected(self, tmp_path):
        text = json.loads((RECORDED / "kimi_k25" / "config.json").read_text())["text_config"]
        text["quantization_config"] = {"format": "pack-quantized", "quant_method": "compressed-tensors"}
        folder = changed("kimi_k25", tmp_path, text_config=text)
        rejects(
            folder, "config.json", "`text_config.quantization_config.quant_method` is 'compressed-tensors'", "'fp8'"
        )


class TestLongCatFlash:
    def test_a_layer_of_the_cache_per_attention(self):
        model = models.load(RECORDED / "longcat_flash")
        assert (model.config.num_layers, len(model.params["layers"]), model.layout(4).num_layers) == (2, 2, 4)

    def test_the_scales_of_queries_and_latents_are_in_the_norms(self):
        config = models.ModelConfig.from_json(PUBLISHED["LongCat-Flash"])
        assert (config.hidden_size, config.attention.q_lora_rank, config.attention.kv_lora_rank) == (6144, 1536, 512)
        weights = safetensors.numpy.load_file(RECORDED / "longcat_flash" / FILE)
        for layer, tree in enumerate(models.load(RECORDED / "longcat_flash").params["layers"]):
            for i, half in enumerate(tree["halves"]):
                for name, rank in (("q_a", 24), ("kv_a", 128)):
                    norm = weights[f"model.layers.{layer}.self_attn.{i}.{name}_layernorm.weight"]
                    right = norm.astype(np.float64) * np.sqrt(48 / rank)
                    np.testing.assert_allclose(half["attention"][f"{name}_norm"], right, rtol=2**-23)

    def test_most_tokens_choose_experts_of_both_kinds(self):
        """In the recorded model: 8 experts with weights, 4 without."""
        model = models.load(RECORDED / "longcat_flash")
        x = jax.random.normal(jax.random.key(0), (200, 48))
        for layer in model.params["layers"]:
            chosen, _ = route(model.config.experts, layer["mixture"], x)
            counts = np.bincount(np.asarray(chosen).reshape(-1), minlength=12)
            assert counts[:8].sum() > 200
            assert counts[8:].sum() > 100

    def test_weights_without_a_use_are_skipped(self, tmp_path):
        name = "model.layers.0.mlp.experts.8.{}_proj.weight"

        scales = f"{name.format('up')}_scale_inv"
        folder = changed("longcat_flash", tmp_path, lambda weights: weights.update({scales: np.ones((1, 1))}))
        assert_same(models.load(folder), models.load(RECORDED / "longcat_flash"))

        def published(weights):  # not those that transformers saves for experts that have none
            for expert in weights.copy():
                if any(f"experts.{i}." in expert for i in range(8, 12)):
                    del weights[expert]
            weights["model.mtp.layers.0.eh_proj.weight"] = np.ones((48, 96), np.float32)

        assert name.format("up") in safetensors.numpy.load_file(RECORDED / "longcat_flash" / FILE)
        folder = changed("longcat_flash", tmp_path, published)
        assert_same(models.load(folder), models.load(RECORDED / "longcat_flash"))
        down = np.ones((48, 16), np.float32)
        folder = changed("longcat_flash", tmp_path, lambda weights: weights.update({name.format("down"): down}))
        rejects(folder, "does not have", name.format("down"))
        with pytest.raises(ValueError, match="`num_nextn_predict_layers` is 0"):
            models.load(RECORDED / "longcat_flash", mtp=True)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"mla_scale_q_lora": False}, ["`mla_scale_q_lora` is False"]),
            ({"mla_scale_kv_lora": False}, ["`mla_scale_kv_lora` is False"]),
            ({"attention_method": "MHA"}, ["`attention_method` is 'MHA'"]),
            ({"zero_expert_type": "zero"}, ["`zero_expert_type` is 'zero'", "'identity'"]),
            ({"router_bias": True}, ["`router_bias` is True"]),
            ({"norm_topk_prob": True}, ["`norm_topk_prob` is True"]),
            ({"rope_interleave": False}, ["`rope_interleave` is False"]),
            ({"head_dim": 64}, ["`head_dim` is 64", "8"]),
            ({"moe_topk": 13}, ["`moe_topk` is 13", "8 + 4 experts"]),
            ({"ffn_hidden_size": 0}, ["`ffn_hidden_size` is 0"]),
            ({"num_layers": "2"}, ["`num_layers` is '2'"]),
            ({"routed_scaling_factor": -1}, ["`routed_scaling_factor` is -1", "0 < `routed_scaling_factor`"]),
        ],
    )
    def test_unsupported_configurations_are_rejected(self, tmp_path, values, words):
        rejects(changed("longcat_flash", tmp_path, **values), "config.json", *words)


class TestMistral4:
    EXPERTS = "model.layers.1.mlp.experts"

    @staticmethod
    def with_images(folder):
        """The recorded model as the text model of a checkpoint of Mistral Small 4."""
        text = json.loads((RECORDED / "mistral4" / "config.json").read_text())
        config = {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {name: value for name, value in text.items() if name != "architectures"},
            "tie_word_embeddings": False,
        }
        weights = safetensors.numpy.load_file(RECORDED / "mistral4" / FILE)
        weights = {f"language_model.{name}": value for name, value in weights.items()}
        for name in ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"):
            weights[name] = np.ones(4, np.float32)
        safetensors.numpy.save_file(weights, folder / FILE)
        (folder / "config.json").write_text(json.dumps(config))
        return config

    def test_the_text_model_of_a_model_for_images(self, tmp_path):
        config = self.with_images(tmp_path)
        assert_same(models.load(tmp_path), models.load(RECORDED / "mistral4"))
        for key, value in (("model_type", "mistral"), ("llama_4_scaling_beta", None)):
            text = json.loads(json.dumps(config["text_config"]))
            (text if key in text else text["rope_parameters"])[key] = value
            (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
            rejects(tmp_path, "config.json", f"{key}` is {value!r}")
        del config["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        rejects(tmp_path, "config.json", "no `tie_word_embeddings`")

    def test_experts_packed_in_two_tensors(self, tmp_path):
        weights = safetensors.numpy.load_file(RECORDED / "mistral4" / FILE)
        stacks = models.load(RECORDED / "mistral4").params["layers"][1]["mixture"]["experts"]
        both, down = weights[f"{self.EXPERTS}.gate_up_proj"], weights[f"{self.EXPERTS}.down_proj"]
        assert (both.shape, down.shape) == ((8, 32, 48), (8, 48, 16))
        np.testing.assert_array_equal(stacks["gate"], both[:, :16])
        np.testing.assert_array_equal(stacks["up"], both[:, 16:])
        np.testing.assert_array_equal(stacks["down"], down)
        name = f"{self.EXPERTS}.gate_up_proj"
        rejects(changed("mistral4", tmp_path, lambda weights: weights.pop(name)), "lacks", name)
        rejects(
            changed("mistral4", tmp_path, n_routed_experts=2**31 - 1), "(8, 48, 16)", "expected (2147483647, 48, 16)"
        )

        def change(weights):
            weights[name][3, 20, 7] = np.nan

        rejects(changed("mistral4", tmp_path, change), name, "1 NaN")

    def test_the_scales_of_queries(self):
        scale = models.ModelConfig.from_json(PUBLISHED["Mistral Small 4"]).attention.query_scale
        positions = np.asarray([-3, 0, 8191, 8192, 16384, 1048575])
        right = 1 + 0.1 * np.log(np.asarray([1, 1, 1, 2, 3, 128]))
        np.testing.assert_allclose(query_scales(scale, positions), right, rtol=2**-22)

    def test_hopper_kernels_support_its_entries(self):
        config = models.ModelConfig.from_json(PUBLISHED["Mistral Small 4"])
        model = jax.eval_shape(partial(models.random_model, config))
        cache = jax.eval_shape(lambda: model.cache(8))
        q, q_pe = (jax.ShapeDtypeStruct((2, 32, size), "bfloat16") for size in (256, 64))
        index = jax.ShapeDtypeStruct((2, 4), "int32"), jax.ShapeDtypeStruct((2,), "int32")
        found = jaxkv.explain(jaxkv.decode_mla, q, q_pe, cache, *index, layer=0, scale=1.0)
        assert not [reason for reason in found.reasons["mosaic_gpu"] if not reason.startswith("needs an NVIDIA Hopper")]

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"n_group": 2}, ["`n_group` is 2", "expected 1"]),
            ({"topk_group": 2}, ["`topk_group` is 2", "expected 1"]),
            ({"rope_parameters": {"rope_type": "default"}}, ["`rope_parameters.rope_type` is 'default'", "'yarn'"]),
            ({"rope_parameters": {"rope_type": "yarn"}}, ["no `rope_parameters.llama_4_scaling_beta`"]),
            ({"partial_rotary_factor": 1.0}, ["`partial_rotary_factor` is 1.0", "0.5"]),
            ({"qk_nope_head_dim": 48}, ["`rope_parameters.partial_rotary_factor` is 0.5", "0.25"]),
        ],
    )
    def test_unsupported_configurations_are_rejected(self, tmp_path, values, words):
        rejects(changed("mistral4", tmp_path, **values), "config.json", *words)


class TestQwen3:
    @staticmethod
    def read(name="Qwen3 with experts", **values):
        return models.ModelConfig.from_json({**PUBLISHED[name], **values})

    def test_the_size_of_the_published_models(self):
        """Their cards say 4.0 and 30.5 billion parameters."""
        sizes = []
        for name in ("Qwen3", "Qwen3 with experts"):
            model = jax.eval_shape(partial(models.random_model, self.read(name)))
            sizes.append(sum(weight.size for weight in jax.tree.leaves(model.params)) / 1e9)
        assert [round(size, 1) for size in sizes] == [4.0, 30.5]

    def test_the_dense_layers(self):
        def dense(**values):
            config = self.read(num_hidden_layers=4, **values)
            assert (config.experts is None) == (config.num_dense_layers == 4)
            return config.num_dense_layers

        assert dense() == dense(mlp_only_layers=None) == dense(decoder_sparse_step=None) == 0
        assert dense(mlp_only_layers=[1, 0]) == 2
        assert (dense(decoder_sparse_step=4), dense(decoder_sparse_step=5)) == (3, 4)
        assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == 3

    def test_the_number_of_experts_as_published_and_as_transformers_writes_it(self):
        values = {name: value for name, value in PUBLISHED["Qwen3 with experts"].items() if name != "num_experts"}
        assert models.ModelConfig.from_json({**values, "num_local_experts": 128}) == self.read()
        with pytest.raises(ValueError, match="`num_local_experts` is 64: expected the same as `num_experts`"):
            self.read(num_local_experts=64)

    def test_yarn(self):
        """As the model cards recommend it, and as DeepSeek-R1-0528-Qwen3-8B has it, with a key of vLLM."""
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        assert self.read(rope_scaling=yarn).rope.scaling.factor == 4
        with pytest.raises(ValueError, match=r"`rope_scaling\.attn_factor` is 0\.87\d*: .* `attention_factor` instead"):
            self.read("Qwen3", rope_scaling={**yarn, "attn_factor": 0.8782488562869419})

    @pytest.mark.parametrize(
        ("family", "values", "words"),
        [
            ("qwen3", {"use_sliding_window": True}, ["`use_sliding_window` is True"]),
            ("qwen3", {"layer_types": ["sliding_attention"] * 2}, ["`layer_types`", "'full_attention' for each of 2"]),
            ("qwen3", {"hidden_act": "gelu"}, ["`hidden_act` is 'gelu'"]),
            ("qwen3", {"num_key_value_heads": 4}, ["`num_key_value_heads` is 4", "divisor of the 6"]),
            ("qwen3", {"rope_parameters": {"rope_type": "llama3"}, "rope_theta": 1e4}, ["`rope_parameters.rope_type`"]),
            ("qwen3_moe", {"use_sliding_window": True}, ["`use_sliding_window` is True"]),
            ("qwen3_moe", {"mlp_only_layers": [2]}, ["`mlp_only_layers` is [2]", "from 0 to 1"]),
            (
                "qwen3_moe",
                {"mlp_only_layers": [1], "decoder_sparse_step": 1},
                ["`mlp_only_layers` is [1]", "before those"],
            ),
            ("qwen3_moe", {"decoder_sparse_step": 0}, ["`decoder_sparse_step` is 0", "from 1"]),
            (
                "qwen3_moe",
                {"decoder_sparse_step": 2, "num_hidden_layers": 3},
                ["`decoder_sparse_step` is 2", "before those"],
            ),
            ("qwen3_moe", {"num_experts_per_tok": 9}, ["`num_experts_per_tok` is 9", "the 8 experts"]),
            ("qwen3_moe", {"num_local_experts": 0}, ["`num_local_experts` is 0"]),
        ],
    )
    def test_unsupported_configurations_are_rejected(self, family, values, words, tmp_path):
        rejects(changed(family, tmp_path, **values), "config.json", *words)


class TestQwen3Next:
    @staticmethod
    def read(**values):
        return models.ModelConfig.from_json({**PUBLISHED["Qwen3-Next"], **values})

    def test_the_layers_with_attention(self):
        config = self.read()
        assert [layer for layer in range(48) if layer not in config.recurrent.layers] == list(range(3, 48, 4))
        assert (config.num_attentions, config.first_attention(3), config.first_attention(4)) == (12, 0, 1)
        kinds = ["linear_attention", "full_attention"]
        types = [kinds[layer % 4 == 3] for layer in range(48)]
        assert self.read(layer_types=types) == self.read(layer_types=types, full_attention_interval=2) == config
        assert self.read(full_attention_interval=None) == config
        assert self.read(full_attention_interval=2).num_attentions == 24

    def test_the_size_of_the_published_model(self):
        """The model card says 80 billion parameters, of which a token uses 3."""
        model = jax.eval_shape(partial(models.random_model, self.read()))
        count = sum(weight.size for weight in jax.tree.leaves(model.params))
        assert round(count / 1e9) == 80
        layout = model.layout(4, 1536)
        # Of each layer, 32 heads of 128 x 128 values, and 3 tokens of 8,192 channels.
        assert layout["state"].entry.nbytes == 4 * (32 * 128 * 128 + 3 * 8192)
        assert (layout["kv"].num_layers, layout["state"].num_layers) == (12, 36)
        assert {group.strides.block * 2 for group in layout.values()} == {36 * layout["state"].entry.nbytes}

    def test_heads_are_rotated_in_part(self):
        config = self.read()
        assert (config.attention.head_dim, config.attention.rotary_dim) == (256, 64)
        assert self.read(partial_rotary_factor=1).attention.rotary_dim == 256
        rope = {"rope_type": "default", "rope_theta": 1e7}
        values = {"rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None}
        published = {name: value for name, value in PUBLISHED["Qwen3-Next"].items() if name not in values}
        for factor in ({}, {"partial_rotary_factor": 0.25}):
            assert models.ModelConfig.from_json({**published, "rope_parameters": {**rope, **factor}}) == config

    def test_weights_of_the_mtp_layer_are_skipped(self, tmp_path):
        def change(weights):
            weights["mtp.fc.weight"] = np.ones((48, 96), np.float32)
            weights["mtp.layers.0.self_attn.q_proj.weight"] = np.ones((48, 48), np.float32)

        assert_same(models.load(changed("qwen3_next", tmp_path, change)), models.load(RECORDED / "qwen3_next"))
        name = "model.layers.1.linear_attn.A_log"
        folder = changed("qwen3_next", tmp_path, lambda weights: weights.update({name: np.ones(4, np.float32)}))
        rejects(folder, "does not have", name)

    def test_norms_are_stored_minus_1(self):
        weights = safetensors.numpy.load_file(RECORDED / "qwen3_next" / FILE)
        params = models.load(RECORDED / "qwen3_next").params
        attention = params["layers"][1]["attention"]
        np.testing.assert_array_equal(params["norm"], weights["model.norm.weight"] + 1)
        np.testing.assert_array_equal(attention["k_norm"], weights["model.layers.1.self_attn.k_norm.weight"] + 1)
        plain = weights["model.layers.0.linear_attn.norm.weight"]
        np.testing.assert_array_equal(params["layers"][0]["attention"]["norm"], plain)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"layer_types": ["full_attention"] * 3}, ["`layer_types`", "both kinds"]),
            ({"layer_types": ["linear_attention", "full_attention"]}, ["`layer_types`", "each of 3 layers"]),
            ({"layer_types": ["linear_attention", "full_attention", "mamba"]}, ["`layer_types`", "'full_attention'"]),
            ({"layer_types": None}, ["`full_attention_interval` is None", "both kinds among the 3"]),
            ({"decoder_sparse_step": 2}, ["`decoder_sparse_step` is 2"]),
            ({"mlp_only_layers": [0]}, ["`mlp_only_layers` is [0]"]),
            ({"use_sliding_window": True}, ["`use_sliding_window` is True"]),
            ({"linear_num_key_heads": 3}, ["`linear_num_key_heads` is 3", "divisor of the 4"]),
            ({"linear_conv_kernel_dim": 1}, ["`linear_conv_kernel_dim` is 1", "from 2"]),
            ({"num_experts_per_tok": 9}, ["`num_experts_per_tok` is 9", "the 8 experts"]),
            ({"num_experts": 0}, ["`num_experts` is 0"]),
            ({"head_dim": 12}, ["`head_dim` is 12", "even one"]),
            ({"hidden_act": "gelu"}, ["`hidden_act` is 'gelu'"]),
            ({"attention_bias": True}, ["`attention_bias` is True"]),
            ({"partial_rotary_factor": 0.5}, ["`rope_parameters.partial_rotary_factor` is 0.25", "0.5"]),
            ({"partial_rotary_factor": 1.5}, ["`partial_rotary_factor` is 1.5", "at most 1"]),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["`rope_parameters.rope_type` is 'yarn'"]),
        ],
    )
    def test_unsupported_configurations_are_rejected(self, tmp_path, values, words):
        rejects(changed("qwen3_next", tmp_path, **values), "config.json", *words)
