"""The trained model of notebooks/trained loads, predicts text better than bigrams, and continues a prompt."""

import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxkv
from jaxkv import models
from jaxkv.cli import main

FOLDER = Path(__file__).parents[2] / "notebooks" / "trained"
MODEL = FOLDER / "model"
RECORDED = json.loads((FOLDER / "losses.json").read_text())
MOST = 0.6
"""The loss of the model is below this fraction of the loss of bigrams."""


@pytest.fixture(scope="module")
def scripts():
    """The modules `corpus` and `train`, which are scripts and import each other by these names."""
    sys.path.insert(0, str(FOLDER))
    yield [importlib.import_module(name) for name in ("corpus", "train")]
    sys.path.remove(str(FOLDER))


def test_text_that_was_held_out_is_predicted(scripts):
    """The files of the standard library of this Python, whatever its version."""
    corpus, train = scripts
    assert all(map(corpus.is_held_out, RECORDED["sample"]["files"]))
    windows = corpus.sample(Tokenizer.from_file(str(MODEL / "tokenizer.json")), 1024, 4)
    model = models.load(MODEL)
    assert model.dtype == "bfloat16"
    losses = np.asarray(jax.jit(train.losses)(model, windows))
    assert losses.shape == (4, 1024)
    assert losses.mean() < MOST * RECORDED["sample"]["bigrams"]


@pytest.mark.parametrize("text", ["held_out", "sample"])
def test_the_recorded_loss_is_less_than_that_of_bigrams(text):
    assert RECORDED[text]["bf16"] < MOST * RECORDED[text]["bigrams"]


def test_every_format_is_recorded():
    recorded = {row["format"]: row for row in RECORDED["formats"]["rows"]}
    assert recorded.keys() | RECORDED["formats"]["left_out"].keys() == set(jaxkv.MLAEntry.formats)
    assert recorded["f32"]["difference"] == 0
    assert all(row["standard_error"] > 0 for form, row in recorded.items() if form != "f32")


def test_the_notebook_shows_what_is_recorded():
    notebook = (FOLDER.parent / "8_a_trained_model.ipynb").read_text()
    shown = [f"{row['format']} {row['difference']:+.4f}" for row in RECORDED["formats"]["rows"] if row["difference"]]
    shown += [f"the {row['chosen']} {row['tokens']} {row['difference']:+.4f}" for row in RECORDED["sparse"]["rows"]]
    assert len(shown) > 20
    assert not [words for words in shown if words not in notebook], "run the notebook again (CONTRIBUTING.md)"


def test_blocks_that_moved_have_the_same_losses():
    for row in RECORDED["moves"]["rows"]:
        assert row["equal"] == ("mistaken" not in row["way"]), row


def test_it_continues_a_prompt(capsys):
    main(["generate", "--model", str(MODEL), "--prompt", "def ", "--max-tokens", "16", "--blocks", "4"])
    text = capsys.readouterr().out
    assert len(text.strip()) > 8
