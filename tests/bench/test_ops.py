import argparse
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkv
from jaxkv import dispatch
from jaxkv.bench import ops, timing
from jaxkv.bench import workload as workload_module
from jaxkv.bench.inputs import PATTERN_BLOCKS, arguments, filled, inputs
from jaxkv.bench.kernel_times import KernelTimes
from jaxkv.bench.program import Measured, Program
from jaxkv.bench.suites import WORKLOADS
from jaxkv.bench.workload import workload
from jaxkv_kernels.mosaic_gpu.runtime import stamp
from jaxkv_kernels.xla.kernels import XLA
from support.cases import further, slow
from support.hopper import kernel_operands, read_early

CPU = {workload.operation: workload for workload in WORKLOADS.values() if workload.suite == "cpu"}
CEILINGS = timing.Ceilings(4.5e12, 4e12, 8e14)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timing, "CPU_SECONDS", 1e-3)
    monkeypatch.setattr(ops, "measure_ceilings", lambda device, *, repeats: CEILINGS)


def bench_args(*arguments):
    parser = argparse.ArgumentParser(prog="jaxkv bench ops")
    ops.add_arguments(parser)
    return parser.parse_args(arguments, argparse.Namespace(argv=["bench", "ops", *arguments]))


@pytest.mark.ci
@pytest.mark.parametrize("name", ["decode_mla-128x16x1x8192-1-fp8", "decode_kv-64x64x1x4096-61-fp8"])
def test_shapes_of_fp8_entries_can_be_called(name):
    workload = replace(WORKLOADS[name], requests=2, tokens=100, layers=2)
    assert workload.entry.nbytes == sum(workload.entry.sizes)
    cache, (varying, shared) = filled(workload), inputs(workload)
    args, options = arguments(workload, cache, varying, shared, 1)
    out = getattr(jaxkv, workload.operation)(*args, **options, implementation="xla")
    assert 0 < np.abs(np.asarray(out, np.float32)).max() < 5


@pytest.mark.ci
@pytest.mark.parametrize("blocks", ["packed", "padded"])
@pytest.mark.parametrize("operation", ["decode_mla", "decode_mla_sparse", "indexer_logits"])
def test_blocks_with_other_contents_are_filled_and_read(operation, blocks):
    small = replace(CPU[operation], requests=2, tokens=100, layers=2, chosen=64, varlen="", blocks=blocks)
    cache = filled(small)
    assert cache.layout == small.layout
    assert cache.layout.strides.block > 2 * 64 * cache.layout.width
    assert cache.buffer.size == small.layout.size
    args, options = arguments(small, cache, *inputs(small), 1)
    out = getattr(jaxkv, operation)(*args, **options, implementation="xla")
    assert 0 < np.abs(np.asarray(out, np.float32)).max() < np.inf


@pytest.mark.parametrize("operation", ["write_mla", "gather_mla"])
@pytest.mark.usefixtures("quick")
def test_cold_calls_use_other_values_and_results(operation, monkeypatch):
    monkeypatch.setattr(workload_module, "COLD_NBYTES", 3 * 2 * 128 * 576 * 2)
    small = replace(CPU[operation], tokens=128, layers=2, cold=True)
    assert small.sets == 3
    program = Program(small, implementation="xla").compile()
    calls = [(each.values, layer) for each, layer in program._turn(program._varying, 7)]
    assert [int(layer) for _, layer in calls] == [0, 1, 0]
    if operation == "write_mla":
        assert len({np.asarray(values[0]).tobytes() for values, _ in calls}) == 3
    else:
        assert len(program._outs) == 3
    assert program.measure(repeats=2).timing.calls % 3 == 0


TIMED = (
    "write_mla",
    "gather_kv",
    "decode_mla",
    "decode_kv",
    "copy_blocks",
    "merge_states",
    "select_topk",
    "scaled_linear",
)
"""One of each kind of arguments and results."""


@pytest.mark.parametrize("operation", [name if name in TIMED else slow(name) for name in CPU if name != "plan_decode"])
@pytest.mark.usefixtures("quick")
def test_every_operation_is_timed(operation):
    workload = CPU[operation]
    small = replace(workload, tokens=128, layers=2, chosen=min(workload.chosen, 64))
    found = Program(small, implementation="xla").compile().measure(repeats=2)
    assert found.implementation == "xla"
    assert 0 < found.timing.least <= found.timing.median <= found.timing.most
    assert found.compile > 0
    if jax.default_backend() == "cpu":
        assert found.kernels is None, "there is no CUPTI here"


@pytest.mark.usefixtures("quick")
def test_plans_are_made_by_kernels_that_are_not_plain_jax(monkeypatch):
    monkeypatch.setattr(XLA, "transformable", False)  # as those of GPUs are, which take no descriptions of arrays
    small = replace(CPU["decode_mla"], tokens=128, layers=2)
    assert small.planned
    assert Program(small, implementation="xla").compile().measure(repeats=2).timing.least > 0


