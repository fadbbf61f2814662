"""Checked mode: each misuse is reported with argument, position and value, and nothing else is."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from checks.calls import (
    KV,
    LAYERS,
    LENGTHS,
    MLA,
    OPERATIONS,
    TABLES,
    block_tables_from_csr,
    copy_blocks,
    decode_delta_rule,
    decode_kv,
    decode_mla,
    decode_mla_sparse,
    decode_mla_sparse_of_two,
    gather_entries,
    gather_indexer_k,
    gather_kv,
    gather_mla,
    grouped_swiglu,
    indexer_logits,
    ints,
    planned_decode_mla,
    ragged_indexer_logits,
    read_blocks,
    select_topk,
    write_blocks,
    write_indexer_k,
    write_kv,
    write_mla,
)
from jaxkv import masks
from jaxkv.ops import OPERATIONS as DECLARED
from support.cases import further
from support.compare import assert_same_bits

WITHOUT_DATA_TO_CHECK = {"merge_states", "select_experts", "scaled_linear"}

CHECKED_ELSEWHERE = {"plan_decode", "prefill_mla", "prefill_kv"}
"""Plans are checked by the calls that use them; the checks of prefills are in their own tests (`test_checked`)."""


def test_every_declared_operation_is_called_here():
    called = {operation.__name__ for operation in OPERATIONS}
    assert called | WITHOUT_DATA_TO_CHECK | CHECKED_ELSEWHERE == {operation.name for operation in DECLARED}


OF_LAYERS = [operation for operation in OPERATIONS if "layer" in inspect.signature(operation).parameters]

# What is called, with what, and what the message says.
MISUSE = {
    "expert past the last": (
        grouped_swiglu,
        dict(experts=[[0, -1], [1, 3]]),
        "`experts`[1, 1] is 3: there are 3 experts",
    ),
    "slot past the cache": (write_mla, dict(slots=[5, 23, 24]), "`slot_mapping`[2] is 24: the cache has 24 slots"),
    "huge slot": (write_kv, dict(slots=[2**31 - 1]), "`slot_mapping`[0] is 2147483647: the cache has 24 slots"),
    "indexer slot": (write_indexer_k, dict(slots=[-9, 99]), "`slot_mapping`[1] is 99: the cache has 24 slots"),
    "slot twice": (write_mla, dict(slots=[7, 3, -1, 7, -1]), "`slot_mapping`[3] is 7: this slot is written twice"),
    "slot thrice": (write_kv, dict(slots=[7, 7, 7]), "`slot_mapping`[1] is 7: this slot is written twice"),
    "indexer slot twice": (write_indexer_k, dict(slots=[0, 0]), "`slot_mapping`[1] is 0: this slot is written twice"),
    "slot of a state that another token writes": (
        decode_delta_rule,
        dict(read=[0, 5, -1], slots=[0, 7, 5]),
        "`read_slots`[1] is 5: this slot is written by another token",
    ),
    "slot of two states": (
        decode_delta_rule,
        dict(slots=[7, -1, 7]),
        "`write_slots`[2] is 7: this slot is written twice",
    ),
    "slot of a state past the cache": (
        decode_delta_rule,
        dict(read=[0, 24, 1]),
        "`read_slots`[1] is 24: the cache has 24",
    ),
    "block past the cache": (
        decode_mla,
        dict(tables=[[4, 0], [6, 3]]),
        "`block_tables`[1, 0] is 6: the cache has blocks 0 to 5",
    ),
    "negative block": (decode_kv, dict(tables=[[4, -1], [1, 3]]), "`block_tables`[0, 1] is -1: the cache has blocks"),
    "block of the indexer": (
        indexer_logits,
        dict(tables=[[2**31 - 1, 0], [1, 3]]),
        "`block_tables`[0, 0] is 2147483647: the cache has blocks 0 to 5",
    ),
    "block of a gather": (gather_mla, dict(tables=[[4, 6], [1, 3]]), "`block_tables`[0, 1] is 6: the cache has blocks"),
    "block of a later chunk": (
        gather_mla,
        dict(tables=[[77, 6], [1, 3]], starts=[4, 0], cu_seq_lens=[0, 1, 4]),
        "`block_tables`[0, 1] is 6: the cache has blocks",
    ),
    "block of a gather of heads": (gather_kv, dict(tables=[[4, 0], [9, 3]]), "`block_tables`[1, 0] is 9"),
    "block of a gather of bytes": (gather_entries, dict(tables=[[4, 0], [9, 3]]), "`block_tables`[1, 0] is 9"),
    "block of a gather of keys": (gather_indexer_k, dict(tables=[[4, 0], [9, 3]]), "`block_tables`[1, 0] is 9"),
    "length past the table": (
        decode_mla,
        dict(lengths=[7, 9]),
        "`seq_lens`[1] is 9: the table holds 2 blocks, 8 tokens",
    ),
    "negative length": (decode_kv, dict(lengths=[-1, 3]), "`seq_lens`[0] is -1: the table holds 2 blocks, 8 tokens"),
    "length of the indexer": (indexer_logits, dict(lengths=[8, 2**30]), "`seq_lens`[1] is 1073741824: the table holds"),
    "length of a token of the indexer": (
        indexer_logits,
        dict(lengths=[[8], [9]]),
        "`seq_lens`[1] is 9: the table holds",
    ),
    "length of ragged tokens of the indexer": (
        ragged_indexer_logits,
        dict(lengths=[8, 9]),
        "`seq_lens`[1] is 9: the table holds",
    ),
    "more tokens of the indexer than rows": (
        ragged_indexer_logits,
        dict(cu_q_lens=[0, 1, 4]),
        "`cu_q_lens`[2] is 4: expected a running sum that begins at 0, of 3 query tokens",
    ),
    "length past the logits": (select_topk, dict(lengths=[5, 6]), "`lengths`[1] is 6: expected 0 to 5"),
    "negative length of logits": (select_topk, dict(lengths=[-1, 6]), "`lengths`[0] is -1: expected 0 to 5"),
    "run past the table": (
        gather_mla,
        dict(cu_seq_lens=[0, 1, 10]),
        "lengths`[1] is 9: the table holds 2 blocks, 8 tokens",
    ),
    "chunk past the table": (
        gather_mla,
        dict(cu_seq_lens=[0, 7, 10], starts=[2, 0]),
        "`seq_starts + lengths`[0] is 9: the table holds 2 blocks, 8 tokens",
    ),
    "running sum that falls": (
        gather_mla,
        dict(cu_seq_lens=[0, 5, 3]),
        "`cu_seq_lens`[1] is 3: a running sum never falls",
    ),
    "total too small": (gather_mla, dict(total=9), "`cu_seq_lens` is 10: `total` is 9"),
    "sparse slot": (
        decode_mla_sparse,
        dict(slots=[[0, 1, 2], [3, -1, 24]]),
        "`slots`[1, 0, 2] is 24: the cache has 24 slots",
    ),
    "sparse slot that is counted": (
        decode_mla_sparse,
        dict(slots=[[0, 1, 24], [3, 24, 2]], counts=[2, 2]),
        "`slots`[1, 0, 1] is 24: the cache has 24 slots",
    ),
    "sparse slot of a second cache": (
        decode_mla_sparse_of_two,
        dict(slots=[[0, 1, 2], [3, -1, 24]]),
        "`extra.slots`[1, 0, 2] is 24: the cache has 24 slots",
    ),
    "block of the indexer before max_len": (
        indexer_logits,
        dict(tables=[[4, 6], [1, 3]]),
        "`block_tables`[0, 1] is 6: the cache has blocks 0 to 5",
    ),
    "copy to a block twice": (
        copy_blocks,
        dict(src=[0, 1, 2], dst=[3, 4, 3]),
        "`dst`[2] is 3: this block is written twice in one call",
    ),
    "copy from no block": (copy_blocks, dict(src=[0, -1]), "`src`[1] is -1: the cache has blocks 0 to 5"),
    "copy to no block": (copy_blocks, dict(dst=[6, 0]), "`dst`[0] is 6: the cache has blocks 0 to 5"),
    "read of no block": (read_blocks, dict(blocks=[0, 1, 6]), "`blocks`[2] is 6: the cache has blocks 0 to 5"),
    "write of no block": (write_blocks, dict(blocks=[-1, 1]), "`blocks`[0] is -1: the cache has blocks 0 to 5"),
    "write of a block twice": (write_blocks, dict(blocks=[1, 1]), "`blocks`[1] is 1: this block is written twice"),
    "page table not from 0": (
        block_tables_from_csr,
        dict(indptr=[1, 2, 2, 5]),
        "`indptr`[0] is 1: a running sum starts at 0",
    ),
    "page table whose sums fall": (
        block_tables_from_csr,
        dict(indptr=[0, 2, 1, 5]),
        "`indptr`[2] is 1: a running sum never falls",
    ),
    "page table without ids": (
        block_tables_from_csr,
        dict(indices=[4, 0, 1, 3]),
        "`indptr`[3] is 5: `indices` has 4 block ids",
    ),
    "page table of too many blocks": (
        block_tables_from_csr,
        dict(max_blocks=2),
        "`indptr`[3] is 5: the request that ends there has 3 blocks, and `max_blocks` is 2",
    ),
    "too many tokens of a last block": (
        block_tables_from_csr,
        dict(last_page_len=[4, 0, 5]),
        "`last_page_len`[2] is 5: a last block has 1 to 4 tokens",
    ),
    "no tokens of a last block": (
        block_tables_from_csr,
        dict(last_page_len=[0, 0, 1]),
        "`last_page_len`[0] is 0: a last block has 1 to 4 tokens",
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_reported_by_argument_position_and_value(case):
    operation, given, fragments = MISUSE[case]
    with pytest.raises(ValueError, match=re.escape(fragments)):
        jaxkv.checked(lambda: operation(**given))()


UNREPORTED = {
    "first token before the request": (gather_mla, dict(starts=[0, -1]), "`seq_starts`[1] is -1"),
    "running sum not from 0": (gather_mla, dict(cu_seq_lens=[1, 7, 10]), "`cu_seq_lens`[0] is 1"),
    "more slots counted than given": (decode_mla_sparse, dict(counts=[3, 4]), "`counts`[1, 0] is 4"),
    "more slots of a second cache": (decode_mla_sparse_of_two, dict(counts=[3, 4]), "`extra.counts`[1, 0] is 4"),
    "fewer slots counted than none": (decode_mla_sparse, dict(counts=[-1, 3]), "`counts`[0, 0] is -1"),
}


@pytest.mark.parametrize("case", UNREPORTED)
def test_misuse_that_should_be_reported(case):
    operation, given, fragments = UNREPORTED[case]
    with pytest.raises(ValueError, match=re.escape(fragments)):
        jaxkv.checked(lambda: operation(**given))()


@pytest.mark.ci
@pytest.mark.parametrize("case", MISUSE)
def test_without_checks_misuse_raises_nothing(case):
    operation, given, _ = MISUSE[case]
    jax.block_until_ready(operation(**given))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_good_calls_pass_and_give_what_unchecked_ones_give(operation):
    found, expected = jaxkv.checked(operation)(), jax.jit(operation)()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("layer", [further(-1), LAYERS, further(2**31 - 1)])
@pytest.mark.parametrize("operation", OF_LAYERS, ids=lambda operation: operation.__name__)
def test_traced_layer_out_of_range(operation, layer):
    check = jaxkv.checked(lambda layer: operation(layer=layer))
    with pytest.raises(ValueError, match=re.escape(f"`layer` is {layer}: the cache has {LAYERS} layers")):
        check(ints(layer))
    check(ints(LAYERS - 1))


def test_bytes_outside_the_cache_of_a_bad_write_stay_as_they_were():
    before = np.random.default_rng(0).integers(0, 2**16, MLA.size, np.uint16).view(jnp.bfloat16)
    cache = jaxkv.KVCache(jnp.asarray(before), MLA)
    expected = before.copy()
    expected.reshape(6, 3, 4, 12)[5, 1, 3] = 1  # slot 23 of layer 1
    after = write_mla([24, 23, 2**31 - 1, -7], layer=ints(1), cache=cache)
    assert_same_bits(after.buffer, expected)
    assert_same_bits(write_mla([1, 2], layer=ints(3), cache=cache).buffer, before)
    with pytest.raises(ValueError, match=r"`slot_mapping`\[0\] is 24"):
        jaxkv.checked(write_mla)([24, 23, 2**31 - 1, -7], ints(1), cache)
    assert_same_bits(cache.buffer, before)


@pytest.mark.parametrize(
    ("operation", "optional"),
    [
        *((operation, {}) for operation in OPERATIONS),
        (decode_kv, {"window": 3}),
        (ragged_indexer_logits, {}),
        (decode_mla_sparse, {"counts": [1, 2]}),
        (gather_mla, {"starts": [0, 0]}),
        (planned_decode_mla, {}),
        (block_tables_from_csr, {}),
    ],
)
def test_strict_programs_may_be_checked(operation, optional):
    """Programs may refuse to promote ranks and dtypes: of their own arrays, not of the checks'."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jaxkv.checked(partial(operation, **optional)))


