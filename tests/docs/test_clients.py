"""The pages of notebooks/clients run, and their models generate on jaxkv's cache the tokens that they generate without."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.formats.entries import MLAEntry

PAGES = Path(__file__).parents[2] / "notebooks" / "clients"


def run(page):
    """The names that the Python blocks of a page define."""
    scope = {"print": lambda *values: None}
    for code in re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL):
        exec(code, scope)
    return scope


def assert_equal(found, expected):
    """Equal tokens, which are not the same few again and again: those would not show what attention reads."""
    np.testing.assert_array_equal(found, expected)
    assert min(len(set(row)) for row in np.asarray(found).tolist()) > 8


def poisoned(layout):
    """A cache of NaN, none of which may reach a result."""
    return jaxkv.KVCache(jnp.full(layout.size, jnp.nan, layout.dtype), layout)


@pytest.fixture(scope="module")
def latents():
    return run("latents.md")


def test_latents(latents):
    assert_equal(latents["latent"], latents["expanded"])


@pytest.mark.parametrize(
    "low_rank", [pytest.param(True, id="low_rank"), pytest.param(False, marks=pytest.mark.ci, id="full_rank")]
)
def test_latents_in_all_orders(latents, low_rank):
    """With one head, the six orders are two layouts, so that the step is compiled twice."""
    prompts, block_tables = latents["prompts"], latents["block_tables"]
    weights = latents["random_weights"](1, low_rank=low_rank)
    expected = latents["generate_expanded"](weights, prompts, 20)
    for order in ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"):
        layout = jaxkv.CacheLayout(
            num_layers=latents["LAYERS"], num_blocks=16, block_size=8, entry=latents["entry"], order=order
        )
        assert_equal(latents["generate"](weights, prompts, 20, poisoned(layout), block_tables), expected)


@pytest.mark.ci
def test_latents_are_expanded_in_prefills(latents):
    """The attention that the page shows for long prompts, in place of the other one, in all steps."""
    scope = dict(latents)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (PAGES / "latents.md").read_text(), re.DOTALL))
    exec(code.replace("cache = latent_attention(", "cache = prefill_attention("), scope)
    assert_equal(scope["latent"], latents["expanded"])


def test_bytes_of_the_page():
    heads, nope, rope, value, latent, layers = 128, 128, 64, 128, 512, 61  # DeepSeek R1
    expanded = 2 * (heads * (nope + value) + rope)
    latents = MLAEntry("bf16", latent=latent, rope=rope).nbytes
    assert (expanded, latents) == (65_664, 1_152)
    assert (2**30 // (layers * expanded), 2**30 // (layers * latents)) == (268, 15_279)
    assert MLAEntry("fp8_ds_mla", latent=latent, rope=rope).nbytes == 656
    text = (PAGES / "latents.md").read_text()
    for number in (expanded, latents, 268, 15_279, 656):
        assert f"{number:,}" in text


@pytest.fixture(scope="module")
def windows():
    return run("windows.md")


@pytest.mark.ci
def test_windows(windows):
    assert_equal(windows["paged"], windows["dense"])
    assert len(windows["free"]) == 0 


@pytest.mark.ci
@pytest.mark.parametrize("order", ["BLHNC", "BHLNC"])
def test_windows_in_other_orders(windows, order):
    packed = jaxkv.PackedLayout(num_blocks=25, block_size=8, groups=windows["groups"], order=order)
    weights, prompts = windows["weights"], jnp.asarray(windows["prompts"])
    free = np.random.default_rng(0).permutation(25).tolist()
    found = windows["generate"](weights, prompts, 40, packed, poisoned(packed["full"]), free)
    assert_equal(found, windows["dense"])


def test_flax():
    """With the cache as an argument and in a variable, prompts go on as they do without a cache."""
    pytest.importorskip("flax", reason="the page is for models of Flax, which jaxkv does not need")
    flax = run("flax.md")
    assert_equal(flax["held"], flax["passed"])
    for prompt, found in zip(flax["prompts"].tolist(), flax["passed"].tolist(), strict=True):
        tokens = [token for token in prompt if token != flax["PAD"]] + found
        after = flax["model"].without_cache(jnp.asarray([tokens]))[0]
        assert after[-len(found) - 1 : -1].tolist() == found