def test_a_call_that_computes_nothing_is_not_timed():
    with pytest.raises(NotImplementedError, match="plan_decode: xla has nothing to compute"):
        Program(CPU["plan_decode"], implementation="xla")


@pytest.mark.parametrize("layers", [further(1), 3])
@pytest.mark.parametrize("tokens", [100, (PATTERN_BLOCKS + 3) * 64])
def test_caches_are_full(layers, tokens):
    small = workload("decode_mla", suite="", requests=1, tokens=tokens, layers=layers)
    cache = filled(small)
    assert cache.layout == small.layout
    entries = np.asarray(cache.buffer.reshape(-1, layers, 64, 576).astype(jnp.float32))
    assert (entries != 0).mean() > 0.99
    assert entries.std() == pytest.approx(1, rel=0.05)
    first = entries[0]
    assert len({part.tobytes() for part in first}) == layers
    if len(entries) > PATTERN_BLOCKS:
        assert np.array_equal(entries[PATTERN_BLOCKS], first)


def test_quantised_entries_are_such_as_are_written():
    cache = filled(replace(CPU["indexer_logits"], tokens=128))
    keys = cache.layout.entry.head_dim * 64
    scales = np.asarray(cache.buffer).reshape(-1, 4, 64 * 132)[..., keys:].copy().view(np.float32)
    assert (scales > 0).all()
    assert (scales < 1).all()


class Clock:
    """Stands still but for sleep, calls that take a millisecond each, and half of one or 2 us whenever it is read."""

    def __init__(self):
        self.now, self.slept, self.calls = 0.0, [], []

    def perf_counter(self):
        self.now += 5e-4
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def call(self, i, x):
        self.calls.append(int(i))
        self.now += 1e-3
        return np.float32(x + 1)

    def stamp(self):
        self.now += STAMP
        return round(self.now * 1e9)


STAMP = 2e-6
"""Seconds that reading the device's clock takes."""


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def stamped(monkeypatch, read):
    """Has programs stamp the nanoseconds that `read()` gives, in 32 bits as a GPU does."""

    def low(after):
        return np.full(1, read(), np.int64).astype(np.int32)

    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    kernels = SimpleNamespace(stamp=lambda after: jax.pure_callback(low, shape, after))
    monkeypatch.setattr(dispatch, "clock", lambda: kernels)


@pytest.fixture(params=[False, True], ids=["by host", "by device"])
def has_clock(request, monkeypatch, clock):
    """With stamps of the clock, as if this were a Hopper GPU, and without."""
    monkeypatch.setattr(timing, "has_clock", lambda: request.param)
    stamped(monkeypatch, clock.stamp)
    return request.param


@pytest.mark.parametrize("sustain", [False, True])
@pytest.mark.parametrize(
    "pace", [timing.Pace(0, 1, 0.01, 0, 0), timing.Pace(1, 3, 0.01, 0.01, 0.05)], ids=["cpu", "gpu"]
)
def test_a_chain_makes_all_its_calls(monkeypatch, clock, has_clock, pace, sustain):
    monkeypatch.setattr(timing, "pace", lambda backend, least: pace)

    def step(i, carry, fixed):
        x, _ = carry
        return lax.optimization_barrier((x, jax.pure_callback(clock.call, number, i, x + fixed)))

    number = jax.ShapeDtypeStruct((), jnp.float32)
    chain = timing.Chain(step, (number, number), number, least=1.0).compile()
    found = chain.time((jnp.float32(1), jnp.float32(0)), jnp.float32(2), repeats=3, sustain=sustain)
    assert found.calls > pace.calls
    assert found.calls % pace.calls == 0
    assert len(clock.calls) > 3 * found.calls
    assert len(clock.calls) % ((1 if has_clock else 4) * pace.ahead + pace.calls) == 0
    begins = np.flatnonzero(np.asarray(clock.calls) == 0)
    for counted in np.split(clock.calls, begins):
        assert counted.tolist() == list(range(len(counted)))
    # Seconds of a call, without rests and launches; a turn ends with a stamp.
    a_call = 1e-3 + (STAMP / pace.calls if has_clock else 0)
    assert [found.least, found.median, found.most] == pytest.approx([a_call] * 3)
    assert clock.slept == [pace.rest] * 3
    if sustain and pace.sustained:
        assert found.sustained == pytest.approx(a_call)
        assert len(clock.calls) > 3 * found.calls + 50
    else:
        assert found.sustained is None


