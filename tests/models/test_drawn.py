"""Configurations drawn at random, as Hugging Face Transformers saves them: the same tokens and logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.models.weights.checkpoint import Checkpoint
from jaxkv.models.weights.parameters import parameters, spellings, unused
from support.cases import slow
from support.drawn import FOLDER, cases, write

FAMILIES = sorted(path.name.removesuffix(".json.xz") for path in FOLDER.glob("*.json.xz"))
CASES = 20
BY_DEFAULT = {
    "deepseek_v3": 12,
    "deepseek_v4": 4,
    "glm4_moe_lite": 3,
    "glm5": 3,
    "gpt_oss": 8,
    "kimi_k25": 3,
    "kimi_linear": 6,
    "longcat_flash": 4,
    "qwen3": 13,
    "qwen3_moe": 2,
    "qwen3_next": 16,
}
"""The cases that are not slow: small ones, of unlike families.  Those of DeepSeek-V3, GLM and Kimi have such small
latents that the epsilon of their norms decides logits."""
SOME = [
    (family, number) if BY_DEFAULT.get(family) == number else slow(family, number)
    for family in FAMILIES
    for number in range(CASES)
]
TOLERANCE = 1e-4  # of logits, relative to the largest, as in test_models.py


@partial(jax.jit, donate_argnums=1)
def run(model, cache, *batch):
    """Logits of all new tokens, [1, Q, vocab]."""
    cache, x = models.forward(model, cache, *batch)
    return cache, models.head(model, x)


def logits_of(model, tokens):
    """The logits at every position, computed in two chunks by the same program."""
    width, count = -(-len(tokens) // 2), len(tokens)
    size = model.usual_block_size
    sizes = {"": size}
    layout = model.layout(1, size)
    if isinstance(layout, jaxkv.PackedLayout):
        sizes = {name: table.block_size for name, table in layout.tables.items()}
    needed = {name: -(-count // held) for name, held in sizes.items()}
    blocks = iter(np.random.default_rng(0).permutation(sum(needed.values())))
    tables = {name: np.asarray([[next(blocks) for _ in range(of)]], np.int32) for name, of in needed.items()}
    cache, found = model.cache(sum(needed.values()), size), []
    for start in (0, width):
        new = tokens[start : start + width]
        padding = width - len(new)
        positions = np.asarray([[-1] * padding + [*range(start, start + len(new))]])
        slots = jaxkv.slots_for(tables[""], positions, block_size=size)
        length = jnp.asarray([start + len(new)], jnp.int32)
        padded = np.asarray([[0] * padding + new], np.int32)
        cache, logits = run(model, cache, padded, length, tables if len(tables) > 1 else tables[""], slots)
        found.append(np.asarray(logits)[0, padding:])
    return np.concatenate(found)


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


@pytest.mark.parametrize(("family", "number"), SOME)
def test_tokens_and_logits(family, number, tmp_path):
    case = cases(family)[number]
    write(tmp_path, case)
    model = models.load(tmp_path, dtype="float32")
    logits = logits_of(model, case.prompt + case.tokens[:-1])[-len(case.tokens) :]
    assert logits.argmax(-1).tolist() == case.tokens
    error = np.abs(logits[-1] - np.asarray(case.logits)).max() / np.abs(case.logits).max()
    assert error < TOLERANCE
