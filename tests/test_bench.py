import argparse
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkv.cli import bench, timing
from jaxkv.cli.workloads import OPERATIONS, WORKLOADS, Workload

CPU = {workload.operation: workload for workload in WORKLOADS.values() if workload.suite == "cpu"}
CEILINGS = timing.Ceilings(4.5e12, 4e12, 8e14)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timing, "CHAIN_SECONDS", 1e-5)
    monkeypatch.setattr(bench, "measure_ceilings", lambda device, *, repeats: CEILINGS)


def bench_args(*arguments):
    parser = argparse.ArgumentParser(prog="jaxkv bench")
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_peers_are_the_recorded_rows():
    sizes = "128x128x1x4096 128x128x1x16384 128x128x2x4096 128x64x1x4096 64x16x1x4096 128x16x1x8192 1x128x1x65536 "
    sizes += "1x16x1x65536 8x128x1x16384 1x128x1x4096 1x16x1x4096 64x128x1x4096 128x128x1x8192v 128x16x1x8192v"
    names = [name for name, workload in WORKLOADS.items() if workload.suite == "peers"]
    assert names == [f"decode_mla-{size}-{layers}" for layers in (1, 61) for size in sizes.split()]


def test_every_operation_has_a_shape_for_cpus_and_one_for_gpus():
    assert set(CPU) == set(OPERATIONS)
    assert {w.operation for w in WORKLOADS.values() if w.suite != "cpu"} == set(OPERATIONS)


def test_decoding_moves_the_cache_once_and_queries_and_results():
    workload = WORKLOADS["decode_mla-128x128x2x4096-61"]
    rows = 128 * 128 * 2
    assert workload.flops == 2 * rows * 4096 * (576 + 512)
    assert workload.traffic == 128 * 4096 * 1152 + rows * (576 + 512) * 2


def test_sparse_decoding_moves_chosen_entries_only():
    workload = WORKLOADS["decode_mla_sparse-128x128x1x8192-61"]
    assert workload.flops == 2 * 128 * 128 * 2048 * (576 + 512)
    assert workload.traffic == 128 * 2048 * 656 + 128 * 128 * (576 + 512) * 2


@pytest.mark.parametrize(
    ("name", "traffic"),
    [
        ("write_mla-128x1-61", 2 * 128 * 1152),
        ("gather_kv-8x1024-61", 2 * 8192 * 8 * 512),
        ("write_indexer_k-8x1024-61", 8192 * (256 + 132)),
        ("copy_blocks-1x4096-61", 2 * 64 * 61 * 64 * 1152),
        ("read_blocks-1x4096-61", 2 * 64 * 61 * 64 * 1152),
    ],
)
def test_copies_count_bytes_read_and_written(name, traffic):
    assert WORKLOADS[name].traffic == traffic
    assert WORKLOADS[name].flops == 0


def test_lengths_vary_and_repeat():
    workload = WORKLOADS["decode_mla-128x128x1x8192v-61"]
    lengths = workload.lengths
    assert lengths.min() >= 1
    assert lengths.max() <= 8192
    assert len(set(lengths.tolist())) > 64
    np.testing.assert_array_equal(lengths, WORKLOADS["decode_mla-128x16x1x8192v-1"].lengths)


def test_layers_that_do_not_fit_are_left_out():
    workload = WORKLOADS["decode_mla-128x128x1x16384-61"]
    a_layer = 128 * 16384 * 1152
    assert workload.fitted(26 * a_layer).layout.nbytes == 26 * a_layer
    assert workload.fitted(27 * a_layer - 1).layers == 26
    assert workload.fitted(0).layers == 1
    assert workload.fitted(10**12) == workload


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.usefixtures("quick")
def test_every_operation_is_timed(operation):
    workload = CPU[operation]
    small = replace(workload, tokens=128, layers=2, chosen=min(workload.chosen, 64))
    chosen, found = timing.time_workload(small, implementation="xla", repeats=2)
    assert chosen == "xla"
    assert 0 < found.least <= found.median <= found.most
    assert found.compile > 0


def test_caches_are_filled_where_calls_read():
    workload = Workload(suite="", operation="decode_mla", requests=2, tokens=100, layers=3)
    cache = timing._filled(workload, workload.layout)
    layers = cache.buffer.reshape(4, 3, 64, 576).astype(jnp.float32)
    assert (layers[:, 1] != 0).mean() > 0.99
    assert layers.std() == pytest.approx(3**-0.5, rel=0.05)
    assert not layers[:, [0, 2]].any()