@pytest.mark.usefixtures("has_clock")
def test_a_chain_that_takes_no_time_is_reported(monkeypatch):
    pace = timing.pace("gpu", 1e-4)
    monkeypatch.setattr(timing, "pace", lambda backend, least: pace)
    chain = timing.Chain(lambda i, carry, fixed: carry, jnp.float32(1), (), least=1.0).compile()
    with pytest.raises(RuntimeError, match="does a step depend on its carry"):
        chain.time(jnp.float32(1), (), repeats=1)


@pytest.mark.parametrize(("seconds", "by_host", "expected"), [(3, 3.1, 3), (5, 5.1, 5.1 * 3 / 4)])
def test_timestamps_restart(monkeypatch, seconds, by_host, expected):
    stamped(monkeypatch, iter([2**31 - 1, 2**31 - 1 + seconds * 10**9]).__next__)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=iter([7.0, 7.0 + by_host]).__next__))
    zero = jnp.int32(0)
    chain = timing.ByDevice(lambda i, carry, fixed: carry + 1, zero, (), ahead=1, calls=3)
    chain.compile()
    carry, found = chain.run(zero, (), 1)
    assert carry == 4
    assert found == pytest.approx(expected)


def test_a_gpu_s_clock_is_read_by_a_kernel_a_time():
    twice = jax.jit(lambda after: stamp.stamp(stamp.stamp(after))).trace(jax.ShapeDtypeStruct((1,), jnp.int32))
    assert len(kernel_operands(twice.lower(lowering_platforms=("cuda",)).as_text())) == 2
    assert read_early(twice.jaxpr) == [[], []]


def test_chains_on_gpus_are_of_32_to_1024_calls_and_a_few_and_of_fewer_long_calls():
    paces = [timing.pace("gpu", least) for least in (1.0, 1e-3, 1e-4, 1e-5, 1e-9)]
    assert [(pace.ahead, pace.calls) for pace in paces] == [(1, 1), (1, 6), (4, 32), (38, 300), (128, 1024)]
    assert timing.pace("cpu", 1e-9) == timing.Pace(ahead=0, calls=1, least=0.02, rest=0, sustained=0)


@pytest.mark.usefixtures("has_clock")
@pytest.mark.parametrize("operation", ["write_mla", "copy_blocks"])
def test_chains_write_in_place(operation):
    workload = replace(CPU[operation], tokens=128, layers=10)
    program = Program(workload, implementation="xla").compile()
    memory = program._chain._clocked.long.memory_analysis()
    assert memory.alias_size_in_bytes >= workload.layout.nbytes
    assert memory.temp_size_in_bytes < 0.6 * workload.layout.nbytes  # half of the blocks are read before any is written


@pytest.mark.ci
def test_a_write_without_a_chain_is_in_place_too():
    workload = replace(CPU["write_mla"], tokens=128, layers=10)
    program = Program(workload, implementation="xla")
    ref = jax.new_ref(filled(workload).buffer)
    before = np.asarray(ref[...]).view(np.uint16)
    args = (ref, program._varying, program._shared, jnp.int32(7))
    memory = jax.jit(program._write_once).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= workload.layout.nbytes
    assert memory.temp_size_in_bytes < workload.layout.nbytes / 2
    assert jax.jit(program._write_once)(*args)[0] == 7
    changed = (np.asarray(ref[...]).view(np.uint16) != before).reshape(-1, 10, 64 * 576).mean(axis=(0, 2))
    assert changed[7] > 0.9
    assert not changed[np.arange(10) != 7].any()


@pytest.mark.gpu(missing=() if jax.default_backend() == "gpu" else ("needs CUPTI, of an NVIDIA GPU",))
@pytest.mark.parametrize("name", ["decode_mla-1x16x1x4096-1", "write_mla-128x1-61"])
def test_kernels_take_less_than_the_call(name):
    found = Program(WORKLOADS[name], implementation=None).compile().measure(repeats=20)
    assert 0 < found.kernels.median <= 1.05 * found.timing.median
    assert sum(seconds for _, seconds in found.kernels.kernels) == pytest.approx(found.kernels.median, rel=0.1)


NAMES = ("write_indexer_k-2x4096-4", "indexer_logits-2x16x1x4096-4")


@pytest.mark.usefixtures("quick")
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "bench.json"
    options = ("--implementation", "xla", "--repeats", "2", "--json", str(file))
    assert ops.run(bench_args("--shape", *NAMES, *options)) == 0
    header, ceilings, _, headings, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith(jax.devices()[0].device_kind)
    assert "4500.0 GB/s" in ceilings
    assert "kernel ms" in headings
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert {len(line) for line in lines} == {len(headings)}
    recorded = json.loads(file.read_text())
    assert recorded["command"] == " ".join(["jaxkv", "bench", "ops", "--shape", *NAMES, *options])
    assert recorded["ceilings"] == {"read": 4.5e12, "copy": 4e12, "matmul": 8e14}
    row = recorded["rows"][1]
    assert row["layers"] == 4
    assert row["implementation"] == "xla"
    assert row["memory_fraction"] == pytest.approx(WORKLOADS[NAMES[1]].traffic / 4.5e9 / row["ms"])
    assert row["matmul_fraction"] == pytest.approx(WORKLOADS[NAMES[1]].flops / 8e11 / row["ms"])


