"""Strides are taken exactly where no two entries share an element; an error names two that do."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.layout.overlap import Plane, overlapping_entries, overlapping_planes
from layout.small import elements
from support.cases import slow


@st.composite
def explicit(draw):
    """Counts, strides, offset and size, most of them of nested axes, some a little too tight."""
    counts = {axis: draw(st.integers(1, 3)) for axis in ("layer", "block", "head", "token")}
    extent, strides = 3, {}
    for axis in draw(st.permutations(list(counts))):
        gap = draw(st.sampled_from([0, 0, 0, 1, 5, -1, -2]))
        strides[axis] = extent + gap if counts[axis] > 1 else draw(st.integers(-5, 50))
        extent = extent + (counts[axis] - 1) * strides[axis] if counts[axis] > 1 else extent
    offset = draw(st.integers(-1, 4))
    return counts, strides, offset, extent + offset + draw(st.sampled_from([0, 0, 1, 9, -1]))


def enumerate_elements(counts, strides, offset):
    """Every element of every entry of three elements."""
    starts = [sum(i * strides[axis] for i, axis in zip(index, counts, strict=True)) for index in _indices(counts)]
    return offset + np.asarray(starts)[:, None] + np.arange(3)


def _indices(counts):
    return itertools.product(*map(range, counts.values()))


def build(counts, strides, offset, size):
    """The layout, or why it is refused."""
    try:
        return jaxkv.CacheLayout.from_strides(
            num_layers=counts["layer"],
            num_blocks=counts["block"],
            num_heads=counts["head"],
            block_size=counts["token"],
            entry=jaxkv.KVEntry("fp8", head_dim=2, value_dim=1),
            strides=strides,
            offset=offset,
            size=size,
        )
    except ValueError as error:
        return str(error)


@settings(max_examples=100)
@given(explicit())
def test_nested_strides_are_taken_exactly_if_entries_are_disjoint_and_inside(given_strides):
    counts, strides, offset, size = given_strides
    found = enumerate_elements(counts, strides, offset)
    good = found.min() >= 0 and found.max() < size and np.unique(found).size == found.size
    layout = build(counts, strides, offset, size)
    if isinstance(layout, jaxkv.CacheLayout):
        assert good
        assert np.array_equal(np.sort(elements(layout), axis=None), np.sort(found, axis=None))
    else:
        assert re.search("overlap|leave the buffer|expected at least 1", layout)
        assert not good


@pytest.mark.parametrize("count", [500, slow(3000)])
def test_random_strides_are_taken_exactly_where_no_two_entries_share_an_element(count):
    rng, seen = np.random.default_rng(0), {"nested": 0, "interleaved": 0, "overlapping": 0}
    for _ in range(count):
        limits = 6, int(rng.choice([16, 60, 200]))
        numbers = (rng.integers(1, limit, 4).tolist() for limit in limits)
        counts, strides = (dict(zip(("layer", "block", "head", "token"), four, strict=True)) for four in numbers)
        starts = np.sort(enumerate_elements(counts, strides, 0)[:, 0])
        good = bool((np.diff(starts) >= 3).all())
        layout = build(counts, strides, 0, int(starts[-1]) + 3)
        assert isinstance(layout, jaxkv.CacheLayout) == good, (counts, strides, layout)
        if not good:
            assert_collision(layout, counts, strides)
        extent, nested = 3, True
        for stride, count in sorted((strides[axis], counts[axis]) for axis in counts if counts[axis] > 1):
            nested, extent = nested and stride >= extent, extent + stride * (count - 1)
        seen["overlapping" if not good else "nested" if nested else "interleaved"] += 1
    assert min(seen.values()) > count // 15, seen


def assert_collision(message, counts, strides):
    """The two entries that the message names are different ones of the layout, and share an element."""
    found = re.findall(r"\(layer (\d+), block (\d+), head (\d+), token (\d+)\)", message)
    later, first = ([int(i) for i in entry] for entry in found)
    assert later != first
    assert all(0 <= i < count for entry in (first, later) for i, count in zip(entry, counts.values(), strict=True))
    begins = [sum(i * stride for i, stride in zip(entry, strides.values(), strict=True)) for entry in (first, later)]
    assert begins[0] <= begins[1] < begins[0] + 3
    assert f"begins at element {begins[1]}, and" in message
    assert f"has elements [{begins[0]}, {begins[0] + 3})" in message


def random_plane(rng):
    """A plane of up to four axes whose entries, of 1 to 3 elements, do not overlap."""
    width, most, axes = int(rng.integers(1, 4)), int(rng.choice([16, 60])), {}
    for axis in rng.permutation(["layer", "block", "head", "token"])[: rng.integers(1, 5)].tolist():
        wider = {**axes, axis: (int(rng.integers(2, 5)), int(rng.integers(1, most)))}
        axes = axes if overlapping_entries(wider, width) else wider
    return Plane(axes, int(rng.integers(0, 40)), width)


def starts_of(plane):
    """The first element of every entry, by its indices."""
    counts = {axis: count for axis, (count, _) in plane.axes.items()}
    return {
        tuple(zip(counts, index, strict=True)): plane.offset
        + sum(i * plane.axes[axis][1] for axis, i in zip(counts, index, strict=True))
        for index in _indices(counts)
    }


@pytest.mark.parametrize("count", [300, slow(3000)])
def test_keys_and_values_are_taken_exactly_where_none_share_an_element(count):
    rng, seen = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(count):
        planes = random_plane(rng), random_plane(rng)
        starts = [starts_of(plane) for plane in planes]
        keys, values = (np.asarray([*each.values()]) for each in starts)
        distance = keys[:, None] - values
        overlap = bool(((distance > -planes[0].width) & (distance < planes[1].width)).any())
        found = overlapping_planes(*planes)
        assert (found is not None) == overlap, planes
        if found:
            key, value = (each[tuple(at.items())] for each, at in zip(starts, found, strict=True))
            assert -planes[0].width < key - value < planes[1].width
        seen[overlap] += 1
    assert min(seen.values()) > count // 15, seen


@pytest.mark.parametrize("more", [0, 1])
def test_a_key_and_a_value_among_millions_of_blocks_are_found_or_excluded(more):
    # Keys of 7 elements, 16 apart.  Between them is room for values of 9 elements, but not of 10.
    keys = Plane({"token": (64, 16), "block": (2**22, 1024)}, 0, 7)
    values = Plane({"token": (64, 2**16), "block": (2**12, 16), "head": (2**10, 2**22)}, 7, 9 + more)
    found = overlapping_planes(keys, values)
    if not more:
        assert found is None
        return
    key, value = (plane.offset + sum(i * plane.axes[axis][1] for axis, i in at.items())
                  for plane, at in zip((keys, values), found, strict=True))  # fmt: skip
    assert -7 < key - value < 10


@pytest.mark.parametrize("more", [0, 1])
def test_overlap_of_a_billion_blocks_is_found_or_excluded(more):
    # Entries at p * block + q * token meet where block is q and token is p steps apart, and nowhere else.
    p, q = 10**9 + 7, 10**9 + 9
    found = overlapping_entries({"block": (2**31 - 1, p), "token": (p + more, q)}, 1)
    assert found == (({"block": q, "token": 0}, {"block": 0, "token": p}) if more else None)


def test_interleaving_entries_are_taken_and_read():
    # Layers at 0, 6, 12 and blocks at 0, 9, 18, 27, in units of a page of 3 elements.
    layout = jaxkv.CacheLayout.from_strides(
        num_layers=3, num_blocks=4, block_size=1, entry=jaxkv.MLAEntry("bf16", latent=2, rope=1), size=42,
        strides={"layer": 6, "block": 9, "head": 0, "token": 0},
    )  # fmt: skip
    cache = jaxkv.KVCache(jnp.arange(42, dtype=jnp.bfloat16), layout)
    tables, ends = jnp.asarray([[3, 0, 2, 1]]), jnp.asarray([0, 4])
    for layer in range(3):
        kv_c, _ = jaxkv.gather_mla(cache, tables, ends, layer=layer, total=4)
        assert kv_c[:, 0].tolist() == [6 * layer + 9 * block for block in (3, 0, 2, 1)]
    assert "layer" in str(layout)
    assert layout._repr_svg_() is None
    with pytest.raises(ValueError, match="the 4 blocks interleave: one begins every 18 B and spans 30 B"):
        layout.draw()