def test_a_chain_makes_all_its_calls(monkeypatch):
    monkeypatch.setattr(timing, "CHAIN_SECONDS", 2e-3)
    made = []

    def counted(x):
        made.append(1)
        return np.float32(x + 1)

    def step(i, carry, fixed):
        x, _ = carry
        return lax.optimization_barrier((x, jax.pure_callback(counted, jax.ShapeDtypeStruct((), jnp.float32), x)))

    found = timing.time_calls(step, (jnp.float32(1), jnp.float32(0)), (), repeats=3)
    assert found.calls > 1
    assert len(made) > 3 * found.calls


@pytest.mark.usefixtures("quick")
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "bench.json"
    names = ["write_indexer_k-2x4096-4", "indexer_logits-2x16x1x4096-4"]
    assert (
        bench.run(bench_args("--shape", *names, "--implementation", "xla", "--repeats", "2", "--json", str(file))) == 0
    )
    out, err = capsys.readouterr()
    header, ceilings, _, headings, *lines = out.splitlines()
    assert header.startswith(jax.devices()[0].device_kind)
    assert "4500.0 GB/s" in ceilings
    assert "limit/ms" in headings
    assert {line.split()[0] for line in lines} == set(names)
    assert {len(line) for line in lines} == {len(headings)}
    assert len(err.splitlines()) == 2
    told = json.loads(file.read_text())
    assert told["ceilings"] == {"read": 4.5e12, "copy": 4e12, "matmul": 8e14}
    row = next(row for row in told["rows"] if row["shape"] == names[1])
    assert row["layers"] == 4
    assert row["implementation"] == "xla"
    assert row["fraction"] == pytest.approx(row["limit_ms"] / row["ms"])
    assert row["limit_ms"] == pytest.approx(WORKLOADS[names[1]].traffic / 4.5e12 * 1e3)


@pytest.mark.usefixtures("quick")
def test_a_refused_shape_shows_its_reason(monkeypatch, capsys):
    def refuse(workload, *, implementation, repeats):
        raise NotImplementedError("write_kv: no implementation asked for takes this call (other: 3 heads)")

    monkeypatch.setattr(bench, "time_workload", refuse)
    assert bench.run(bench_args("write_kv", "--suite", "cpu")) == 0
    assert "not run: write_kv: no implementation asked for takes this call (other: 3 heads)" in capsys.readouterr().out


def test_the_table_is_at_most_140_columns(monkeypatch):
    slow = timing.Timing(0.0123, 0.0122, 0.0257, 160, 12.3)
    monkeypatch.setattr(bench, "time_workload", lambda *args, **options: ("mosaic_gpu", slow))
    device, args = jax.devices()[0], bench_args()
    table = bench._table([bench._row(workload, args, device, CEILINGS) for workload in WORKLOADS.values()])
    assert max(map(len, table.splitlines())) <= 140


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (["decode"], "decode_mla_sparse"),
        (["--suite", "best"], "peers"),
        (["--shape", "decode_mla"], "decode_mla-128x128x1x4096-61"),
        (["--implementation", "fast"], "xla"),
        (["--repeats", "0"], "positive"),
        (["--json", "no/such/folder/x.json"], "folder"),
    ],
)
def test_misuse_is_told_with_what_exists(arguments, listed, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_args(*arguments)
    assert stopped.value.code == 2
    assert listed in capsys.readouterr().err.splitlines()[-1]


def test_no_shape_in_common_is_told(capsys):
    assert bench.run(bench_args("decode_kv", "--suite", "peers")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "decode_kv --suite peers" in line
    assert "decode_kv-64x64x1x4096-61" in line


def test_ceilings_are_measured(monkeypatch):
    timed = []

    def time_calls(step, carry, fixed, *, repeats):
        jax.jit(step).lower(jnp.int32(0), carry, fixed)
        timed.append(repeats)
        return timing.Timing(0.5, 0.5, 0.5, 1, 1.0)

    monkeypatch.setattr(timing, "time_calls", time_calls)
    ceilings = timing.measure_ceilings(jax.devices("cpu")[0], repeats=7)
    assert ceilings == timing.Ceilings(read=2.0**29, copy=2.0**30, matmul=2.0**32)
    assert timed == [7, 7, 7]
    assert ceilings.seconds(traffic=2**29, flops=0, copies=True) == 0.5
    assert ceilings.seconds(traffic=2**29, flops=2**33, copies=False) == 2
