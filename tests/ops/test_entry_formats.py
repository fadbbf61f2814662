"""Logits of whole models with quantised entries, held to what the precision of the entries allows."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv.models
from support.cases import slow

FOLDER = Path(__file__).parents[1] / "data" / "models"
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/truth.npz"))
QUANTISED = {"llama": "fp8"}
"""The quantised format of keys and values; latents have fp8_ds_mla."""
PRECISION_RATIO = 2.0**-4 / 2.0**-8
"""One rounding to e4m3 is so many times coarser than one to bf16."""


@cache
def logits(family, dtype, entry_format):
    """Float64 [200, vocab] of the longest recorded prompt."""
    with np.load(FOLDER / family / "truth.npz") as recorded:
        tokens = recorded["prompts"][-1:]
    model = jaxkv.models.load(FOLDER / family, dtype=dtype, entry_format=entry_format)
    length, tables = tokens.shape[1], jnp.asarray([[3, 0, 2, 1]])
    slots = jaxkv.slots_for(tables, jnp.arange(length)[None], block_size=64)

    @jax.jit
    def prefill(model, cache):
        _, x = jaxkv.models.forward(model, cache, tokens, jnp.asarray([length]), tables, slots)
        return jaxkv.models.head(model, x)[0]

    return np.asarray(prefill(model, model.cache(4)), np.float64)


def error(found, right):
    """The median over positions of the relative error: a few positions jump, where another expert is chosen."""
    return np.median(np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1))


# One of each kind of attention; the others differ in what surrounds it.
QUICK = ("deepseek_v2_lite", "deepseek_v32", "llama")


@pytest.mark.parametrize("family", [family if family in QUICK else slow(family) for family in FAMILIES])
def test_logits_with_quantised_entries(family):
    """How much a model amplifies errors of its entries, bf16 entries in the float32 model tell.

    Besides, the bf16 model's own roundings are drawn anew where its entries change.
    """
    bf16, exact = logits(family, "bfloat16", "bf16"), logits(family, "float32", "f32")
    form = QUANTISED.get(family, "fp8_ds_mla")
    quantised = error(logits(family, "bfloat16", form), bf16)
    rounded = error(logits(family, "float32", "bf16"), exact)
    own = error(bf16, exact)
    print(f"{family}: {form} against bf16 entries {quantised:.4f}; bf16 against f32 {rounded:.4f}; own {own:.4f}")
    assert rounded < quantised < PRECISION_RATIO * rounded + own