class TestPoison:
    """NaN and nonsense are misuse exactly where a call would look at them."""

    def cache(self, layout, *bad, layer=1):
        """Ones in the live slots of `layer`, but for `bad` ones; NaN everywhere else."""
        parts = (layout.num_layers, layout.num_blocks, layout.num_heads, layout.block_size)
        values = jnp.float8_e4m3fn if layout.entry.format == "fp8" else layout.dtype
        buffer = np.full((*parts, layout.width), np.nan, values)
        for row, length in zip(TABLES, LENGTHS, strict=True):
            for position in range(length):
                buffer[layer, row[position // 4], :, position % 4] = 1
        for block, head, token, element in bad:
            buffer[layer, block, head, token, element] = np.nan
        flat = np.ascontiguousarray(np.moveaxis(buffer, [0, 1, 2, 3], [1, 0, 3, 2])).reshape(-1)  # BLNHC
        return jaxkv.KVCache(jnp.asarray(flat.view(layout.dtype)), layout)

    def test_nan_outside_the_live_range_is_not_misuse(self):
        jaxkv.checked(lambda cache: decode_mla(layer=1, cache=cache))(self.cache(MLA))
        jaxkv.checked(lambda cache: decode_kv(layer=1, cache=cache))(self.cache(KV))

    @pytest.mark.parametrize("element", [0, 7, 8, 11])
    def test_nan_in_a_live_entry_of_latents(self, element):
        cache = self.cache(MLA, (0, 0, 2, element))  # position 6 of request 0
        with pytest.raises(ValueError, match=re.escape("`cache`[0, 6] is 2: the entry at this slot")):
            jaxkv.checked(lambda cache: decode_mla(layer=1, cache=cache))(cache)

    @pytest.mark.parametrize("element", [0, 11])
    @pytest.mark.parametrize("head", [0, 1])
    def test_nan_in_a_live_entry_of_heads(self, head, element):
        cache = self.cache(KV, (1, head, 1, element))  # position 1 of request 1
        with pytest.raises(ValueError, match=re.escape("`cache`[1, 1] is 5: the entry at this slot")):
            jaxkv.checked(lambda cache: decode_kv(layer=1, cache=cache))(cache)

    def test_the_layer_looked_at_is_the_one_asked_for(self):
        with pytest.raises(ValueError, match="`cache`"):
            jaxkv.checked(lambda cache: decode_mla(layer=0, cache=cache))(self.cache(MLA))

    @pytest.mark.parametrize(
        ("window", "tokens", "misused"),
        [
            *((2, 1, False), (3, 1, True), (2, 2, True), (1, 2, False)),
            *(((0, 1), 2, False), ((1, 1), 2, True), ((-1, 0), 2, True), ((0, -1), 3, True)),
        ],
    )
    def test_nan_is_misuse_inside_the_window_only(self, window, tokens, misused):
        cache = self.cache(KV, (0, 0, 0, 3))  # position 4 of 7
        options = {"window": window, "tokens": tokens, "causal": isinstance(window, int)}
        check = jaxkv.checked(lambda cache: decode_kv(layer=1, cache=cache, **options))
        if misused:
            with pytest.raises(ValueError, match=re.escape("`cache`[0, 4] is 0: the entry at this slot")):
                check(cache)
        else:
            check(cache)

    @pytest.mark.parametrize(
        ("options", "misused"),
        [
            ({"mask": masks.Chunked(4)}, True),
            further({"mask": masks.Prefix(4)}, False),
            further({"mask": masks.Prefix(4), "tokens": 3}, False),
            further({"mask": masks.Prefix(4) | masks.Sliding(1, 0), "tokens": 2}, True),
            further({"tree_mask": [[True, False, False]] * 3, "tokens": 3}, True),
            ({"tree_mask": [[False, True, True]] * 3, "tokens": 3}, False),
            further({"tree_mask": [[False]], "tokens": 1}, True),
        ],
    )
    def test_nan_is_misuse_where_a_mask_shows_it(self, options, misused):
        cache, given = self.cache(KV, (0, 0, 0, 3)), dict(options)  # position 4 of 7
        if "tree_mask" in given:
            given["tree_mask"] = jnp.asarray([given["tree_mask"]] * 2)
        check = jaxkv.checked(lambda cache: decode_kv(layer=1, cache=cache, **given))
        if misused:
            with pytest.raises(ValueError, match=re.escape("`cache`[0, 4] is 0: the entry at this slot")):
                check(cache)
        else:
            check(cache)

    def test_blocks_that_a_mask_does_not_show_may_be_gone(self):
        tables = [[-1, 0], [1, 3]]
        jaxkv.checked(lambda cache: decode_kv(tables, cache=cache, layer=1, mask=masks.Chunked(4)))(self.cache(KV))
        with pytest.raises(ValueError, match=re.escape("`block_tables`[0, 0] is -1")):
            jaxkv.checked(lambda cache: decode_kv(tables, cache=cache, layer=1, mask=masks.Chunked(8)))(self.cache(KV))

    def test_blocks_before_the_window_may_be_gone(self):
        tables = [[-1, 0], [1, 3]]
        jaxkv.checked(lambda cache: decode_kv(tables, layer=1, cache=cache, window=3))(self.cache(KV))
        with pytest.raises(ValueError, match=re.escape("`block_tables`[0, 0] is -1")):
            jaxkv.checked(lambda cache: decode_kv(tables, layer=1, cache=cache, window=4))(self.cache(KV))

    def test_nan_in_a_chosen_slot(self):
        check = jaxkv.checked(lambda cache, slots: decode_mla_sparse(slots, layer=1, cache=cache))
        cache = self.cache(MLA, (0, 0, 2, 5))
        check(cache, ints([[16, 0, 1], [4, -1, 6]]))  # NaN in slot 2, which is not chosen
        with pytest.raises(ValueError, match=re.escape("`cache`[0, 0, 1] is 2: the entry at this slot")):
            check(cache, ints([[16, 2, 1], [4, -1, 6]]))

    @pytest.mark.parametrize("poison", [2**31 - 1, -1, -(2**31), 6])
    @pytest.mark.parametrize("operation", [decode_mla, decode_kv, indexer_logits], ids=lambda each: each.__name__)
    def test_unused_table_entries_may_hold_anything(self, operation, poison):
        tables = [[4, 0, poison], [1, poison, poison], [poison] * 3]
        if operation is indexer_logits:
            tables = tables[:2]
        jaxkv.checked(lambda: operation(tables, [*LENGTHS, 0][: len(tables)]))()

    def test_slots_past_the_count_may_be_anything(self):
        slots = [[0, 24, 2**31 - 1], [99, 24, -7]]
        jaxkv.checked(lambda: decode_mla_sparse(slots, counts=[1, 0]))()

    def test_blocks_past_the_last_position_of_the_result_may_be_anything(self):
        tables = [[4, 0, 6], [1, 3, 2**31 - 1]]  # positions 8 to 11, of which the result has none
        jaxkv.checked(lambda: indexer_logits(tables, [12, 12]))()

    def test_tables_before_and_after_a_gathered_run_may_hold_anything(self):
        jaxkv.checked(lambda: gather_mla([[-1, 0], [1, 2**31 - 1]], (0, 4, 7), starts=[4, 1], total=7))()

    def test_skipped_slots_may_repeat(self):
        jaxkv.checked(lambda: write_mla([-1, -1, 5, -(2**31), -(2**31)]))()


@pytest.mark.parametrize("operation", [write_mla, write_kv, write_indexer_k], ids=lambda operation: operation.__name__)
def test_no_tokens_are_no_misuse(operation):
    jaxkv.checked(lambda: operation(slots=[]))()


def test_no_blocks_are_no_misuse():
    jaxkv.checked(lambda: (copy_blocks([], []), read_blocks([]), write_blocks([])))()


@pytest.mark.parametrize("unused", [-(2**31), -1, 0, 5, 2**31 - 1])
def test_page_tables_of_empty_requests_are_no_misuse(unused):
    """Whatever the tokens of their last block are, and the ids past the last sum."""
    tables, lengths = jaxkv.checked(block_tables_from_csr)(
        last_page_len=(4, unused, 1), indices=(4, 0, 1, 3, 2, unused)
    )
    assert tables.tolist() == [[4, 0, -1], [-1] * 3, [1, 3, 2]]
    assert lengths.tolist() == [8, 0, 9]


def test_pairs_without_a_copy_are_no_misuse():
    jaxkv.checked(lambda: copy_blocks([-1, 0, 9, -1], [-1, 2, -1, -(2**31)]))()


def test_requests_without_tokens_may_hold_anything():
    """In their tables, lengths and first positions."""
    garbage, most = [2**31 - 1, -7], 2**31 - 1
    tables, sums = ints([[1, 0], garbage, garbage, [2, 3]]), ints([0, 5, 5, 5, 7])
    cache, q = jaxkv.KVCache.zeros(MLA), [jnp.ones((7, 2, n), jnp.float32) for n in MLA.entry.sizes]

    @jaxkv.checked
    def call(cache):
        kv_c, _ = jaxkv.gather_mla(cache, tables, sums, layer=0, total=7, seq_starts=ints([3, most, -1, 0]))
        lengths = ints([8, most, -1, 2])
        return kv_c, jaxkv.decode_mla(*q, cache, tables, lengths, layer=0, scale=1.0, cu_q_lens=sums)

    kv_c, out = call(cache)
    assert (kv_c.shape, out.shape) == ((7, 8), (7, 2, 8))
