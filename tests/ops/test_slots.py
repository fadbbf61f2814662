"""Slot arithmetic against plain Python loops, with poison in tables and positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from support.cases import each_value

INT32 = np.iinfo(np.int32)
MAX_SLOTS = 2**31 - 1
SIZES = [1, 3, 16, 61, 64]


def slot(row, position, block_size):
    """The slot of a position of a request with blocks `row`, in unbounded ints; -1 for none."""
    if not 0 <= position < len(row) * block_size:
        return -1
    block = int(row[position // block_size])
    # All slots of the block have to be slots of some cache: a cache has at most 2**31 - 1 of them.
    if block < 0 or (block + 1) * block_size > MAX_SLOTS:
        return -1
    return block * block_size + position % block_size


def loop_slots(tables, positions, block_size):
    """`slots_for`, position by position."""
    found = np.empty(positions.shape, np.int32)
    for index in np.ndindex(positions.shape):
        found[index] = slot(tables[index[0]], int(positions[index]), block_size)
    return found


def loop_ragged(tables, lengths, starts, total, block_size):
    """`ragged_slots`, token by token."""
    found = [
        slot(row, int(start) + i, block_size)
        for row, length, start in zip(tables, lengths, starts, strict=True)
        for i in range(length)
    ][:total]
    return np.asarray(found + [-1] * (total - len(found)), np.int32)


def poisoned_tables(block_size):
    """Shuffled blocks, one row of them at the edges of int32."""
    edge = MAX_SLOTS // block_size  # the first block that no cache can have
    return np.asarray(
        [
            [7, 0, 3, 12],
            [2, INT32.max, 9, -1],
            [INT32.min, edge - 1, edge, 2**25],
            [-5, 2**30, INT32.max - 1, 2**26 + 1],
        ],
        np.int32,
    )


def poisoned_positions(block_size):
    """Every position of a table of 4 blocks, and those that it does not have."""
    inside = np.arange(4 * block_size)
    outside = [-1, -block_size, INT32.min, 4 * block_size, 4 * block_size + 1, INT32.max, INT32.max - block_size]
    return np.broadcast_to(np.concatenate([inside, outside]).astype(np.int32), (4, 4 * block_size + len(outside)))


def blocks_of(block_size):
    """The layout of a cache with blocks of that many tokens."""
    entry = jaxkv.MLAEntry("bf16", latent=8, rope=8)
    return jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=block_size, entry=entry)


def assert_slots(function, arrays, block_size, expected):
    """The function returns these slots, of a cache and of its layout, with and without `jit`."""
    layout = blocks_of(block_size)
    compiled = jax.jit(function)
    of_layout = jax.jit(partial(function, cache=layout))
    for found in (
        function(*map(jnp.asarray, arrays), layout),
        compiled(*arrays, jaxkv.KVCache.zeros(layout)),
        of_layout(*arrays),
    ):
        assert found.dtype == jnp.int32
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("block_size", SIZES)
def test_slots_of_poisoned_tables_and_positions(block_size):
    tables, positions = poisoned_tables(block_size), poisoned_positions(block_size)
    expected = loop_slots(tables, positions, block_size)
    assert_slots(jaxkv.slots_for, (tables, positions), block_size, expected)


@pytest.mark.parametrize("shape", [(4,), (4, 0), (4, 2), (4, 3, 5), (4, 2, 1, 3)])
def test_positions_of_any_rank_belong_to_the_request_of_their_first_axis(shape):
    tables = poisoned_tables(3)
    positions = np.random.default_rng(0).integers(-2, 14, shape).astype(np.int32)
    found = jaxkv.slots_for(jnp.asarray(tables), jnp.asarray(positions), blocks_of(3))
    assert found.shape == shape
    assert np.array_equal(found, loop_slots(tables, positions, 3))


@pytest.mark.parametrize("block_size", [1, 64])
def test_no_table_entry_wraps_round_into_a_slot(block_size):
    # 64 * (2**26 + 3) is 64 * 3 in int32: the block of somebody else.
    entries = [
        2**31 - 1,
        2**30,
        2**26,
        2**26 + 3,
        2**25,
        2**25 + 1,
        2**25 - 1,
        2**25 - 2,
        -(2**26),
        3 - 2**26,
        -(2**31),
    ]
    tables = jnp.asarray([entries], jnp.int32)
    positions = jnp.arange(len(entries) * block_size)[None]
    found = np.asarray(jaxkv.slots_for(tables, positions, blocks_of(block_size))).reshape(-1, block_size)
    for entry, row in zip(entries, found, strict=True):
        if entry >= 0 and (entry + 1) * block_size <= MAX_SLOTS:
            assert row.tolist() == [entry * block_size + i for i in range(block_size)]
        else:
            assert (row == -1).all()


def test_the_last_slot_that_int32_counts_is_found():
    tables = jnp.asarray([[2**31 - 2, 2**25 - 2]], jnp.int32)
    assert jaxkv.slots_for(tables, jnp.asarray([[0]]), blocks_of(1)).tolist() == [[2**31 - 2]]
    assert jaxkv.slots_for(tables, jnp.asarray([[127]]), blocks_of(64)).tolist() == [[2**31 - 65]]


@each_value(("block_size", "starts"), SIZES, ["poison", "inside", "zeros", None], default=2)
def test_ragged_runs_with_empty_requests(block_size, starts):
    tables = poisoned_tables(block_size)
    tables = np.concatenate([tables, tables[::-1]])
    lengths = [0, block_size, 0, 0, 2 * block_size + 1, 1, 4 * block_size + 2, 0]
    given_starts = {
        None: [0] * 8,
        "zeros": [0] * 8,
        "inside": [0, 1, block_size, 0, block_size - 1, 3 * block_size, block_size // 2, 2],
        "poison": [-1, -1, INT32.max, INT32.min, INT32.max, 4 * block_size, -(block_size + 1), 5],
    }[starts]
    cu_seq_lens = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    whole = sum(lengths)
    for total in (1, whole - 1, whole, whole + 9):
        found = jaxkv.ragged_slots(
            jnp.asarray(tables),
            cu_seq_lens,
            blocks_of(block_size),
            total=total,
            seq_starts=None if starts is None else jnp.asarray(given_starts, jnp.int32),
        )
        assert found.dtype == jnp.int32
        assert np.array_equal(found, loop_ragged(tables, lengths, given_starts, total, block_size))


@given(
    tables=st.lists(st.lists(st.integers(INT32.min, INT32.max) | st.integers(0, 9), min_size=3, max_size=3), min_size=4,
                    max_size=4),
    lengths=st.lists(st.integers(0, 13), min_size=4, max_size=4),
    starts=st.lists(st.integers(-3, 12) | st.sampled_from([INT32.min, INT32.max]), min_size=4, max_size=4),
    block_size=st.sampled_from([1, 4, 64]),
)  # fmt: skip
def test_ragged_slots_of_anything(tables, lengths, starts, block_size):
    found = jaxkv.ragged_slots(
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        blocks_of(block_size),
        total=30,
        seq_starts=jnp.asarray(starts, jnp.int32),
    )
    assert np.array_equal(found, loop_ragged(tables, lengths, starts, 30, block_size))


def test_ragged_positions_are_those_of_ragged_slots():
    sums, starts = jnp.asarray([0, 20, 20, 33, 33, 0]), jnp.asarray([7, 5, 0, 3, 2])
    found = jaxkv.ragged_positions(sums, total=40, seq_starts=starts)
    assert found.tolist() == [*range(7, 27), *range(13), *[-1] * 7]
    assert jaxkv.ragged_positions(sums, total=21).tolist() == [*range(20), 0]
    tables = jnp.arange(10).reshape(5, 2)
    rows = jnp.repeat(tables, jnp.asarray([20, 0, 13, 0, 7]), axis=0, total_repeat_length=40)
    slots = jaxkv.slots_for(rows, found[:, None], blocks_of(16))[:, 0]
    right = jaxkv.ragged_slots(tables, sums, blocks_of(16), total=40, seq_starts=starts)
    assert slots.tolist() == right.tolist()


def test_sums_that_fall_count_as_those_before_them():
    """As in batches whose unused requests at the end are padded, with any sums, tables and first positions."""
    tables = jnp.asarray([[4, 1, 8], [0, 5, 2], [INT32.max, -1, 3], [INT32.min, 7, 9]], jnp.int32)
    starts = jnp.asarray([7, 0, INT32.max, INT32.min], jnp.int32)
    right = loop_ragged(np.asarray(tables), [20, 13, 0, 0], np.asarray(starts), 40, 16)
    for tail in ((33, 33), (0, 0), (-1, -1), (INT32.min, INT32.min), (21, 3)):
        sums = jnp.asarray([0, 20, 33, *tail], jnp.int32)
        found = jaxkv.ragged_slots(tables, sums, blocks_of(16), total=40, seq_starts=starts)
        assert np.array_equal(found, right), tail


def test_all_requests_empty():
    tables = jnp.asarray(poisoned_tables(16))
    found = jaxkv.ragged_slots(tables, jnp.zeros(5, jnp.int32), blocks_of(16), total=6)
    assert found.tolist() == [-1] * 6


def test_a_run_is_the_slots_of_its_positions():
    tables = jnp.asarray([[4, 1, 8], [0, 5, 2]], jnp.int32)
    starts = jnp.asarray([7, 0])
    ragged = jaxkv.ragged_slots(tables, jnp.asarray([0, 20, 36]), blocks_of(16), total=36, seq_starts=starts)
    first = jaxkv.slots_for(tables, jnp.stack([7 + jnp.arange(20)] * 2), blocks_of(16))[0]
    second = jaxkv.slots_for(tables, jnp.stack([jnp.arange(16)] * 2), blocks_of(16))[1]
    assert ragged.tolist() == [*first.tolist(), *second.tolist()]


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_selected_positions_become_slots(block_size):
    tables = poisoned_tables(block_size)
    rng = np.random.default_rng(0)
    positions = rng.permuted(poisoned_positions(block_size), axis=1)[:, :10].reshape(4, 2, 5)
    expected = loop_slots(tables, positions, block_size)
    assert_slots(jaxkv.positions_to_slots, (positions, tables), block_size, expected)


def test_positions_and_tables_of_wider_integers_saturate():
    tables = np.asarray([[3, 2**32 + 1, -(2**32)]], np.int64)  # 1 and 0, had they been cut to 32 bits
    positions = np.asarray([[[2, 5, 9, 2**32 + 2, -(2**32) + 2]]], np.int64)
    found = jaxkv.positions_to_slots(positions, tables, blocks_of(4))
    assert found.tolist() == [[[14, -1, -1, -1, -1]]]
    with jax.enable_x64(True):
        found = jaxkv.positions_to_slots(jnp.asarray(positions), jnp.asarray(tables), blocks_of(4))
    assert found.dtype == jnp.int32
    assert found.tolist() == [[[14, -1, -1, -1, -1]]]


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int32, np.int64])
def test_tables_of_numpy_and_traced_positions(dtype):
    tables = np.asarray([[4, 1], [0, 5]], dtype)
    found = jax.jit(lambda positions: jaxkv.slots_for(tables, positions, blocks_of(4)))(jnp.asarray([[5], [3]]))
    assert found.tolist() == [[5], [3]]
