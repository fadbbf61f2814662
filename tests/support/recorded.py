"""The recorded models: their checkpoints, prompts, and the tokens that Hugging Face's models generate."""

from functools import cache
from pathlib import Path

import numpy as np

from jaxkv import models

FOLDER = Path(__file__).parents[1] / "data" / "models"
"""A checkpoint per family, made by `record.py` there."""

DISTINCT = ("deepseek_v32", "deepseek_v4", "gpt_oss", "kimi_linear", "llama", "longcat_flash", "qwen3_next")
"""Families whose layers differ most."""


@cache
def model(family):
    """The model of a family."""
    return models.load(FOLDER / family)


@cache
def recorded(family):
    """Pairs of a prompt, of 1, 63, 64, 65 or 200 tokens, and the 64 tokens that follow it."""
    with np.load(FOLDER / family / "truth.npz") as truth:
        prompts, lengths, tokens = (truth[name].tolist() for name in ("prompts", "prompt_lens", "tokens"))
    return [(prompt[:length], right) for prompt, length, right in zip(prompts, lengths, tokens, strict=True)]
