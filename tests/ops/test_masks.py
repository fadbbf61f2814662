"""Masks by position: what they show, as a function and as intervals."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import masks
from jaxkv_kernels.masks import disjoint

LARGEST = 2**31 - 1
SIZES = st.sampled_from([1, 2, 3, 7, 20])
LIMITS = st.sampled_from([-1, 0, 1, 5, 30])
SIMPLE = st.one_of(
    SIZES.map(masks.Chunked),
    st.sampled_from([0, 1, 4, 17]).map(masks.Prefix),
    st.tuples(LIMITS, LIMITS).map(lambda limits: masks.Sliding(*limits)),
)


def shown(mask, query, key):
    """What the masks of SIMPLE show, by their definition."""
    if isinstance(mask, masks.Chunked):
        return query // mask.size == key // mask.size
    if isinstance(mask, masks.Prefix):
        return (key < mask.size) & (query == query)
    left, right = mask.left, mask.right
    return ((left == -1) | (key >= query - left)) & ((right == -1) | (key <= query + right))


@given(st.lists(SIMPLE, min_size=2, max_size=3), st.lists(st.booleans(), min_size=2, max_size=2))
def test_masks_and_their_combinations(parts, both):
    query, key = np.arange(-3, 30, dtype=np.int32)[:, None], np.arange(40, dtype=np.int32)
    mask, expected = parts[0], shown(parts[0], query, key)
    for part, narrower in zip(parts[1:], both, strict=False):
        mask = mask & part if narrower else mask | part
        expected = expected & shown(part, query, key) if narrower else expected | shown(part, query, key)
    assert (np.asarray(mask(jnp.asarray(query), key)) == expected).all()
    intervals = disjoint(mask.intervals(jnp.asarray(query[:, 0])))
    inside = [(key >= np.asarray(a)[:, None]) & (key < np.asarray(b)[:, None]) for a, b in intervals]
    assert (np.sum(inside, axis=0) == expected).all()
    if mask.aligned(4):
        assert all((np.asarray(begin) % 4 == 0).all() for begin, _ in mask.intervals(jnp.asarray(query[:, 0])))


@pytest.mark.parametrize("large", [LARGEST - 1, LARGEST, 2**40])
def test_numbers_of_any_size(large):
    query, key = jnp.asarray([[-5], [0], [LARGEST - 1]], jnp.int32), jnp.asarray([0, 9, LARGEST - 1], jnp.int32)
    every = np.ones((3, 3), bool)
    assert (np.asarray(masks.Prefix(large)(query, key)) == (np.asarray(key) < large)).all()
    assert (np.asarray(masks.Sliding(-1, large)(query, key))[1:] == every[1:]).all()
    assert (np.asarray(masks.Sliding(large, -1)(query, key)) == every).all()
    chunked = np.asarray(masks.Chunked(large)(query, key))
    assert (chunked[1] == (np.asarray(key) < large)).all()
    assert not chunked[0].any()


def test_masks_are_equal_if_they_mean_the_same():
    made = [masks.Chunked(8), masks.Prefix(8), masks.Prefix(8) | masks.Sliding(8, 0), masks.Sliding(8, 0)]
    again = [masks.Chunked(8), masks.Prefix(8), masks.Prefix(8) | masks.Sliding(8, 0), masks.Sliding(8, 0)]
    assert made == again
    assert list(map(hash, made)) == list(map(hash, again))
    assert all(a != b for a, b in itertools.combinations(made, 2))
    assert masks.Chunked(8) & masks.Prefix(8) != masks.Chunked(8) | masks.Prefix(8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.Chunked(0), r"`size` is 0: expected an int of at least 1"),
        (lambda: masks.Chunked(2.0), r"`size` is 2\.0: expected an int of at least 1"),
        (lambda: masks.Prefix(-1), r"`size` is -1: expected an int of at least 0"),
        (lambda: masks.Sliding(-2, 0), r"`left` is -2: expected an int of at least -1"),
        (lambda: masks.Sliding(0, True), r"`right` is True: expected an int of at least -1"),
    ],
)
def test_numbers_that_are_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
