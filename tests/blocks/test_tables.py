"""`BlockTables` and the contents of a cache against plain tables and lists, over random operations."""

import dataclasses
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jaxkv
from blocks.plain import PlainTables, assert_same_allocator
from jaxkv import blocks

INT32 = np.iinfo(np.int32)
SEQUENCES, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, MAX_TOKENS = 4, 3, 8, 3, 4
CAPACITY = MAX_BLOCKS * BLOCK_SIZE
SIZES = dict(num_sequences=SEQUENCES, max_blocks=MAX_BLOCKS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
LAYOUT = jaxkv.CacheLayout(
    num_layers=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, entry=jaxkv.KVEntry("f32", head_dim=1), num_heads=1
)
OPERATIONS = ("append", "fork", "truncate", "hold")
STEPS = 30


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def hold(tables, held):
    """Has somebody else hold the blocks of all sequences, instead of those held before."""
    allocator = blocks.share(tables.allocator, tables.block_tables)
    return dataclasses.replace(tables, allocator=blocks.free(allocator, held)), tables.block_tables


def step(state, operation, values, tokens):
    """One operation on the tables and the cache: the new state, and what `append` returned."""

    def append(tables, held, cache):
        tables, new = blocks.append(tables, values, max_tokens=MAX_TOKENS)
        cache = jaxkv.copy_blocks(cache, new.src, new.dst)
        entries = tokens.reshape(-1, 1, 1)
        return (tables, held, jaxkv.write_kv(cache, entries, entries, new.slots.reshape(-1), layer=0)), new

    def without_tokens(function, tables, held, cache):
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(append, tables, held, cache)[1])
        return (*function(tables, held), cache), nothing

    branches = {
        "append": append,
        "fork": partial(without_tokens, lambda tables, held: (blocks.fork(tables, values), held)),
        "truncate": partial(without_tokens, lambda tables, held: (blocks.truncate(tables, values), held)),
        "hold": partial(without_tokens, hold),
    }
    return lax.switch(operation, [branches[name] for name in OPERATIONS], *state)


@jax.jit
def run(operations, values, tokens):
    """The tables after each operation, with what was appended and the contents of all sequences."""

    def body(state, inputs):
        state, new = step(state, *inputs)
        tables, _, cache = state
        sums = jnp.concatenate([ints(0), jnp.cumsum(tables.seq_lens)])
        contents, _ = jaxkv.gather_kv(
            cache, tables.block_tables, sums, layer=0, total=SEQUENCES * CAPACITY, dtype=jnp.float32
        )
        return state, (tables, new, contents[:, 0, 0])

    tables = blocks.BlockTables.create(**SIZES)
    cache = jaxkv.KVCache(jnp.full((LAYOUT.size,), jnp.nan, LAYOUT.dtype), LAYOUT)
    return lax.scan(body, (tables, tables.block_tables, cache), (operations, values, tokens))[1]


def random_operations(seed):
    """Mostly valid ones; lengths of sequences are up to their capacity."""
    rng = np.random.default_rng(seed)
    operations = rng.choice(len(OPERATIONS), STEPS, p=[0.55, 0.25, 0.15, 0.05])
    most = np.asarray([MAX_TOKENS + 1, SEQUENCES, CAPACITY, 1])[operations][:, None]
    values = np.clip(rng.integers(-1, most + 1, (STEPS, SEQUENCES)), rng.choice([-1, 0], p=[0.1, 0.9]), None)
    edges = rng.choice([INT32.min, INT32.max], values.shape)
    values = np.where(rng.random(values.shape) < 0.01, edges, values).astype(np.int32)
    return operations.astype(np.int32), values


def padded(rows, columns):
    return [list(row) + [-1] * (columns - len(row)) for row in rows]


