"""The fuzzer: a few calls of every operation, and what it says of kernels that are wrong, raise or hang."""

import itertools
import re
import time
from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import dispatch
from jaxkv.cli import main
from jaxkv.testing import families, fuzz, random_layouts
from jaxkv.testing.attention import MASKS, Plan
from jaxkv.testing.buffers import address_map
from jaxkv.testing.compare import EPSILON, differ, excess
from jaxkv_kernels.addressing import slots_for
from jaxkv_kernels.calls import Kernels, supports
from jaxkv_kernels.formats import FORMATS
from jaxkv_kernels.xla.kernels import XLA
from support import kernels, scenes
from support.available import assume_available
from support.cases import further, slow
from support.compare import assert_close


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Few calls a case, on small caches."""
    monkeypatch.setattr(fuzz, "CALLS_PER_CASE", 6)
    monkeypatch.setattr(random_layouts, "MOST_BYTES", 2**21)


@pytest.fixture
def broken(monkeypatch):
    """f(operation=fault): adds an implementation whose only kernels are `fault(xla's kernel)`, of a call's fields."""

    def add(**faults):
        def method(operation, fault):
            run = fault(partial(kernels.run, XLA(), operation))
            return supports()(
                lambda self, call: run(**{field.name: getattr(call, field.name) for field in fields(call)})
            )

        methods = {operation: method(operation, fault) for operation, fault in faults.items()}
        broken = dispatch.Backend("broken", "none", type("Broken", (Kernels,), methods), list)
        monkeypatch.setattr(dispatch, "BACKENDS", (*dispatch.BACKENDS, broken))

    return add


@pytest.mark.slow  # `jaxkv verify` is a step of .ci/run
@pytest.mark.parametrize("operation", families.OPERATIONS)
def test_xla_is_right(operation, capsys):
    seed = families.OPERATIONS.index(operation)
    assert fuzz.fuzz(calls=5, seed=seed, implementation="xla") == 0
    line, last = capsys.readouterr().out.splitlines()
    assert re.match(rf"seed {seed}: 5 calls ok, \d+ per second: {operation} ", line)
    assert re.match(r"5 calls of xla on .*: 0 wrong", last)


@pytest.mark.ci
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_planned_attention_is_supported_where_the_plan_is(implementation, monkeypatch):
    assume_available(monkeypatch, implementation)
    dtypes = set()
    for number in range(8):
        seed = families.OPERATIONS.index("plan_decode") + number * len(families.OPERATIONS)
        case = families.draw_case(seed, implementation)
        assert isinstance(case, Plan), f"seed {seed}: {case}"
        draw = case.draw(np.random.default_rng(0))
        values = [jax.ShapeDtypeStruct(*value) for value in case.value_shapes]
        cache = scenes.shapes_of(case.layout)
        args, keywords = case.attention.arguments(cache, values, draw, draw.layer)
        reasons = jaxkv.explain(case.attention.function, *args, **keywords).reasons[implementation]
        assert not reasons, f"seed {seed}: {case}"
        dtypes.add((case.layout.entry.input_dtype, case.dtype))
    # Triton also supports queries of another dtype than the entries', and some cases have them.
    assert any(own != dtype for own, dtype in dtypes) == (implementation == "triton")


def packed_pages(kernel):
    """Addresses that are right in a packed cache only."""

    def run(*args, pages, **keywords):
        token = pages.width * pages.num_heads
        strides = {"token_stride": token, "head_stride": pages.width, "block_stride": token * pages.block_size}
        return kernel(*args, pages=replace(pages, **strides, layer_stride=0, offset=0), **keywords)

    return run


def one_token_more(kernel):
    """Attends to the token after the last."""
    return lambda *args, seq_lens, **keywords: kernel(*args, seq_lens=seq_lens + 1, **keywords)


def slightly_off(kernel):
    """Scores that are 2 % too large."""
    return lambda *args, scale, **keywords: kernel(*args, scale=1.02 * scale, **keywords)


def drops_a_request(kernel):
    """The rows of the last request are 0."""

    def run(*args, **keywords):
        out, lse = kernel(*args, **keywords)
        return out.at[-1].set(0), lse

    return run


def touches_a_neighbour(kernel):
    """Clears an element of the buffer that it should not write."""
    return lambda *args, **keywords: kernel(*args, **keywords).at[-1].set(0)


