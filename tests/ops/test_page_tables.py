"""Block tables from page tables in CSR form, against plain Python loops."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv_kernels.addressing import slots_for
from support.compare import assert_same_bits

INT32 = np.iinfo(np.int32)


def loop(indptr, indices, last_page_len, block_size, max_blocks):
    """`block_tables_from_csr`, request by request, in unbounded ints."""
    tables, lengths = np.full((len(last_page_len), max_blocks), -1, np.int32), []
    highest, sums = 0, []
    for x in indptr:
        highest = max(highest, x)
        sums.append(highest)
    for row, (begin, end), last in zip(tables, pairwise(sums), last_page_len, strict=True):
        blocks = indices[begin : min(end, begin + max_blocks)]
        row[: len(blocks)] = blocks
        counted = min(end - begin, INT32.max // block_size)
        lengths.append((counted - 1) * block_size + min(max(last, 0), block_size) if end > begin else 0)
    return tables, np.asarray(lengths, np.int32)


def check(indptr, indices, last_page_len, block_size, max_blocks):
    """The function returns what the loop does, with and without `jit`."""
    expected = loop(indptr, indices, last_page_len, block_size, max_blocks)
    arrays = [jnp.asarray(x, jnp.int32) for x in (indptr, indices, last_page_len)]
    sizes = {"block_size": block_size, "max_blocks": max_blocks}
    function = jaxkv.block_tables_from_csr
    for call in (function, jax.jit(function, static_argnames=tuple(sizes))):
        for x, right in zip(call(*arrays, **sizes), expected, strict=True):
            assert_same_bits(x, right)
    return expected


def test_the_example_of_flashinfers_documentation():
    """That of `append_paged_kv_cache`: 45, 8, 25 and 22 tokens in pages of 16."""
    tables, lengths = check([0, 3, 4, 6, 8], range(8), [13, 8, 9, 6], 16, 4)
    assert lengths.tolist() == [45, 8, 25, 22]
    assert tables.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1], [4, 5, -1, -1], [6, 7, -1, -1]]


@pytest.mark.parametrize("unused", [INT32.min, -1, 0, 1, 4, 5, INT32.max])
def test_empty_requests_have_no_tokens_whatever_their_last_page_len_is(unused):
    tables, lengths = check([0, 0, 2, 2, 3, 3], [7, 5, 6], [unused, 4, unused, 1, unused], 4, 2)
    assert lengths.tolist() == [0, 8, 0, 1, 0]
    assert tables.tolist() == [[-1, -1], [7, 5], [-1, -1], [6, -1], [-1, -1]]


def test_a_batch_without_blocks():
    tables, lengths = check([0, 0, 0], [], [1, 1], 4, 3)
    assert (tables == -1).all()
    assert (lengths == 0).all()


@pytest.mark.parametrize(("last", "tokens"), [(INT32.min, 4), (-1, 4), (0, 4), (1, 5), (4, 8), (5, 8), (INT32.max, 8)])
def test_the_last_page_len_never_counts_tokens_of_other_blocks(last, tokens):
    assert check([0, 2], [7, 5], [last], 4, 2)[1].tolist() == [tokens]


def test_ids_past_the_last_sum_are_not_used():
    """As in buffers for CUDA graphs, which are longer than a batch needs."""
    tables, _ = check([0, 1, 3], [7, 5, 6, INT32.max, 9], [1, 1], 4, 3)
    assert tables.tolist() == [[7, -1, -1], [5, 6, -1]]


def test_ids_that_do_not_exist_are_missing_blocks():
    tables, lengths = check([0, 1, 4, 6], [7, 5], [4, 3, 2], 4, 3)
    assert tables.tolist() == [[7, -1, -1], [5, -1, -1], [-1, -1, -1]]
    assert lengths.tolist() == [4, 11, 6]


def test_no_new_token_gets_the_slot_of_another_one_in_a_request_of_too_many_blocks():
    tables, lengths = check([0, 3, 4], [7, 5, 6, 2], [2, 2], 4, 2)
    assert tables.tolist() == [[7, 5], [2, -1]]
    slots = slots_for(jnp.asarray(tables), jnp.asarray(lengths)[:, None] - 1, block_size=4)
    assert slots.tolist() == [[-1], [9]]


@pytest.mark.parametrize("tail", [(3, 3), (0, 0), (-1, -1), (INT32.min, INT32.min), (2, 1)])
def test_sums_that_fall_count_as_those_before_them(tail):
    tables, lengths = check([0, 1, 3, *tail], [7, 5, 6], [1, 2, 3, 4], 4, 2)
    assert tables.tolist() == [[7, -1], [5, 6], [-1, -1], [-1, -1]]
    assert lengths.tolist() == [1, 6, 0, 0]


@pytest.mark.parametrize("block_size", [1, 3, 64, INT32.max])
def test_lengths_do_not_wrap_around(block_size):
    _, lengths = check([0, INT32.max, INT32.max], [7], [INT32.max, 1], block_size, 2)
    assert lengths[0] == INT32.max // block_size * block_size


@given(
    indptr=st.lists(st.integers(-2, 9) | st.sampled_from([INT32.min, INT32.max]), min_size=5, max_size=5),
    indices=st.lists(st.integers(INT32.min, INT32.max), min_size=6, max_size=6),
    last_page_len=st.lists(st.integers(-1, 65) | st.sampled_from([INT32.min, INT32.max]), min_size=4, max_size=4),
    block_size=st.sampled_from([1, 4, 64]),
)
def test_page_tables_of_anything(indptr, indices, last_page_len, block_size):
    check(indptr, indices, last_page_len, block_size, 3)


def test_wider_integers_saturate():
    wide = np.asarray([0, 1, 2**32 + 2], np.int64), np.asarray([2**32 + 3, 5], np.int64)  # 2 and 3, if cut to 32 bits
    tables, lengths = jaxkv.block_tables_from_csr(*wide, np.asarray([2**32 + 1, 1]), block_size=4, max_blocks=2)
    assert tables.tolist() == [[INT32.max, -1], [5, -1]]
    assert lengths.tolist() == [4, (INT32.max // 4 - 1) * 4 + 1]