@given(st.integers(0, 2**32))
def test_random_operations(seed):
    operations, values = random_operations(seed)
    tokens = np.arange(STEPS * SEQUENCES * MAX_TOKENS, dtype=np.float32).reshape(STEPS, SEQUENCES, MAX_TOKENS)
    tables, new, contents = jax.device_get(run(operations, values, tokens))
    plain, held, texts = PlainTables(**SIZES), [], [[] for _ in range(SEQUENCES)]
    for now, (operation, numbers) in enumerate(zip(operations, values.tolist(), strict=True)):
        name = OPERATIONS[operation]
        if name == "append":
            expected = plain.append(numbers, MAX_TOKENS)
            slots, pairs = zip(*expected, strict=True)
            ok = [x is not None for x in slots]
            assert new.ok[now].tolist() == ok
            assert new.slots[now].tolist() == padded([x or [] for x in slots], MAX_TOKENS)
            assert list(zip(new.src[now].tolist(), new.dst[now].tolist(), strict=True)) == [
                x or (-1, -1) for x in pairs
            ]
            for text, row, written in zip(texts, tokens[now].tolist(), slots, strict=True):
                text += row[: len(written or [])]
                for slot in written or []:  # nobody else reads or writes this block
                    assert plain.allocator.ref_counts[slot // BLOCK_SIZE] == 1
        elif name == "fork":
            plain.fork(numbers)
            texts = [list(texts[x]) if 0 <= x < SEQUENCES else [] for x in numbers]
        elif name == "truncate":
            plain.truncate(numbers)
            texts = [text[: max(length, 0)] for text, length in zip(texts, numbers, strict=True)]
        else:
            whole = list(chain(*plain.tables))
            plain.allocator.share(whole)
            plain.allocator.free(held)
            held = whole
        state = jax.tree.map(lambda x: x[now], tables)  # noqa: B023 (called here)
        assert_same_allocator(state.allocator, plain.allocator)
        assert state.block_tables.tolist() == padded(plain.tables, MAX_BLOCKS)
        assert state.seq_lens.tolist() == plain.lengths == [len(text) for text in texts]
        # Each reference is an entry of a table, or somebody else's.
        uses = np.bincount([*chain(*plain.tables), *held], minlength=NUM_BLOCKS)
        assert uses.tolist() == plain.allocator.ref_counts
        whole = list(chain(*texts))
        assert contents[now, : len(whole)].tolist() == whole


def test_a_while_loop_ends_in_the_same_state():
    operations, values = random_operations(7)
    tokens = np.ones((STEPS, SEQUENCES, MAX_TOKENS), np.float32)

    @jax.jit
    def loop():
        def body(state):
            now, *state = state
            return now + 1, *step(state, *(jnp.asarray(x)[now] for x in (operations, values, tokens)))[0]

        tables = blocks.BlockTables.create(**SIZES)
        state = 0, tables, tables.block_tables, jaxkv.KVCache.zeros(LAYOUT)
        return lax.while_loop(lambda state: state[0] < STEPS, body, state)[1]

    found, expected = loop(), jax.tree.map(lambda x: x[-1], run(operations, values, tokens)[0])
    assert expected.allocator.num_used > 0
    jax.tree.map(np.testing.assert_array_equal, found, expected)


append, fork, truncate = (
    jax.jit(blocks.append, static_argnames="max_tokens"),
    jax.jit(blocks.fork),
    jax.jit(blocks.truncate),
)


def forked(length, children, num_blocks=8):
    """Tables of sequences that continue one sequence of this length."""
    tables = blocks.BlockTables.create(num_sequences=1, max_blocks=4, num_blocks=num_blocks, block_size=4)
    tables, new = append(tables, ints(length), max_tokens=16)
    assert new.ok.all()
    return fork(tables, jnp.zeros(children, jnp.int32))


def test_the_last_of_all_sharers_keeps_the_block():
    tables, new = append(forked(6, 3), ints(1, 1, 1))
    assert new.src.tolist() == [1, 1, -1]
    assert new.dst.tolist() == [2, 3, -1]
    assert new.slots.tolist() == [[10], [14], [6]]
    assert tables.block_tables[:, :2].tolist() == [[0, 2], [0, 3], [0, 1]]
    assert tables.allocator.ref_counts[:4].tolist() == [3, 1, 1, 1]


def test_all_copy_a_block_that_somebody_else_holds():
    tables, new = append(forked(6, 3), ints(1, 0, 1))
    assert new.src.tolist() == [1, -1, 1]
    assert new.dst.tolist() == [2, -1, 3]
    assert tables.block_tables[1, :2].tolist() == [0, 1]
    assert tables.allocator.ref_counts[:4].tolist() == [3, 1, 1, 1]


def test_nothing_is_copied_where_a_block_begins():
    tables, new = append(forked(8, 3), ints(1, 1, 1))
    assert new.src.tolist() == new.dst.tolist() == [-1, -1, -1]
    assert tables.block_tables[:, :3].tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


@pytest.mark.parametrize("free_blocks", [0, 1])
def test_no_one_keeps_a_block_that_another_failed_to_copy(free_blocks):
    before = forked(6, 3, 2 + free_blocks)
    tables, new = append(before, ints(1, 1, 1))
    assert new.ok.tolist() == [free_blocks == 1, False, False]
    assert tables.seq_lens.tolist() == [6 + free_blocks, 6, 6]
    assert tables.block_tables[1:].tolist() == before.block_tables[1:].tolist()
    assert new.slots[1:].tolist() == [[-1], [-1]]
    assert tables.allocator.ref_counts[1] == 3 - free_blocks
    if not free_blocks:
        jax.tree.map(np.testing.assert_array_equal, tables, before)


def test_a_sequence_whose_table_is_full_fails_alone():
    tables = blocks.BlockTables.create(num_sequences=3, max_blocks=2, num_blocks=8, block_size=4)
    tables, new = append(tables, ints(7, 8, 9), max_tokens=9)
    assert new.ok.tolist() == [True, True, False]
    tables, new = append(tables, ints(1, 1, 1))
    assert new.ok.tolist() == [True, False, True]
    assert new.slots.tolist() == [[7], [-1], [16]]
    assert tables.seq_lens.tolist() == [8, 8, 1]


def test_more_and_fewer_children_than_parents():
    tables = forked(5, 4)
    assert tables.allocator.num_used == 2
    tables, _ = append(tables, ints(1, 1, 1, 0))
    assert tables.allocator.num_used == 5
    tables = fork(tables, ints(2, -1))
    assert tables.seq_lens.tolist() == [6, 0]
    assert tables.allocator.num_used == 2
    assert fork(tables, ints(-1)).allocator.num_used == 0


def test_finished_sequences_give_their_blocks_back():
    tables, _ = append(forked(6, 3), ints(1, 1, 1))
    finished = jnp.asarray([True, False, True])
    tables = truncate(tables, jnp.where(finished, 0, tables.seq_lens))
    assert tables.block_tables.tolist() == [[-1] * 4, [0, 3, -1, -1], [-1] * 4]
    assert tables.allocator.num_used == 2


def test_after_a_cut_inside_a_shared_block_it_is_copied():
    tables = forked(8, 2)
    tables = truncate(tables, ints(6, 8))
    tables, new = append(tables, ints(1, 0))
    assert (new.src[0], new.dst[0], new.slots[0, 0]) == (1, 2, 10)
    assert tables.block_tables[:, :2].tolist() == [[0, 2], [0, 1]]


def test_batches_and_strict_promotion():
    """Under `vmap` each pool is on its own, also in programs that forbid implicit promotion, and with 64-bit ints."""

    def one(lengths, parents):
        tables = blocks.BlockTables.create(num_sequences=2, max_blocks=2, num_blocks=4, block_size=4)
        tables, _ = blocks.append(tables, lengths, max_tokens=8)
        tables, new = blocks.append(blocks.fork(tables, parents), jnp.ones_like(parents))
        return blocks.truncate(tables, tables.seq_lens - 1), new

    arrays = ints([3, 8], [4, 1]), ints([0, 0], [1, -1])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.enable_x64(True):
        found = jax.jit(jax.vmap(one))(*arrays)
    for row, pair in enumerate(zip(*arrays, strict=True)):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[row], found), jax.jit(one)(*pair))  # noqa: B023
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"int32", "bool"}


