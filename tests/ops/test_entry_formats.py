"""Logits of whole models with quantised entries, held to what the precision of the entries allows."""

from functools import cache

import numpy as np
import pytest

import jaxkv.models
from jaxkv.models.config import GQA, MLA, CompressedAttention
from support.cases import further, slow
from support.logits import logits_of
from support.recorded import FOLDER, recorded

FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/truth.npz"))
QUANTISED = {GQA: "fp8", MLA: "fp8_ds_mla", CompressedAttention: "fp8_v4"}
"""A format of e4m3 values for the entries of each kind of attention."""
PRECISION_RATIO = 2.0**-4 / 2.0**-8
"""One rounding to e4m3 is so many times coarser than one to bf16."""


@cache
def logits(family, dtype, entry_format):
    """Float64 [200, vocab] of the longest recorded prompt."""
    prompt, _ = recorded(family)[-1]
    model = jaxkv.models.load(FOLDER / family, dtype=dtype, entry_format=entry_format)
    return logits_of(model, prompt).astype(np.float64)


def error(found, right):
    """The median over positions of the relative error: a few positions jump, where another expert is chosen."""
    return np.median(np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1))


# Latents, some of them selected, and keys and values; the compressed entries of DeepSeek-V4 take longer.
QUICK, IN_CI = ("llama",), ("deepseek_v32",)


@pytest.mark.parametrize(
    "family", [name if name in QUICK else further(name) if name in IN_CI else slow(name) for name in FAMILIES]
)
def test_logits_with_quantised_entries(family):
    """How much a model amplifies errors of its entries, bf16 entries in the float32 model tell.

    Besides, the bf16 model's own roundings are drawn anew where its entries change.
    """
    bf16, exact = logits(family, "bfloat16", "bf16"), logits(family, "float32", "f32")
    form = QUANTISED[type(jaxkv.models.ModelConfig.read(FOLDER / family).attention)]
    quantised = error(logits(family, "bfloat16", form), bf16)
    rounded = error(logits(family, "float32", "bf16"), exact)
    own = error(bf16, exact)
    print(f"{family}: {form} against bf16 entries {quantised:.4f}; bf16 against f32 {rounded:.4f}; own {own:.4f}")
    assert rounded < quantised < PRECISION_RATIO * rounded + own
