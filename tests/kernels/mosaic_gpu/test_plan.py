"""The division of requests by XLA and by kernels: equal to the one that compares everything with everything."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels.mosaic_gpu import combine
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.mla_dense import MLADenseConfig
from jaxkv_kernels.mosaic_gpu.mla_dense_swap_ab import MLASwapABConfig
from jaxkv_kernels.mosaic_gpu.runtime.device import assumed_multiprocessors
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler import MOST_REQUESTS, PAIR_COSTS, SplitCosts, make_plan, plan_slots
from support import kernels, plans
from support.cases import further, slow
from support.compare import assert_same_bits
from support.hopper import kernel_operands, on_hopper, read_early

BLOCKS = 50
PAIRS = {"step": PAIR, "costs": MLADenseConfig().split_costs}
TILES = {"step": TILE, "costs": MLASwapABConfig().split_costs}
OTHER = {"window": 319, "tokens": 3}
INVARIANT = {"batch_invariant": True}
CASES = [
    (7, 3, 20, {**PAIRS, **OTHER}),
    (4, 5, 20, {**TILES, **INVARIANT}),
    (4, 8, 20, {**PAIRS, **OTHER, "ahead": 70, "trailing": True}),
    further((1, 20, 20, TILES)),
    further((5, 9, 7, PAIRS)),
    further((9, 20, 20, {**PAIRS, "tokens": 3})),
    further((7, 3, 20, {**TILES, **OTHER, **INVARIANT, "ahead": None, "trailing": True})),
    slow((40, 19, 5, {**TILES, **INVARIANT})),
    slow((9, 62, 20, {**TILES, **OTHER, "ahead": 1})),
    slow((1, 132, 64, TILES)),
    slow((9, 62, 20, {**PAIRS, **OTHER, "ahead": 70, "trailing": True})),
    slow((3, 4, 600, PAIRS)),
    slow((300, 44, 16, {**PAIRS, "tokens": 3, "ahead": 1, "trailing": True})),
    slow((600, 63, 5, TILES)),
    slow((128, 132, 64, TILES)),
    slow((128, 66, 64, PAIRS)),
    slow((300, 44, 16, {**PAIRS, **OTHER})),
    slow((300, 132, 9, {**TILES, **OTHER})),
    slow((129, 66, 20, {**PAIRS, **OTHER, **INVARIANT})),
    slow((200, 1, 9, PAIRS)),
]
"""Requests, partitions, columns of the block tables, options; `trailing`: with tokens after the query tokens."""


def arguments(batch, columns, seed):
    """Random lengths and tables; some lengths are outside the tables, and some blocks outside the cache.

    Half of the lengths are around the ends of steps, where query tokens lie in two steps.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(-3, 64 * columns + 100, batch) * (rng.random(batch) > 0.2)
    around = lengths // PAIR * PAIR + rng.integers(-1, 3, batch)
    lengths = np.where(rng.random(batch) < 0.5, around, lengths)
    tables = rng.integers(0, BLOCKS, (batch, columns))
    if seed % 2:
        outside = rng.random(tables.shape) < 0.03
        tables[outside] = rng.choice([-1, BLOCKS, 2**31 - 1, -(2**31)], outside.sum())
    return jnp.asarray(lengths, jnp.int32), jnp.asarray(tables, jnp.int32)


def check(case, seeds, **how):
    """Compares all that a plan holds."""
    batch, partitions, columns, options = case
    options = {"tokens": 1, "block_size": 64, "partitions": partitions, **options}
    has_trailing = options.pop("trailing", False)
    for seed in seeds:
        given = arguments(batch, columns, seed)
        if has_trailing:
            given += (jnp.asarray(np.random.default_rng(seed).integers(0, 200, batch), jnp.int32),)
        known = None if seed % 4 == 2 else BLOCKS
        found = make_plan(*given, **options, **how, num_blocks=known)
        expected = plans.make_plan(*given, **options, num_blocks=BLOCKS)
        for name in ("partitions", "work_tiles", "split_requests"):
            assert_same_bits(getattr(found, name), getattr(expected, name))
        assert found.max_splits == max(expected.max_splits, combine.WARPS)


@pytest.mark.parametrize("case", CASES)
def test_by_xla(case):
    check(case, range(4))


@pytest.mark.parametrize("case", CASES)
def test_by_kernels_interpreted(case):
    check(case, [1, 2], by_kernel=True, interpret=True)


COSTS = {
    "pairs": (PAIR, SplitCosts(least=1, overhead=2, combining=256, split=16)),
    "one row tile": (PAIR, SplitCosts(least=1, overhead=1, combining=256, split=4)),
    "shared": (PAIR, SplitCosts(least=1, overhead=8, combining=2048, split=32)),
    "tiles": (TILE, SplitCosts(least=2, overhead=0, combining=128, split=2)),
    "quantised": (TILE, SplitCosts(least=4, overhead=0, combining=128, split=2)),
}
RECORDED = [
    (4, 57, 1500, "pairs", {}, 4162554668),
    further(100, 66, 500, "pairs", {"batch_invariant": True}, 2587958764),
    further(35, 66, 300, "shared", {}, 197343515),
    further(300, 16, 90, "pairs", {"tokens": 3, "window": 319}, 737869034),
    slow(1, 132, 1024, "tiles", {}, 3282126784),
    slow(128, 66, 64, "pairs", {}, 3749346270),
    slow(64, 132, 200, "quantised", {}, 1595496276),
    slow(66, 66, 64, "one row tile", {"tokens": 2, "ahead": None}, 1481744846),
    slow(133, 132, 40, "tiles", {"window": 100, "ahead": 70}, 2453236243),
    slow(256, 4, 30, "pairs", {}, 2446419246),
    slow(31, 1, 30, "quantised", {}, 52159227),
    slow(2, 132, 1500, "tiles", {"batch_invariant": True, "window": 4096}, 352853330),
]
"""Requests, partitions, columns, costs, options; a checksum of the plan that the first version of jaxkv made."""