def writes_slot_0_for_none(kernel):
    """Takes skipped slots for slot 0."""

    def run(*args, slot_mapping, **keywords):
        return kernel(*args, slot_mapping=jnp.maximum(slot_mapping, 0), **keywords)

    return run


def ignores_where_runs_start(kernel):
    """Gathers from the first token."""
    return lambda *args, seq_starts, **keywords: kernel(*args, seq_starts=None, **keywords)


def copies_one_by_one(kernel):
    """Reads blocks that earlier pairs have written."""

    def run(buffer, src, dst, pages):
        for pair in range(src.size):
            buffer = kernel(buffer=buffer, src=src[pair : pair + 1], dst=dst[pair : pair + 1], pages=pages)
        return buffer

    return run


def selects_later_positions(kernel):
    """Takes the last of equal logits."""

    def select(logits, k, block_tables, block_size):
        found = kernel(logits=logits[..., ::-1], k=k, block_tables=None, block_size=None)
        positions = jnp.where(found < 0, -1, logits.shape[-1] - 1 - found)
        if block_tables is None:
            return positions
        return slots_for(block_tables, positions, block_size=block_size)

    return select


def counts_empty_parts(kernel):
    """Merges parts that have no keys."""
    return lambda outs, lses: kernel(outs=outs, lses=jnp.where(jnp.isfinite(lses), lses, 0))


FAULTS = [
    ("decode_mla", packed_pages),
    slow("decode_mla", one_token_more),
    further("decode_mla", slightly_off),
    slow("decode_kv", packed_pages),
    further("decode_kv", drops_a_request),
    further("indexer_logits", one_token_more),
    ("gather_mla", packed_pages),
    slow("gather_kv", ignores_where_runs_start),
    slow("write_mla", packed_pages),
    slow("write_kv", touches_a_neighbour),
    further("write_indexer_k", writes_slot_0_for_none),
    further("copy_blocks", copies_one_by_one),
    further("read_blocks", lambda kernel: lambda **arguments: -kernel(**arguments)),
    ("write_blocks", touches_a_neighbour),
    ("select_topk", selects_later_positions),
    further("merge_states", counts_empty_parts),
]


@pytest.mark.parametrize(("operation", "fault"), FAULTS)
def test_faults_are_found_and_repeat(operation, fault, broken, capsys):
    broken(**{operation: fault})
    first = families.OPERATIONS.index(operation)
    seeds = range(
        first, first + 5 * len(families.OPERATIONS), len(families.OPERATIONS)
    )  # not every layout shows every fault
    assert any(fuzz.fuzz(calls=6, seed=seed, implementation="broken") for seed in seeds)
    shown = capsys.readouterr().out
    assert "WRONG" in shown
    call, errors, again, calls = re.search(r"call (\d+): errors (.*) x tol.*--seed (\d+) --calls (\d+)", shown).groups()
    assert int(calls) == int(call) + 1
    assert fuzz.fuzz(calls=int(calls), seed=int(again), implementation="broken") > 0
    assert f"call {call}: errors {errors} x" in capsys.readouterr().out


