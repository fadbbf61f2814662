"""Configurations drawn at random, as Hugging Face Transformers saves them: the same tokens and logits."""

import itertools

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.weights.checkpoint import Checkpoint
from jaxkv.models.weights.parameters import parameters, spellings, unused
from support.cases import further, slow
from support.drawn import FOLDER, cases, write
from support.logits import logits_of

FAMILIES = sorted(path.name.removesuffix(".json.xz") for path in FOLDER.glob("*.json.xz"))
CASES = 20
CHOSEN = {
    "deepseek_v3": 12,
    "deepseek_v4": 4,
    "gpt_oss": 8,
    "kimi_linear": 6,
    "qwen3": 13,
    "qwen3_next": 16,
}
"""A small case of each of some unlike families; all others are slow.  Those of DeepSeek-V3 and Kimi have such small
latents that the epsilon of their norms decides logits."""
QUICK = ("deepseek_v3", "qwen3")
"""The families whose cases run by default; those of the others run in CI."""


def chosen(family, number):
    if CHOSEN.get(family) != number:
        return slow(family, number)
    return pytest.param(family, number) if family in QUICK else further(family, number)


TOLERANCE = 1e-4  # of logits, relative to the largest, as in test_models.py


@pytest.mark.parametrize("family", FAMILIES)
def test_all_configurations_are_read_and_have_these_weights(family, tmp_path):
    assert len(cases(family)) == CASES
    for case in cases(family):
        write(tmp_path, case)
        config = models.ModelConfig.read(tmp_path)
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.rename(spellings(config, checkpoint.names))
            weights = jax.tree.leaves(parameters(config, mtp=False, names=checkpoint.names))
            checkpoint.check(weights, unused(config, checkpoint.names))


@pytest.mark.parametrize(("family", "number"), [chosen(*each) for each in itertools.product(FAMILIES, range(CASES))])
def test_tokens_and_logits(family, number, tmp_path):
    case = cases(family)[number]
    write(tmp_path, case)
    model = models.load(tmp_path, dtype="float32")
    logits = logits_of(model, case.prompt + case.tokens[:-1])[-len(case.tokens) :]
    assert logits.argmax(-1).tolist() == case.tokens
    error = np.abs(logits[-1] - np.asarray(case.logits)).max() / np.abs(case.logits).max()
    assert error < TOLERANCE
