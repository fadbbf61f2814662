"""Which of all combinations a test runs by default; the others are `further`, or `slow`.  Examples of property-based
tests.

`further` cases run in CI (marker `ci`): others of their kind run by default.  `slow` ones find what few faults need.
"""

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
    alone, which run on each layout and with each format: each layout with one format of numbers, and one format of
    bytes, then show that they pass the layout and the format on; each other format is `further`.
    """
    cases = []
    for entry in entries:
        for name in scenes.layout_names(entry):
            on_every_layout, with_every_format = entry.format in ON_EVERY_LAYOUT, name in WITH_EVERY_FORMAT
            if composed:
                on_every_layout = entry.format == ON_EVERY_LAYOUT[0] or on_every_layout and with_every_format
            by_default = on_every_layout or with_every_format and not composed
            marks = () if by_default else pytest.mark.ci if with_every_format else pytest.mark.slow
            kind = type(entry).__name__.removesuffix("Entry")
            cases.append(pytest.param(entry, name, id=f"{kind} {entry.format}, {name}", marks=marks))
    return pytest.mark.parametrize(("entry", "name"), cases)


def slow(*values):
    """A case that does not run by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


def further(*values):
    """A case that runs in CI: others of its kind run by default."""
    return pytest.param(*values, marks=pytest.mark.ci)


def each_value(names, *axes):
    """Parametrises `names` with the product of the axes, of which every value of every axis runs by default."""
    longest = max(len(axis) for axis in axes)
    quick = {tuple(i % len(axis) for axis in axes) for i in range(longest)}
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, places, strict=True)]
        cases.append(pytest.param(*values) if places in quick else slow(*values))
    return pytest.mark.parametrize(names, cases)