class Stub:
    """A program that is ready at once, `ms` a call."""

    kernels = None

    def __init__(self, workload, *, implementation):
        self.ms = workload.layers

    def compile(self):
        return self

    def measure(self, *, repeats):
        seconds = 1e-3 * (2 + self.ms)
        spans = KernelTimes(seconds / 2, (("attend", seconds / 2),))
        return Measured("mosaic_gpu", timing.Timing(seconds, seconds, 2 * seconds, 160), spans, 12.3)


@pytest.mark.usefixtures("quick")
def test_rows_are_out_before_the_next_shape_is_timed(monkeypatch, tmp_path, capsys):
    file = tmp_path / "bench.json"

    class Interrupted(Stub):
        def measure(self, *, repeats):
            if self.ms == 4:
                raise KeyboardInterrupt
            return super().measure(repeats=repeats)

    monkeypatch.setattr(ops, "Program", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        ops.run(bench_args("decode_mla", "--suite", "cpu", "--json", str(file)))
    assert capsys.readouterr().out.splitlines()[-1].startswith("decode_mla-2x16x1x2048-1 ")
    assert [row["shape"] for row in json.loads(file.read_text())["rows"]] == ["decode_mla-2x16x1x2048-1"]


@pytest.mark.usefixtures("quick")
def test_the_cost_of_the_layout_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(ops, "Program", Stub)
    names = ["decode_mla-2x16x1x2048-1", "decode_mla-2x16x1x2048-4", "decode_mla-4x16x2x1024v-4"]
    assert ops.run(bench_args("--shape", *names)) == 0
    *_, heading, line = capsys.readouterr().out.splitlines()
    assert "packed" in heading
    assert line.split() == [names[1], "2.000,", "kernels", "2.000"]
    names = [f"decode_mla-64x16x1x4096-{which}" for which in ("1", "61", "61-packed", "61-padded", "1-fp8", "61-fp8")]
    assert ops.run(bench_args("--shape", *names)) == 0
    lines = capsys.readouterr().out.split("one packed layer:\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == [name for name in WORKLOADS if name in names and "-61" in name]


@pytest.mark.usefixtures("quick")
def test_a_rejected_shape_shows_its_reason(monkeypatch, capsys):
    def refuse(workload, *, implementation):
        raise NotImplementedError("write_kv: none of the requested implementations supports this call (other: 3 heads)")

    monkeypatch.setattr(ops, "Program", refuse)
    with pytest.raises(ValueError, match="nothing was timed: write_kv: none of the requested implementations supports"):
        ops.run(bench_args("write_kv", "--suite", "cpu"))
    assert (
        "not run: write_kv: none of the requested implementations supports this call (other: 3 heads)"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("quick")
def test_the_table_is_aligned_and_at_most_150_columns(monkeypatch, capsys):
    monkeypatch.setattr(ops, "Program", Stub)
    assert ops.run(bench_args("--shape", *WORKLOADS)) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert len(table) == len(WORKLOADS) + 1
    assert len({len(line) for line in table}) == 1
    assert len(table[0]) <= 150


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (["decode"], "decode_mla_sparse"),
        (["--suite", "best"], "peers"),
        (["--shape", "decode_mla"], "decode_mla-128x128x1x4096-61"),
        (["--implementation", "fast"], "xla"),
        (["--repeats", "0"], "'0' is not an integer from 1 to "),
        (["--json", "no/such/folder/x.json"], "folder"),
    ],
)
def test_misuse_is_reported_with_the_names_that_exist(arguments, listed, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_args(*arguments)
    assert stopped.value.code == 2
    assert listed in capsys.readouterr().err.splitlines()[-1]


def test_having_no_shape_in_common_is_reported(capsys):
    assert ops.run(bench_args("decode_kv", "--suite", "peers")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "decode_kv --suite peers" in line
    assert "decode_kv-64x64x1x4096-61" in line


def test_ceilings_are_measured(monkeypatch):
    timed = []

    class Chain(timing.Chain):
        def compile(self):
            return self

        def time(self, carry, fixed, *, repeats):
            timed.append(repeats)
            return timing.Timing(0.5, 0.5, 0.5, 1)

    monkeypatch.setattr(timing, "Chain", Chain)
    ceilings = timing.measure_ceilings(jax.devices("cpu")[0], repeats=7)
    assert ceilings == timing.Ceilings(read=2.0**29, copy=2.0**30, matmul=2.0**32)
    assert timed == [7, 7, 7]
