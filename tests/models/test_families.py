"""What sets families apart beyond their recorded tokens: optional and unused weights, and values that are rejected."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxkv import models
from jaxkv.models.layers.routing import route

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
