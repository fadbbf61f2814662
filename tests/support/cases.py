"""Which of all combinations a test runs by default; the others are `slow`.  Examples of property-based tests."""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st

from support import scenes

ON_EVERY_LAYOUT = ("bf16", "fp8", "indexer_fp8")
"""A format of numbers and, for each kind of entry, one of bytes."""

random_numbers = st.integers(0, 2**32 - 1).map(np.random.default_rng)
"""Random number generators, each of a seed of its own, for `hypothesis.given`."""

WITH_EVERY_FORMAT = ("packed, bfloat16",)
"""A layout whose buffer is of another dtype than most entries, at an offset."""


def on_layouts(entries, *, composed=False):
    """Parametrises `entry` and `name`: every layout that differs, with every entry.

    Each layout with one format of numbers and one of bytes, and each format on one layout, show what depends on a
    layout or on a format; the other pairs are `slow`.  Operations that are `composed` of others reach entries by these
    alone, which run on each layout with bytes too: each layout with one format of numbers then shows that they pass
    the layout on.
    """
    on_every_layout = ON_EVERY_LAYOUT[:1] if composed else ON_EVERY_LAYOUT
    cases = []
    for entry in entries:
        for name in scenes.layout_names(entry):
            quick = entry.format in on_every_layout or name in WITH_EVERY_FORMAT
            kind = type(entry).__name__.removesuffix("Entry")
            cases.append(
                pytest.param(entry, name, id=f"{kind} {entry.format}, {name}", marks=() if quick else pytest.mark.slow)
            )
    return pytest.mark.parametrize(("entry", "name"), cases)


def slow(*values):
    """A case that does not run by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


def each_value(names, *axes):
    """Parametrises `names` with the product of the axes, of which every value of every axis runs by default."""
    longest = max(len(axis) for axis in axes)
    quick = {tuple(i % len(axis) for axis in axes) for i in range(longest)}
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, places, strict=True)]
        cases.append(pytest.param(*values) if places in quick else slow(*values))
    return pytest.mark.parametrize(names, cases)
