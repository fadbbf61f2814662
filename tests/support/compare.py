"""Comparison in three steps: the positions of inf and NaN, each element, the whole array."""

import numpy as np

from jaxkv.testing.compare import EPSILON
from support.arrays import as_float64


def assert_same_bits(actual, expected, what=""):
    """Equal bit for bit, NaN payloads included."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    a, e = np.ascontiguousarray(actual).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    if not np.array_equal(a, e):
        where = np.argwhere(a.reshape(-1) != e.reshape(-1))[:, 0] // actual.itemsize
        first = np.unravel_index(where[0], actual.shape)
        raise AssertionError(
            f"{what}: {np.unique(where).size} of {actual.size} elements differ, first at {[int(i) for i in first]}: "
            f"{actual[first]} is not {expected[first]}"
        )


def assert_close(actual, expected, *, dtype=None, roundings=4, magnitude=None, what=""):
    """`actual` is `expected` (float64) but for `roundings` of `dtype` (default: its own) at each element's worst.

    `magnitude` is the size of the terms that were added up (default: the largest element): the absolute part of the
    tolerance.  The whole, by norm, may be off by half as many roundings.
    """
    dtype = str(dtype or actual.dtype)
    actual, expected = as_float64(actual), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        assert np.array_equal(test(actual), test(expected)), f"{what}: {name} at other places than expected"
    finite = np.isfinite(expected)
    if not finite.any():
        return
    a, e = actual[finite], expected[finite]
    tolerance = roundings * EPSILON[dtype]
    size = np.abs(e).max() if magnitude is None else magnitude
    excess = np.abs(a - e) / (tolerance * (np.abs(e) + size) + 1e-300)
    worst = int(excess.argmax())
    place = [int(i) for i in np.argwhere(finite)[worst]]
    assert excess[worst] <= 1, f"{what}: worst at {place}: {a[worst]} for {e[worst]}, {excess[worst]:.2f} x tolerance"
    norm = np.linalg.norm(e)
    error = np.linalg.norm(a - e)
    assert error <= tolerance / 2 * norm + 1e-30, f"{what}: relative error {error / norm:.2e} > {tolerance / 2:.2e}"