def test_a_call_that_hangs_is_reported(broken, monkeypatch, capsys):
    def slow(kernel):
        def run(**arguments):
            def sleep(x):
                time.sleep(1.5)
                return x

            rows = kernel(**arguments)
            return jax.pure_callback(sleep, jax.ShapeDtypeStruct(rows.shape, rows.dtype), rows)

        return run

    broken(read_blocks=slow)
    codes = []
    monkeypatch.setattr(fuzz, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(fuzz.os, "_exit", codes.append)
    seed = families.OPERATIONS.index("read_blocks")
    fuzz.fuzz(calls=1, seed=seed, implementation="broken")
    assert codes == [3]
    assert f"HANGS, no answer in 0.5 s: seed {seed}, call 0: read_blocks " in capsys.readouterr().err


def test_a_case_that_does_not_compile_is_reported_and_the_next_one_runs(broken, capsys):
    def raises_once(kernel):
        made = []

        def run(**arguments):
            made.append(1)
            if len(made) == 1:
                raise ValueError("dimension 1 must be a multiple of 8")
            return kernel(**arguments)

        return run

    broken(read_blocks=raises_once)
    seed = families.OPERATIONS.index("read_blocks")
    assert fuzz.fuzz(calls=12, seed=seed, implementation="broken") == 1
    shown = capsys.readouterr().out
    assert f"seed {seed}: DOES NOT COMPILE, ValueError: dimension 1 must be a multiple of 8: read_blocks " in shown
    assert f"seed {seed + len(families.OPERATIONS)}: 6 calls ok" in shown


def test_a_call_that_raises_is_reported(broken):
    def raises(kernel):
        def run(**arguments):
            def fail(x):
                raise FloatingPointError("illegal address")

            rows = kernel(**arguments)
            return jax.pure_callback(fail, jax.ShapeDtypeStruct(rows.shape, rows.dtype), rows)

        return run

    broken(read_blocks=raises)
    seed = families.OPERATIONS.index("read_blocks")
    with pytest.raises(jax.errors.JaxRuntimeError, match="illegal address") as raised:
        fuzz.fuzz(calls=1, seed=seed, implementation="broken")
    assert f"seed {seed}, call 0: read_blocks" in raised.value.__notes__[-1]


def test_an_implementation_that_takes_nothing_ends_with_its_reasons(broken, capsys):
    broken()
    with pytest.raises(ValueError, match="nothing was checked: broken supports no call on this machine"):
        fuzz.fuzz(calls=3, seed=5, implementation="broken")
    shown = capsys.readouterr().out
    assert shown.count("not called") == len(families.OPERATIONS)
    assert "has no kernel for decode_kv" in shown


@pytest.mark.ci
def test_the_command(capsys):
    assert main(["verify", "--calls", "8", "--seed", "11"]) == 0
    shown = capsys.readouterr().out
    assert "seed 11: 6 calls ok" in shown
    assert "seed 12: 2 calls ok" in shown


@pytest.mark.parametrize("order", ["BLHNC", "LHBNC"])
def test_the_address_map_is_the_formula(order):
    entry = jaxkv.KVEntry("f16", head_dim=3, value_dim=2)
    sizes = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_heads": 2}
    layout = jaxkv.CacheLayout(**sizes, entry=entry, order=order, block_padding=6)
    found, steps = address_map(layout), layout.strides
    seen = np.full(layout.size, -1)
    for place, (layer, block, token, head, i) in enumerate(np.ndindex(2, 3, 4, 2, 5)):
        address = layer * steps.layer + block * steps.block + head * steps.head + token * steps.token + i
        assert found.layer[address] == layer
        assert found.place[address] == place % (3 * 4 * 2 * 5)
        assert found.block[address] == block
        seen[address] = block
    assert np.array_equal(seen >= 0, found.layer >= 0)
    for block in range(3):
        elements = np.flatnonzero(found.block == block)
        assert np.array_equal(found.blocks[block][found.place_in_block[elements]], elements)
        assert set(np.flatnonzero(seen == block)) <= set(elements)
    assert (found.block >= 0).all() == (order == "BLHNC"), "padding travels with blocks that are runs"


@pytest.mark.parametrize("scale", [0.5, 0.9, 1.1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("where", ["one element", "everywhere"])
def test_errors_are_counted_as_in_the_tests(scale, dtype, where):
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((5, 64)).astype(np.float32)
    expected[3] = -np.inf
    tolerance = 2048 * EPSILON[dtype]  # so large that the storing of `found` does not count
    step = np.where(np.isfinite(expected), scale * tolerance * (np.abs(expected) + 1), 0)
    if where == "everywhere":
        step = scale * tolerance / 2 * np.where(np.isfinite(expected), np.abs(expected), 0)
    else:
        step[np.arange(5)[:, None] * 64 + np.arange(64) != 70] = 0
    found = jnp.asarray(expected + step)
    error = float(excess(found, expected, roundings=2048, dtype=dtype, magnitude=1))
    assert error == pytest.approx(scale, rel=0.01)
    if scale > 1:
        with pytest.raises(AssertionError):
            assert_close(found, expected, roundings=2048, dtype=dtype, magnitude=1)
    else:
        assert_close(found, expected, roundings=2048, dtype=dtype, magnitude=1)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_belong_in_their_places(odd):
    plain = jnp.zeros(4)
    with_odd = plain.at[2].set(odd)
    options = {"roundings": 4, "dtype": "float32", "magnitude": 1}
    assert excess(with_odd, with_odd, **options) == 0
    assert excess(plain, with_odd, **options) == np.inf
    assert excess(with_odd, plain, **options) == np.inf
    assert excess(with_odd, -with_odd, **options) == (0 if np.isnan(odd) else np.inf)


def test_a_bit_is_a_difference():
    x = jnp.asarray([1.0, jnp.nan], jnp.bfloat16)
    assert differ(x, x) == 0
    assert differ(x, -x) == np.inf
    assert differ(jnp.zeros(2), -jnp.zeros(2)) == np.inf


@pytest.mark.ci
def test_draws_are_of_every_kind():
    drawn = [families.draw_case(seed, "xla") for seed in range(700)]
    layouts = [case.layout for case in drawn]
    assert {layout.order for layout in layouts if layout.num_heads > 1} == set(jaxkv.ORDERS)
    assert {layout.entry.format for layout in layouts} == FORMATS.keys() | {"state"}
    assert {True, False} == {layout.blocks_are_runs for layout in layouts}
    assert any(layout.strides.token > layout.num_heads * layout.width for layout in layouts if layout.order[0] == "B")
    assert any(layout.dtype != layout.entry.dtype for layout in layouts)
    assert any(layout.value_size is not None for layout in layouts), "keys and values in an array each"
    apart = [layout for layout in layouts if layout.value_offset is not None and layout.value_size is None]
    assert {layout.value_offset > layout.offset for layout in apart} == {True, False}, "values before and behind keys"
    assert any(layout.entry.quantised for layout in apart)
    assert any(layout.pages.value_distance is None for layout in apart), "strides of their own"
    extras = {name for case in drawn for name in case.extras}
    assert {"cos_sin", "extra", "sinks", "cu_q_lens", "queries in e4m3", "lengths", "return_max_logits"} <= extras
    assert {"scales per head", "scales per token", "lengths per query token", "prefix_tables", "tree_mask"} <= extras
    options = [dict(case.options) for case in drawn]
    windows = {(type(x["window"]), x["causal"]) for x in options if {"window", "causal"} <= x.keys()}
    assert {(int, True), (tuple, True), (tuple, False)} <= windows
    assert set(MASKS) <= {x.get("mask") for x in options}
    assert {"cu_q_lens", "tree_mask"} <= {name for case in drawn if "tree_mask" in case.extras for name in case.extras}
    assert {(512, 0), (64, 64), (64, 0)} <= {layout.entry.sizes for layout in layouts}
    seconds = [
        (case.layout.entry.format, dict(case.options)["extra"].entry.format) for case in drawn if "extra" in case.extras
    ]
    assert any(first != second for first, second in seconds)
    assert drawn[:20] == [families.draw_case(seed, "xla") for seed in range(20)]

    attention = next(
        case
        for case in (families.draw_case(seed, "xla") for seed in itertools.count())
        if case.operation in ("decode_mla", "decode_kv")
        and case.columns == 5
        and case.requests < case.layout.num_blocks  # so that some blocks are not used
        and dict(case.options)["window"] is None
        and "prefix_tables" not in case.extras
    )
    calls = [attention.draw(np.random.default_rng([0, call])) for call in range(3000)]
    lengths = np.stack([call.index[1] for call in calls])
    size = attention.layout.block_size
    most = attention.columns * size
    assert {0, 1, size, most, most + 1, 2**31 - 1, -1, -(2**31)} <= set(lengths.ravel().tolist())
    layers = {int(call.layer) for call in calls}
    assert {*range(attention.layout.num_layers), -1, attention.layout.num_layers} <= layers
    tables = np.stack([call.index[0] for call in calls])
    used = np.arange(attention.columns) * size < np.clip(lengths, 0, most)[..., None]
    unknown = (tables < 0) | (tables >= attention.layout.num_blocks)
    assert (unknown & used).any(), "blocks that the cache does not have, among those that are read"
    assert unknown[~used].mean() > 0.5
    assert 0.1 < np.mean([call.live.mean() for call in calls]) < 0.9


def test_weights_of_experts_sum_to_1():
    seed = families.OPERATIONS.index("grouped_swiglu")
    for number in range(10):
        case = families.draw_case(seed + number * len(families.OPERATIONS), "xla")
        weights = case.draw(np.random.default_rng(number)).keywords["weights"]
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)  # some roundings of float32


@pytest.mark.ci
def test_sparse_attention_is_batch_invariant_where_it_is_supported(monkeypatch):
    assume_available(monkeypatch, "mosaic_gpu")
    seeds = range(
        families.OPERATIONS.index("decode_mla_sparse"), 12 * len(families.OPERATIONS), len(families.OPERATIONS)
    )
    assert {"batch_invariant" in families.draw_case(seed, "mosaic_gpu").extras for seed in seeds} == {False, True}
    assert not any("batch_invariant" in families.draw_case(seed, "xla").extras for seed in seeds)
