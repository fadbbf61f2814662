"""The pages of notebooks/clients run, and models generate the same tokens on jaxkv's cache as on their own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

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
    scope = dict(latents)  # with `prefill_attention`, which the page defines after its models have run
    code = "\n".join(re.findall(r"```python\n(.*?)```", (PAGES / "latents.md").read_text(), re.DOTALL))
    exec(code.replace("cache = latent_attention(", "cache = prefill_attention("), scope)
    assert_equal(scope["latent"], latents["expanded"])


def test_bytes_of_the_page():
    heads, nope, rope, value, latent, layers = 128, 128, 64, 128, 512, 61  # DeepSeek R1
    expanded = 2 * (heads * (nope + value) + rope)
    latents = jaxkv.MLAEntry("bf16", latent=latent, rope=rope).nbytes
    assert (expanded, latents) == (65_664, 1_152)
    assert (2**30 // (layers * expanded), 2**30 // (layers * latents)) == (268, 15_279)
    assert jaxkv.MLAEntry("fp8_ds_mla", latent=latent, rope=rope).nbytes == 656
    text = (PAGES / "latents.md").read_text()
    for number in (expanded, latents, 268, 15_279, 656):
        assert f"{number:,}" in text


@pytest.fixture(scope="module")
def windows():
    return run("windows.md")


def test_windows(windows):
    assert_equal(windows["paged"], windows["dense"])


@pytest.mark.ci
@pytest.mark.parametrize("order", ["BLHNC", "BHLNC"])
def test_windows_in_other_orders(windows, order):
    packed = jaxkv.PackedLayout(num_blocks=25, block_size=8, groups=windows["groups"], order=order)
    weights, prompts = windows["weights"], windows["prompts"]
    free = np.random.default_rng(0).permutation(25).tolist()
    found = windows["generate"](weights, prompts, 40, packed, poisoned(packed["full"]), free)
    assert_equal(found, windows["dense"])


def test_flax():
    """With the cache as an argument and in a variable, prompts go on as they do without a cache."""
    pytest.importorskip("flax", reason="the page is for models of Flax, which jaxkv does not need")
    flax = run("flax.md")
    assert_equal(flax["held"], flax["passed"])
    rows = zip(flax["prompts"].tolist(), flax["passed"].tolist(), strict=True)
    tokens = [[token for token in prompt if token != flax["PAD"]] + found for prompt, found in rows]
    padded = np.zeros((len(tokens), max(map(len, tokens))), np.int32)  # on the right, where no token sees it
    for row, own in zip(padded, tokens, strict=True):
        row[: len(own)] = own
    after = flax["nnx"].jit(flax["Model"].without_cache)(flax["model"], padded)
    for own, row, found in zip(tokens, after, flax["passed"], strict=True):
        np.testing.assert_array_equal(row[len(own) - len(found) - 1 : len(own) - 1], found)
    step, cache = flax["step_on_variable"], jaxkv.KVCache.zeros(flax["layout"])
    seq_lens = jnp.sum(flax["prompts"] != flax["PAD"], axis=1)
    step(flax["model"], flax["prompts"], flax["nnx"].Cache(cache), flax["block_tables"], seq_lens)
    assert cache.buffer.is_deleted()


@pytest.mark.ci
def test_times_of_expanded_keys_and_latents(tmp_path):
    """The script runs at small sizes, and both sides compute the same up to the rounding of bf16."""
    command = [sys.executable, PAGES.parent / "time_expanded.py", tmp_path / "times.json"]
    sizes = ["--requests", "2", "--tokens", "128", "--heads", "8", "--repeats", "1"]
    subprocess.run([*command, *sizes], check=True)
    found = json.loads((tmp_path / "times.json").read_text())
    assert {"date", "device", "versions", "command", "ceilings"} <= set(found)
    assert found["difference"] < 0.02
    assert found["seconds"]["expanded"]["cache_bytes"] == 2 * 128 * 2 * (8 * 256 + 64)
    assert found["seconds"]["latents"]["cache_bytes"] == 2 * 128 * 1152
