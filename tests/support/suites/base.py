"""What the suites share."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import oracle, scenes
from support.arrays import on_device
from support.cases import each_format
from support.compare import assert_close, assert_same_bits


class Suite:
    """Runs operations on one implementation."""

    implementation: str
    gaps: tuple[str, ...] = ()
    """Beginnings of the reasons for which this implementation is expected to reject calls of this suite."""

    def run(self, operation, *args, **kwargs):
        """The operation's result on this implementation; a declared gap skips the test, an undeclared one fails it."""
        for reason in jaxkv.explain(operation, *args, **kwargs).reasons[self.implementation]:
            assert reason.startswith(self.gaps or ("no gap is declared",)), f"undeclared gap: {reason}"
            pytest.skip(reason)
        return operation(*args, **kwargs, implementation=self.implementation)


def assert_a_scan_stacks(call, cache):
    """What a scan over layers stacks are the results of single calls; kernels that update in place once broke this."""

    @jax.jit
    def stacked(cache, layers):
        return jax.lax.scan(lambda carry, layer: (carry, call(cache, layer)), 0, layers)[1]

    for found, one in zip(stacked(cache, on_device([1, 1, 1])), call(cache, 1), strict=True):
        for i in range(3):
            assert_same_bits(found[i], one)


def layout_of(name, entry, **sizes):
    """The layout of that name."""
    return scenes.apart(entry, name, **sizes) if name in scenes.APART else scenes.layouts(entry, **sizes)[name]


def formats(entries):
    """Parametrises `entry`."""
    return pytest.mark.parametrize("entry", each_format(entries), ids=[entry.format for entry in entries])


def without_signs(scene):
    """The scene with the absolute values of its entries, which are of a plain format."""
    entries, itemsize = scene.entries.copy(), scene.entry.dtype.itemsize
    entries[..., itemsize - 1 :: itemsize] &= 0x7F
    return replace(scene, entries=entries)


def check_ragged(found, right, edges, roundings):
    """Compares out and lse [T, ...] with lists of those of each request, whose tokens lie between `edges`."""
    tolerances = (roundings, 1), (64, 4)
    for x, per_request, empty, (most, magnitude) in zip(
        map(np.asarray, found), right, (0, -np.inf), tolerances, strict=True
    ):
        for a, b, expected in zip(edges[:-1], edges[1:], per_request, strict=True):
            if a < b:
                assert_close(x[a:b], expected, roundings=most, magnitude=magnitude)
        assert (np.asarray(x[edges[-1] :], np.float32) == empty).all()


OUTSIDE, CLAMPED = (129, 2**31 - 1, -1, -(2**31)), (128, 128, 0, 0)
"""Lengths outside tables of two blocks of 64 tokens, and what they are clamped to."""


UNUSED_SUMS = (0, 0), (-1, -1), (-(2**31), -(2**31)), (1, 0)
"""What the running sum of lengths may hold for two unused requests at the end, besides the last sum in use."""


def with_unused_requests(scene):
    """The scene with two further requests, which have nothing but garbage in their tables and lengths."""
    garbage = np.resize(np.asarray([2**31 - 1, -(2**31), -1, 3], scene.tables.dtype), (2, scene.tables.shape[1]))
    return replace(scene, tables=np.concatenate([scene.tables, garbage]), lengths=(*scene.lengths, 2**31 - 1, -1))


def full_tables(entry, **sizes):
    """Four requests, whose tables have exactly the two blocks of 64 tokens that are in use."""
    scene = scenes.scene(entry, lengths=(128,) * 4, **sizes)
    return replace(scene, tables=scene.tables[:, :2])


def dtype_of(entry):
    """The dtype of queries and new values for an entry: its own, or bfloat16 for a quantised one."""
    return entry.dtype if entry.format in oracle.PLAIN else jnp.dtype("bfloat16")
