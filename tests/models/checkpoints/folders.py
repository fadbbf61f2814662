"""Copies of recorded checkpoints, which a test may corrupt."""

import json
import re
import shutil
from pathlib import Path

import pytest

import jaxkv.models

RECORDED = Path(__file__).parents[2] / "data" / "models"


def copied(family, folder):
    """A copy of a checkpoint, which the test may corrupt."""
    shutil.copytree(RECORDED / family, folder, ignore=shutil.ignore_patterns("truth.npz"), dirs_exist_ok=True)
    return folder


def configure(folder, **changes):
    """Changes fields of config.json; None removes them."""
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def rejects(folder, *words, **options):
    """Loading raises a ValueError of one line with all of the words."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))) as error:
        jaxkv.models.load(folder, **options)
    assert "\n" not in str(error.value)
