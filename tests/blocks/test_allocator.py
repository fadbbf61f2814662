"""`BlockAllocator` against the plain one, over random operations with invalid data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from blocks.plain import PlainAllocator, assert_same_allocator
from jaxkv import blocks

INT32 = np.iinfo(np.int32)
NUM_BLOCKS, REQUESTS, MAX_COUNT = 7, 3, 3
counts = st.lists(st.integers(0, MAX_COUNT) | st.sampled_from([-1, 4, INT32.min, INT32.max]), min_size=3, max_size=3)
ids = st.lists(
    st.integers(-2, NUM_BLOCKS + 1) | st.sampled_from([INT32.min, INT32.max]), min_size=2 * REQUESTS, max_size=6
)
operations = st.lists(
    st.tuples(st.just("allocate"), counts) | st.tuples(st.sampled_from(["share", "free"]), ids), max_size=12
)
allocate = jax.jit(blocks.allocate, static_argnames="max_count")
share, free = jax.jit(blocks.share), jax.jit(blocks.free)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@given(operations)
def test_random_operations(operations):
    allocator, plain = blocks.BlockAllocator.create(NUM_BLOCKS), PlainAllocator(NUM_BLOCKS)
    for name, values in operations:
        if name == "allocate":
            allocator, found, ok = allocate(allocator, ints(*values), max_count=MAX_COUNT)
            expected = plain.allocate(values, MAX_COUNT)
            assert ok.tolist() == [x is not None for x in expected]
            assert found.tolist() == [(x or []) + [-1] * (MAX_COUNT - len(x or [])) for x in expected]
        else:
            allocator = {"share": share, "free": free}[name](allocator, ints(*values))
            getattr(plain, name)(values)
        assert_same_allocator(allocator, plain)
        assert allocator.num_used == sum(count > 0 for count in plain.ref_counts)


def test_all_blocks_or_none_in_order():
    allocator = blocks.BlockAllocator.create(5)
    allocator, found, ok = allocate(allocator, ints(2, 0, 4, 1, 0), max_count=4)
    assert found.tolist() == [[0, 1, -1, -1], *[[-1] * 4] * 4]
    assert ok.tolist() == [True, True, False, False, True]
    assert allocator.num_free == 3


def test_counts_that_are_invalid_do_not_affect_others():
    allocator = blocks.BlockAllocator.create(5)
    allocator, found, ok = allocate(allocator, ints(INT32.max, INT32.max, -1, INT32.min, 3, 2), max_count=3)
    assert ok.tolist() == [False] * 4 + [True] * 2
    assert found[4:].tolist() == [[0, 1, 2], [3, 4, -1]]
    assert allocator.num_free == 0


def test_a_block_that_is_freed_twice_is_free_once():
    allocator, *_ = allocate(blocks.BlockAllocator.create(3), ints(2), max_count=2)
    for _ in range(3):
        allocator = free(allocator, ints(0, 0, -1, 3, 2))
        assert allocator.ref_counts.tolist() == [0, 1, 0]
        assert allocator.free_blocks[:2].tolist() == [2, 0]
        assert allocator.num_free == 2
    allocator, found, ok = allocate(allocator, ints(1, 1, 1), max_count=1)
    assert found[:, 0].tolist() == [0, 2, -1]
    assert ok.tolist() == [True, True, False]


def test_a_shared_block_is_free_after_its_last_reference():
    allocator, found, _ = allocate(blocks.BlockAllocator.create(2), ints(1), max_count=1)
    allocator = share(share(allocator, found), ints(0, 1))  # block 1 is free: it stays so
    assert allocator.ref_counts.tolist() == [3, 0]
    allocator = free(allocator, ints(0, 0))
    assert allocator.num_free == 1
    allocator = free(allocator, found)
    assert allocator.num_free == 2


def test_no_blocks_at_all():
    allocator = blocks.BlockAllocator.create(2)
    for operation in (share, free):
        assert_same_allocator(operation(allocator, jnp.zeros((0, 3), jnp.int32)), PlainAllocator(2))


def test_pools_of_a_batch():
    """Under `vmap`, each pool is on its own."""

    @jax.jit
    @jax.vmap
    def run(counts, gone):
        allocator, found, ok = blocks.allocate(blocks.BlockAllocator.create(4), counts, max_count=3)
        return blocks.free(allocator, gone), found, ok

    pools, found, ok = run(ints([2, 1], [3, 2]), ints([0], [1]))
    assert found.tolist() == [[[0, 1, -1], [2, -1, -1]], [[0, 1, 2], [-1, -1, -1]]]
    assert ok.tolist() == [[True, True], [True, False]]
    assert pools.num_free.tolist() == [2, 2]
    assert pools.num_used.tolist() == [2, 2]


def test_host_arrays_and_wider_integers():
    """Without `jit`, which would cut integers to 32 bits."""
    allocator = jax.device_get(blocks.BlockAllocator.create(3))
    allocator, found, _ = blocks.allocate(allocator, np.asarray([1, 2**32 + 1], np.int64), max_count=2)
    assert found.tolist() == [[0, -1], [-1, -1]]
    assert blocks.free(jax.device_get(allocator), np.asarray([2**32], np.int64)).num_free == 2


MISTAKES = {
    "no blocks": (lambda a: blocks.BlockAllocator.create(0), "`num_blocks` is 0"),
    "no allocator": (lambda a: blocks.free(a.ref_counts, ints(1)), "`allocator` is a .*: expected a BlockAllocator"),
    "floats": (lambda a: blocks.free(a, jnp.ones(2)), "`blocks` has dtype float32"),
    "a list": (lambda a: blocks.share(a, [1]), "`blocks` is a list"),
    "counts of two axes": (lambda a: blocks.allocate(a, ints([1]), max_count=1), r"`counts` has shape \(1, 1\)"),
    "a count of none": (lambda a: blocks.allocate(a, ints(1), max_count=0), "`max_count` is 0"),
    "a batch of allocators": (
        lambda a: blocks.free(jax.tree.map(lambda x: x[None], a), ints(1)),
        "`allocator.ref_counts` has shape",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call(blocks.BlockAllocator.create(4))


CHECKED = {
    "a count too large": (
        lambda a: blocks.allocate(a, ints(1, 3), max_count=2),
        r"`counts`\[1\] is 3: expected 0 to 2",
    ),
    "a negative count": (lambda a: blocks.allocate(a, ints(-1), max_count=2), r"`counts`\[0\] is -1"),
    "an id outside": (lambda a: blocks.free(a, ints(0, 4)), r"`blocks`\[1\] is 4: the allocator has blocks 0 to 3"),
    "a free block": (lambda a: blocks.share(a, ints(-1, 2)), r"`blocks`\[1\] is 2: this block is free"),
    "freed twice": (lambda a: blocks.free(a, ints(1, 0, 1)), r"`blocks`\[0\] is 1: this block is freed more often"),
}


@pytest.mark.parametrize(("call", "message"), CHECKED.values(), ids=CHECKED)
def test_checked(call, message):
    allocator, *_ = blocks.allocate(blocks.BlockAllocator.create(4), ints(2), max_count=2)
    with pytest.raises(ValueError, match=message):
        jaxkv.checked(call)(allocator)
    jaxkv.checked(lambda a: blocks.free(blocks.share(a, ints(0, -1)), ints([0, 0], [1, -1])))(allocator)