def test_states_are_donated():
    tables = blocks.BlockTables.create(num_sequences=2, max_blocks=4, num_blocks=2**20, block_size=16)
    compiled = jax.jit(blocks.append, donate_argnums=0).lower(tables, ints(1, 1)).compile()
    nbytes = sum(x.nbytes for x in jax.tree.leaves(tables))
    assert compiled.memory_analysis().alias_size_in_bytes >= nbytes


MISTAKES = {
    "no tables": (lambda t: blocks.fork(t.allocator, ints(0)), "`tables` is a BlockAllocator: expected BlockTables"),
    "other sequences": (lambda t: blocks.append(t, ints(1)), r"`num_tokens` has shape \(1,\): expected \[B\] = \[2\]"),
    "other lengths": (lambda t: blocks.truncate(t, ints(1, 2, 3)), r"`seq_lens` has shape \(3,\)"),
    "bool": (lambda t: blocks.append(t, jnp.ones(2, bool)), "`num_tokens` has dtype bool"),
    "no tokens": (lambda t: blocks.append(t, ints(1, 1), max_tokens=0), "`max_tokens` is 0"),
    "no children": (lambda t: blocks.fork(t, jnp.zeros(0, jnp.int32)), "`parents` has shape"),
    "no block size": (lambda t: blocks.fork(dataclasses.replace(t, block_size=0), ints(0)), "`tables.block_size` is 0"),
    "too many slots": (
        lambda t: blocks.BlockTables.create(num_sequences=1, max_blocks=1, num_blocks=2**25, block_size=64),
        "`num_blocks` is 33554432: expected at most 2147483647 tokens, in blocks of 64",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call(blocks.BlockTables.create(num_sequences=2, max_blocks=2, num_blocks=4, block_size=4))


CHECKED = {
    "too many tokens": (lambda t: blocks.append(t, ints(1, 2)), r"`num_tokens`\[1\] is 2: expected 0 to 1"),
    "no such parent": (lambda t: blocks.fork(t, ints(-1, 2)), r"`parents`\[1\] is 2: there are 2 sequences"),
    "longer": (lambda t: blocks.truncate(t, ints(6, 7)), r"`seq_lens`\[1\] is 7: the sequence has 6 tokens"),
}


@pytest.mark.parametrize(("call", "message"), CHECKED.values(), ids=CHECKED)
def test_checked(call, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.checked(call)(forked(6, 2))


def test_checks_find_nothing_in_right_calls():
    def calls(tables):
        tables, new = blocks.append(blocks.fork(tables, ints(1, -1, 0)), ints(1, 0, 1))
        return blocks.truncate(tables, ints(5, 0, 0)), new

    found, expected = jaxkv.checked(calls)(forked(6, 2)), jax.jit(calls)(forked(6, 2))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
