"""The pages of notebooks/clients run, and their models generate the same tokens on jaxkv's cache, in every order."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

PAGES = Path(__file__).parents[2] / "notebooks" / "clients"


def run(name):
    """The names that the Python blocks of a page define."""
    scope = {"print": lambda *values: None}
    exec("\n".join(re.findall(r"```python\n(.*?)```", (PAGES / name).read_text(), re.DOTALL)), scope)
    return scope


@pytest.fixture(scope="module")
def latents():
    return run("latents.md")


def test_latents(latents):
    np.testing.assert_array_equal(latents["expanded"], latents["latent"])
    assert min(len(set(row)) for row in latents["expanded"].tolist()) > 10


def test_windows():
    windows = run("windows.md")
    np.testing.assert_array_equal(windows["dense"], windows["paged"])
    assert min(len(set(row)) for row in windows["dense"].tolist()) > 10