@pytest.mark.parametrize(("batch", "partitions", "columns", "costs", "options", "expected"), RECORDED)
def test_plans_are_those_recorded(batch, partitions, columns, costs, options, expected):
    step, costs = COSTS[costs]
    options = {"tokens": 1, "block_size": 64, "num_blocks": BLOCKS, "step": step, "costs": costs, **options}
    plan = make_plan(*arguments(batch, columns, seed=batch), partitions=partitions, **options)
    tables = plan.partitions, plan.work_tiles, plan.split_requests
    assert zlib.crc32(b"".join(np.asarray(table).tobytes() for table in tables)) == expected


@on_hopper
@pytest.mark.parametrize("case", CASES)
def test_by_kernels(case):
    check(case, range(8), by_kernel=True)


def lowered(batch, columns):
    """A traced plan, and its text."""
    shape = jax.ShapeDtypeStruct
    options = {"tokens": 1, "block_size": 64, "num_blocks": BLOCKS, "partitions": 132, "by_kernel": True, **TILES}
    traced = make_plan.trace(shape((batch,), jnp.int32), shape((batch, columns), jnp.int32), **options)
    return traced, traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("batch", "partitions"), [(1, 1), (1, 2), (2, 1), (7, 3)])
def test_results_have_room_for_the_splits_that_combine_loads_at_once(batch, partitions):
    tables, lengths = jnp.zeros((batch, 4), jnp.int32), jnp.ones(batch, jnp.int32)
    sizes = {"tokens": 1, "block_size": 64, "partitions": partitions, "by_kernel": False}
    plan = make_plan(lengths, tables, num_blocks=BLOCKS, **TILES, **sizes)
    assert plan.max_splits == max(min(batch + partitions, 2 * partitions), combine.WARPS)


def test_two_kernels_compute_it():
    traced, text = lowered(128, 64)
    compare, divide = kernel_operands(text)
    assert read_early(traced.jaxpr) == [[], []]
    assert divide[0] == compare[0]  # the lengths
    assert not set(divide[1:]) & set(compare)
    assert "stablehlo.reduce" not in text


def test_a_batch_that_the_kernels_have_no_room_for_is_divided_by_xla():
    _, text = lowered(MOST_REQUESTS + 1, 4)
    assert not kernel_operands(text)


MULTIPROCESSORS = [132, 114, 78]
"""Of an H100 SXM, an H100 PCIe and an H20."""


@pytest.mark.parametrize("count", MULTIPROCESSORS)
@pytest.mark.parametrize("heads", [16, 64, 128, 3 * 64, 200 * 64])
def test_partitions_of_query_tokens_fill_the_gpu(count, heads):
    counts = jax.ShapeDtypeStruct((5,), jnp.int32)
    with assumed_multiprocessors(count):
        options = {"size": 512, "heads": heads, "costs": PAIR_COSTS, "batch_invariant": False}
        plan = jax.eval_shape(lambda counts: plan_slots(counts, **options), counts)
    assert plan.num_partitions == max(count // -(-heads // 64), 1)
    assert plan.work_tiles.shape[0] == 5 + plan.num_partitions


@pytest.mark.parametrize("count", MULTIPROCESSORS)
@pytest.mark.parametrize(
    ("entry", "kv_heads", "heads", "requests", "ctas"),
    [
        (jaxkv.MLAEntry("bf16"), 1, 16, 4, 1),
        (jaxkv.MLAEntry("bf16"), 1, 128, 4, 2),
        (jaxkv.MLAEntry.typical("fp8_ds_mla"), 1, 128, 4, 2),
        (jaxkv.KVEntry("bf16"), 8, 64, 4, 8),
        (jaxkv.MLAEntry("bf16"), 1, 64, 35, 2),  # two CTAs share the keys of a request
    ],
)
def test_partitions_of_requests_fill_the_gpu(entry, kv_heads, heads, requests, ctas, count):
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=BLOCKS, block_size=64, num_heads=kv_heads, entry=entry)
    shape = jax.ShapeDtypeStruct
    arrays = {
        "buffer": shape((layout.size,), layout.dtype),
        "block_tables": shape((requests, 12), jnp.int32),
        "seq_lens": shape((requests,), jnp.int32),
    }
    options = {"heads": heads, "q_len": 1, "window": None, "ahead": 0, "batch_invariant": False}
    options |= {"trailing": None, "tree": None, "mask": None}
    options["dtype"] = entry.input_dtype

    def plan_decode(arrays):
        return kernels.run(MosaicGPU(), "plan_decode", **arrays, **options, pages=layout.pages, entry=entry)

    with assumed_multiprocessors(count):
        plan = jax.eval_shape(plan_decode, arrays)
    assert plan.num_partitions == count // ctas
    assert plan.shared == (requests == 35)
