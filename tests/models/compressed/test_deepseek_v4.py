"""DeepSeek-V4: compressors against float64, the groups of its cache, its configuration, and what is rejected."""

import dataclasses
import json
import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv import models
from jaxkv.models import cache_groups
from jaxkv.models.batch import Batch
from jaxkv.models.layers.compressed import Compressor, new_entries
from jaxkv.models.layers.rope import frequencies
from jaxkv_kernels.addressing import slots_for
from models.test_families import changed, rejects
from models.test_models import Requests
from support import oracle
from support.many_devices import on_several_devices

FOLDER = Path(__file__).parents[2] / "data" / "models" / "deepseek_v4"
EPS = 1e-6
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
"""DeepSeek-V4-Flash, converted to bf16: published keys, with the values of `DeepseekV4Config` in transformers 5.23.0.

The pattern of its layers is two of a window, then alternating rates of 4 and 128, then that of multi-token prediction.
"""


@cache
def model():
    return models.load(FOLDER, dtype="float32")


class TestCompressor:
    """All entries of two requests whose tokens come in chunks, with other rows of a chunk in the same step."""

    CHUNKS = ([(0, 37), (0, 29)], [(0, 1), (0, 0)], [(0, 3), (0, 4)], [(0, 40), (1, 9)], [(1, 1), (0, 8)], [(1, 6)])
    """Steps, of which each has parts (request, new tokens)."""
    WIDTH = 41

    @pytest.mark.parametrize(
        ("layer", "rows", "entries"),
        [(1, "csa_rows", "csa"), (1, "indexer_rows", "indexer"), (2, "hca_rows", "hca")],
    )
    def test_entries_are_those_of_float64(self, layer, rows, entries):
        attention = dataclasses.replace(model().config.attention, kinds=("csa", "hca", "csa", "hca"))
        weights = model().params["layers"][layer]["attention"]
        weights = weights["indexer"]["compressor"] if entries == "indexer" else weights["compressor"]
        rate = attention.hca_rate if entries == "hca" else attention.csa_rate
        groups = cache_groups.of_compressed(attention, "f32")
        sizes = cache_groups.block_sizes(groups, 32)
        layout = jaxkv.PackedLayout(num_blocks=200, block_size=sizes, groups=groups)
        held = jaxkv.KVCache(jnp.full(layout["csa"].size, 0xFF, jnp.uint8), layout["csa"])
        rng = np.random.default_rng(layer)
        ids = iter(rng.permutation(200).astype(np.int32))
        tables = {
            name: np.asarray([[next(ids) for _ in range(-(-128 // table.block_size))] for _ in range(2)])
            for name, table in layout.tables.items()
            if name in (cache_groups.MAIN, layout.groups[rows].table)
        }
        store = jax.jit(
            partial(
                new_entries,
                Compressor(rate, entries != "hca", layout.groups[rows].table),
                attention,
                rows=layout[rows],
                entries=layout[entries],
                layer=jnp.int32(1),
                eps=EPS,
                implementation=None,
            )
        )
        x = rng.standard_normal((2, 128, 48), np.float32)
        lengths, found = [0, 0], {}
        for step in self.CHUNKS:
            parts, tokens = [], []
            for request, count in step:
                start, lengths[request] = lengths[request], lengths[request] + count
                positions = np.full((1, self.WIDTH), -1, np.int32)
                positions[0, self.WIDTH - count :] = np.arange(start, start + count)
                own = {name: table[request : request + 1] for name, table in tables.items()}
                parts.append((jnp.asarray([lengths[request] if count else 0]), own, jnp.asarray(positions)))
                tokens.append(np.where(positions[..., None] < 0, np.nan, x[request][positions]))
            batch = Batch.of(model(), held, parts)
            joined = tokens[0] if len(tokens) == 1 else np.concatenate([t.reshape(1, -1, 48) for t in tokens], axis=1)
            held, new, slots = store(weights, jnp.asarray(joined), held, batch=batch)
            stored = {int(slot): np.asarray(entry) for slot, entry in zip(slots, new, strict=True) if slot >= 0}
            assert not stored.keys() & found.keys()  # each is made once
            found |= stored
        size = layout[entries].block_size
        for request, length in enumerate(lengths):
            kv, gates = (x[request, :length] @ np.asarray(weights[name], np.float64).T for name in ("kv", "gate"))
            turns = frequencies(attention.compressed_rope, attention.rotary_dim).astype(np.float64)
            bias, norm = (np.asarray(weights[name], np.float64) for name in ("position_bias", "norm"))
            right = oracle.compressed(kv, gates, bias, norm, turns, rate=rate, eps=EPS)
            slots = [tables[cache_groups.MAIN][request, w // size] * size + w % size for w in range(len(right))]
            # The entries are about 1, and the float32 sums over the hidden size are computed before a softmax.
            np.testing.assert_allclose(np.stack([found.pop(slot) for slot in slots]), right, rtol=0, atol=3e-5)
        assert not found


def test_blocks_of_all_tables_have_about_the_same_size():
    config = models.ModelConfig.from_json(FLASH)
    layout = jaxkv_layout(config, "fp8_v4", 256)
    assert {name: (table.block_size, table.window) for name, table in layout.tables.items()} == {
        "": (256, None),
        "window": (32, 128),
        "csa_rows": (4, 8),
        "hca_rows": (8, 128),
    }
    assert [layout[name].num_layers for name in ("csa", "hca", "window")] == [21, 20, 43]
    assert [layout[name].block_size for name in ("csa", "indexer", "hca")] == [64, 64, 2]  # entries per block
    assert layout["csa"].entry == jaxkv.MLAEntry("fp8_v4", latent=448, rope=64)
    assert layout["indexer"].entry == jaxkv.IndexerEntry(head_dim=128)
    assert jaxkv_layout(config, "bf16", 256)["csa"].entry == jaxkv.MLAEntry("bf16", latent=512, rope=0)

    model = jax.eval_shape(lambda: models.random_model(config))
    assert model.usual_block_size == 128
    assert jaxkv_layout(config, "bf16", 128).tables[""].block_size == 128


def jaxkv_layout(config, entry_format, block_size):
    model = jax.eval_shape(lambda: models.random_model(config, entry_format=entry_format))
    return model.layout(4, block_size)


@pytest.mark.slow  # compiles three programs; the recorder checks that the selection decides tokens
def test_layers_attend_to_what_their_kind_sees():
    """With all compressed entries instead of the selected ones, or with another window, logits differ."""
    config = model().config
    everything = dataclasses.replace(config.attention.indexer, topk=1024)
    for attention in (
        dataclasses.replace(config.attention, indexer=everything),
        dataclasses.replace(config.attention, window=25),
    ):
        other = dataclasses.replace(model(), config=dataclasses.replace(config, attention=attention))
        logits = [one_prompt(chosen) for chosen in (model(), other)]
        assert np.abs(logits[0] - logits[1]).max() > 1e-2


def one_prompt(model, prompt=None):
    """The logits after the longest recorded prompt, or another one of 200 tokens, in one chunk."""
    if prompt is None:
        with np.load(FOLDER / "truth.npz") as truth:
            prompt = truth["prompts"][-1:]
    tables, slots = tables_of(model, 1)
    lengths = jnp.asarray([200], jnp.int32)
    _, logits = jax.jit(models.prefill)(model, model.cache(1000, 16), prompt, lengths, tables, slots)
    return np.asarray(logits)


def tables_of(model, rows):
    """Tables of requests of 200 tokens, all with the same ids, and the slots of the tokens."""
    ids = iter(range(1000))
    tables = {
        name: np.asarray([[next(ids) for _ in range(-(-208 // table.block_size))]] * rows, np.int32)
        for name, table in model.layout(1, 16).tables.items()
    }
    return tables, slots_for(tables[""], np.tile(np.arange(200), (rows, 1)), block_size=16)


class TestConfiguration:
    def test_published_keys(self):
        config = models.ModelConfig.from_json(FLASH)
        attention, experts = config.attention, config.experts
        assert (attention.head_dim, attention.rotary_dim, attention.window) == (512, 64, 128)
        assert attention.kinds == ("window", "window", *["csa", "hca"] * 20, "csa")
        assert (attention.csa_rate, attention.hca_rate) == (4, 128)
        assert config.rope == models.config.Rope(10000.0, True, None)
        assert attention.compressed_rope.theta == 160000
        assert attention.compressed_rope.scaling.attention_factor == 1
        assert (experts.hash_layers, experts.limit, experts.scoring) == (3, 10, "sqrtsoftplus")
        assert config.hyper == models.config.HyperConnections(4, 20, 1e-6)
        assert (config.stop_tokens, config.num_nextn_predict_layers) == ((1,), 0)

    def test_keys_of_transformers_say_the_same(self):
        published = {"compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "torch_dtype"}
        kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
        scaling = {name: value for name, value in FLASH["rope_scaling"].items() if name != "type"}
        plain = {"partial_rotary_factor": 0.125}
        values = {
            **{name: value for name, value in FLASH.items() if name not in published},
            "dtype": "bfloat16",
            "layer_types": [kinds[ratio] for ratio in FLASH["compress_ratios"][:43]],
            "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
            "partial_rotary_factor": 0.125,
            "rope_parameters": {
                "main": {**plain, "rope_type": "default", "rope_theta": 10000.0},
                "compress": {
                    **scaling, **plain, "rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0
                },
            },
        }  # fmt: skip
        assert models.ModelConfig.from_json(values) == models.ModelConfig.from_json(FLASH)
        rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
        attention = models.ModelConfig.from_json({**values, "compress_rates": rates}).attention
        assert (attention.csa_rate, attention.hca_rate) == (8, 64)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (
                {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
                ["`quantization_config.weight_block_size` is [32, 32]"],
            ),
            ({"quantization_config": {"quant_method": "mxfp4"}}, ["`quantization_config.quant_method` is 'mxfp4'"]),
            ({"expert_dtype": "int4"}, ["`expert_dtype` is 'int4'"]),
            ({"num_key_value_heads": 4}, ["`num_key_value_heads` is 4", "expected 1"]),
            ({"scoring_func": "sigmoid"}, ["`scoring_func` is 'sigmoid'", "'sqrtsoftplus'"]),
            ({"n_shared_experts": 2}, ["`n_shared_experts` is 2", "expected 1"]),
            ({"norm_topk_prob": False}, ["`norm_topk_prob` is False"]),
            ({"o_groups": 3}, ["`o_groups` is 3", "a divisor of the 4"]),
            ({"tie_word_embeddings": True}, ["`tie_word_embeddings` is True", "false"]),
            ({"layer_types": ["sliding_attention"] * 3}, ["`layer_types`", "at least one layer with compressed"]),
            ({"layer_types": ["sliding_attention"] * 2}, ["`layer_types`", "each of 3 layers"]),
            ({"layer_types": ["full_attention"] * 3}, ["`layer_types`", "heavily_compressed_attention"]),
            ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, ["`mlp_layer_types`", "first those of hash_moe"]),
            ({"qk_rope_head_dim": 8}, ["`qk_rope_head_dim` is 8", "32"]),
            ({"index_head_dim": 8}, ["`index_head_dim` is 8", "32 values"]),
            ({"num_experts_per_tok": 9}, ["`num_experts_per_tok` is 9", "8 `n_routed_experts`"]),
            ({"layer_types": None}, ["`layer_types` is None"]),
            ({"head_dim": 192}, ["`qk_rope_head_dim` is 32", "64"]),
            ({"rope_theta": 5.0}, ["`rope_parameters.main.rope_theta` is 10000.0", "5.0"]),
        ],
    )
    def test_unsupported_configurations_are_rejected(self, tmp_path, values, words):
        rejects(changed("deepseek_v4", tmp_path, **values), "config.json", *words)

    def test_bounds_of_yarn_are_rounded(self, tmp_path):
        """transformers rounds them whatever the nested object says, and DeepSeek's own code has no such key."""
        rope = json.loads((FOLDER / "config.json").read_text())["rope_parameters"]
        for value in (True, False):
            rope["compress"]["truncate"] = value
            folder = changed("deepseek_v4", tmp_path, rope_parameters=rope)
            if value:
                assert models.ModelConfig.read(folder) == models.ModelConfig.read(FOLDER)
            else:
                rejects(folder, "config.json", "`rope_parameters.compress.truncate` is False: expected True")

    def test_other_layers_than_the_published_ratios_are_rejected(self):
        with pytest.raises(ValueError, match=r"`compress_ratios` is .*: expected 0, 4 or 128 for each of 43 layers"):
            models.ModelConfig.from_json({**FLASH, "compress_ratios": [16] * 43})


class TestWeights:
    TABLE = "model.layers.0.ffn.gate.tid2eid"

    def test_layers_of_multi_token_prediction_are_skipped(self, tmp_path):
        folder = changed("deepseek_v4", tmp_path, lambda weights: weights.update({"mtp.0.norm.weight": np.ones(48)}))
        loaded = models.load(folder)
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, model().params))
        with pytest.raises(ValueError, match="`num_nextn_predict_layers` is 0"):
            models.load(FOLDER, mtp=True)

    def test_the_experts_of_token_ids(self, tmp_path):
        table = safetensors.numpy.load_file(FOLDER / "model.safetensors")[self.TABLE]
        assert table.dtype == np.int64
        loaded = model().params["layers"][0]["mixture"]["experts_of_ids"]
        assert loaded.dtype == jnp.int32
        np.testing.assert_array_equal(loaded, table)
        folder = changed("deepseek_v4", tmp_path, lambda weights: weights.update({self.TABLE: table.astype(np.int32)}))
        assert jax.tree.all(jax.tree.map(np.array_equal, models.load(folder).params, model().params))
        for wrong, words in (
            (np.where(table == 5, 8, table), ["holds 8", "from 0 to 7"]),
            (np.where(table == 5, -1, table), ["holds -1", "from 0 to 7"]),
            (table.astype(np.float32), ["has dtype F32", "I32 or I64"]),
        ):
            folder = changed("deepseek_v4", tmp_path, lambda weights, wrong=wrong: weights.update({self.TABLE: wrong}))
            rejects(folder, "model.safetensors", self.TABLE, *words)

    def test_integers_are_not_weights(self, tmp_path):
        def change(weights):
            weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.int32)

        rejects(changed("deepseek_v4", tmp_path, change), "'model.norm.weight' has dtype I32", "BF16, F16 or F32")


class TestRejected:
    def test_parallel_models(self):
        mesh = jax.make_mesh((1,), ("x",))
        for parallel in (models.TensorParallel, models.ContextParallel, models.ExpertParallel):
            words = (
                f"`parallel` is a {parallel.__name__}, and the model has compressed attention.*: expected a OneDevice"
            )
            with pytest.raises(ValueError, match=words):
                models.load(FOLDER, parallel=parallel(mesh, "x"))

    def test_entry_formats(self):
        with pytest.raises(ValueError, match="`entry_format` is 'fp8', which needs scales"):
            models.load(FOLDER, entry_format="fp8")
        with pytest.raises(ValueError, match="'fp7': expected one of"):
            models.load(FOLDER, entry_format="fp7")

    def test_block_sizes_that_rates_do_not_divide(self):
        with pytest.raises(ValueError, match="24 tokens: expected a multiple of the 16 tokens per entry"):
            model().cache(4, 24)

    def test_other_tables(self):
        held = model().cache(8, 16)
        new = jnp.zeros((1, 1), jnp.int32)
        table = jnp.zeros((1, 2), jnp.int32)
        names = ", ".join(map(repr, model().tables))
        with pytest.raises(ValueError, match=f"`block_tables` has the tables '': expected the model's, {names}"):
            models.prefill(model(), held, new, new[0], table, new)
        with pytest.raises(
            ValueError, match=f"`block_tables` has the tables '', 'window': expected the model's, {names}"
        ):
            models.prefill(model(), held, new, new[0], {"": table, "window": table}, new)
        wrong = dict.fromkeys(model().tables, table) | {"window": jnp.zeros((2, 2), jnp.int32)}
        with pytest.raises(ValueError, match=re.escape("`block_tables['window']` has shape (2, 2)")):
            models.prefill(model(), held, new, new[0], wrong, new)

    def test_other_caches(self):
        other = jaxkv.CacheLayout(num_layers=2, num_blocks=8, block_size=4, num_heads=1, entry=model().entry)
        with pytest.raises(ValueError, match="does not have the model's groups"):
            model().check_cache(jaxkv.KVCache.zeros(other))


def test_config_json_has_the_keys_of_transformers():
    assert json.loads((FOLDER / "config.json").read_text())["transformers_version"] == "5.24.0"


@pytest.mark.slow  # compiles a program for two devices
@on_several_devices
@pytest.mark.parametrize("kind", [models.DataParallel, models.DataExpertParallel])
def test_devices_with_requests_of_their_own(kind):
    divided = models.load(FOLDER, dtype="float32", parallel=kind(jax.make_mesh((2,), ("x",)), "x"))
    with np.load(FOLDER / "truth.npz") as truth:
        prompts = np.stack([truth["prompts"][4], np.roll(truth["prompts"][4], 1)])
        right = truth["step_logits"][4, 0]
    tables, slots = tables_of(divided, 2)
    _, logits = jax.jit(models.prefill)(
        divided, divided.cache(1000, 16), prompts, jnp.asarray([200, 200], jnp.int32), tables, slots
    )
    # As in tests/models/test_models.py: float32 rounding through all layers, relative to the largest logit.
    np.testing.assert_allclose(logits[0], right, rtol=0, atol=1e-4 * np.abs(right).max())
    np.testing.assert_allclose(logits[1], one_prompt(model(), prompts[1:])[0], rtol=0, atol=1e-4 * np.abs(right).max())


@pytest.mark.slow  # compiles two programs
def test_another_layout():
    """Tables of other block sizes: the tokens and logits are the recorded ones."""
    requests = Requests("deepseek_v4", block_size=16)
    assert requests.tables.keys() == set(model().tables)
    requests.run(chunk=200).check()


@pytest.mark.slow  # compiles a program
@pytest.mark.parametrize("entry_format", ["bf16", "fp8_v4"])
def test_quantised_entries(entry_format):
    """Most tokens of the tiny model stay the same, whose values are far less smooth than a trained model's."""
    found = one_prompt(models.load(FOLDER, dtype="float32", entry_format=entry_format))
    right = one_prompt(model())
    error = np.linalg.norm(found - right) / np.linalg.norm(right)
    assert 1e-4 < error < 0.5
