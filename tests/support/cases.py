"""Which of all combinations a test runs by default; the others are `further`, or `slow`.  Examples of property-based
tests.

`further` cases run before a release (marker `ci`): others of their kind run by default.  `slow` ones find what few
faults need.
"""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st

import jaxkv
from support import scenes

NUMBERS, BYTES = "bf16", ("fp8", "indexer_fp8")
"""A format of numbers and, for each kind of entry, one of bytes."""

LIKE_OTHERS = "kvfp4", "int4", "indexer_mxfp8"
"""Formats that operations treat like others, which run by default: theirs are `further`."""

CI_FORMATS = "f32", "fp8_ds_mla", "fp8_v4", "int8", "nvfp4", "indexer_mxfp4"
"""With `few`, those that run in CI: unlike each other, and unlike those that run by default."""

FEW = ("LBNHC", "gaps, offset")
"""Two unlike layouts."""

random_numbers = st.integers(0, 2**32 - 1).map(np.random.default_rng)
"""Random number generators, each of a seed of its own, for `hypothesis.given`."""

WITH_EVERY_FORMAT = ("packed, bfloat16",)
"""A layout whose buffer is of another dtype than most entries, at an offset."""


def on_layouts(entries, *, few=False):
    """Parametrises `entry` and `name`: every layout that differs, with every entry.

    Each layout with a format of numbers, and each format on one layout, show what depends on a layout or on a format.
    Each layout with a format of bytes is `further`; the other pairs are `slow`.

    Of entries whose values have another format than their keys, one is a default case, and some are `further`.

    With `few`, some formats are `further`, and others and other layouts `slow`.  This is for operations that reach
    entries by other operations alone, and for kernels that are only lowered.
    """
    cases = []
    for entry in entries:
        for name in scenes.layout_names(entry):
            of_numbers, of_bytes = entry.format == NUMBERS, entry.format in BYTES
            with_every_format = name in WITH_EVERY_FORMAT
            if few:
                default = (of_numbers and name in FEW) or (with_every_format and (of_numbers or of_bytes))
                in_ci = with_every_format and entry.format in CI_FORMATS
            else:
                default = of_numbers or with_every_format
                in_ci = of_bytes
            if entry.format in LIKE_OTHERS:
                default, in_ci = False, default or in_ci
            if len(entry.format_names) > 1:
                first = entry.label == scenes.MIXED[0]
                default = first and with_every_format and not few
                in_ci = with_every_format and (first if few else entry.label in scenes.MIXED[:3])
            marks = () if default else pytest.mark.ci if in_ci else pytest.mark.slow
            kind = type(entry).__name__.removesuffix("Entry")
            cases.append(pytest.param(entry, name, id=f"{kind} {entry.label}, {name}", marks=marks))
    return pytest.mark.parametrize(("entry", "name"), cases)


def _apart():
    """Entries in layouts of `scenes.APART`: each layout with numbers, and formats of bytes in planes of their own."""
    bf16, uneven, fp8 = jaxkv.KVEntry("bf16", 16), jaxkv.KVEntry("bf16", 16, 8), jaxkv.KVEntry("fp8", 16)
    int8, nvfp4 = jaxkv.KVEntry("int8", 16, 8), jaxkv.KVEntry("nvfp4", 32, 16)
    mixed, rare = scenes.MIXED_ENTRIES[:2]
    chosen = dict(zip(scenes.APART, (bf16, fp8, uneven, int8, bf16, int8), strict=True))
    others = [(entry, name) for name in scenes.APART for entry in (bf16, uneven, fp8, int8, nvfp4, mixed)]
    cases = [
        (entry, name, pytest.mark.ci if name == "two arrays with strides of their own" else ())
        for name, entry in chosen.items()
    ]
    cases += [
        (entry, name, pytest.mark.ci if name == "values with strides of their own" else pytest.mark.slow)
        for entry, name in others
        if chosen[name] != entry
    ]
    cases += [(rare, name, pytest.mark.slow) for name in scenes.APART]
    return [
        pytest.param(entry, name, id=f"{entry.label} {'+'.join(map(str, entry.sizes))}, {name}", marks=marks)
        for entry, name, marks in cases
    ]


apart = pytest.mark.parametrize(("entry", "name"), _apart())
"""Parametrises `entry` and `name` of layouts whose keys and values lie apart.

Each layout runs by default, with numbers or bytes, with planes of equal or unequal width; that of two arrays with
strides of their own is `further`.  With strides of their own for values, all of these are `further`, and the others
`slow`.
"""


def slow(*values):
    """A case that does not run by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


def further(*values):
    """A case that runs in CI: others of its kind run by default."""
    return pytest.param(*values, marks=pytest.mark.ci)


def each_format(given):
    """Entries, or names of formats; those of formats `LIKE_OTHERS` are further cases."""
    names = [each if isinstance(each, str) else each.format for each in given]
    return [further(each) if name in LIKE_OTHERS else each for each, name in zip(given, names, strict=True)]


def each_value(names, *axes, default=None, valid=lambda *values: True):
    """Parametrises `names` with `combinations`."""
    return pytest.mark.parametrize(names, combinations(*axes, default=default, valid=valid))


def combinations(*axes, default=None, valid=lambda *values: True):
    """The product of the axes, as far as it is `valid`: cases that have every value of every axis, the others `slow`.

    With `default`, so many of these run by default, and the others are `further`.
    """
    longest = max(len(axis) for axis in axes)
    chosen = [tuple(i % len(axis) for axis in axes) for i in range(longest)]
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, places, strict=True)]
        if valid(*values):
            case = pytest.param if places in chosen[:default] else further if places in chosen else slow
            cases.append(case(*values))
    return cases
