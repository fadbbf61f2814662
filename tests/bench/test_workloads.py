"""The shapes of the benchmark: their names, lengths, bytes and flops."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import jaxkv
from jaxkv.bench.inputs import arguments, filled, inputs
from jaxkv.bench.suites import SHAPES, WORKLOADS
from jaxkv.ops import OPERATIONS

CPU = {workload.operation: workload for workload in WORKLOADS.values() if workload.suite == "cpu"}


def test_peers_are_the_shapes_that_other_libraries_are_timed_on():
    sizes = "128x128x1x4096 128x128x1x16384 128x128x2x4096 128x64x1x4096 64x16x1x4096 128x16x1x8192 1x128x1x65536 "
    sizes += "1x16x1x65536 8x128x1x16384 1x128x1x4096 1x16x1x4096 64x128x1x4096 128x128x1x8192v 128x16x1x8192v "
    sizes += "4x16x4x45118t 64x16x1x1024u 64x16x4x1024u 64x128x1x1024u 64x128x4x1024u"
    peers = [workload for workload in WORKLOADS.values() if workload.suite == "peers"]
    dense = [w.name for w in peers if (w.operation, w.format, w.blocks) == ("decode_mla", "bf16", "plain")]
    assert dense == [f"decode_mla-{size}-{layers}" for layers in (1, 61) for size in sizes.split()]
    one_layer = Counter((w.operation, w.format, w.query_dtype) for w in peers if w.layers == 1)
    assert one_layer == {
        ("decode_mla", "bf16", "bfloat16"): 19,
        ("decode_mla", "fp8", "bfloat16"): 4,
        ("decode_mla", "fp8_ds_mla", "bfloat16"): 4,
        ("decode_mla_sparse", "fp8_ds_mla", "bfloat16"): 7,
        ("decode_mla_sparse", "bf16", "bfloat16"): 1,
        ("decode_mla_sparse", "fp8_v4", "bfloat16"): 2,
        ("indexer_logits", "indexer_fp8", "bfloat16"): 3,
        ("indexer_logits", "indexer_fp8", "float8_e4m3fn"): 3,
        ("select_topk", "bf16", "bfloat16"): 2,
        ("plan_decode", "bf16", "bfloat16"): 1,
    }


def test_names_are_of_one_shape_each():
    made = [workload for suite in SHAPES for workload in suite()]
    assert len({workload.name for workload in made}) == len(made) == len(WORKLOADS)


def test_every_operation_has_a_shape_for_cpus_and_one_for_gpus():
    declared = {operation.name for operation in OPERATIONS}
    assert set(CPU) == declared
    assert {w.operation for w in WORKLOADS.values() if w.suite != "cpu"} == declared


def test_decoding_moves_the_cache_once_and_queries_and_results():
    workload = WORKLOADS["decode_mla-128x128x2x4096-61"]
    rows = 128 * 128 * 2
    assert workload.flops == 2 * rows * 4096 * (576 + 512)
    assert workload.traffic == 128 * 4096 * 1152 + rows * (576 + 512) * 2


def test_sparse_decoding_moves_chosen_entries_only():
    workload = WORKLOADS["decode_mla_sparse-128x128x1x8192-61"]
    assert workload.flops == 2 * 128 * 128 * 2048 * (576 + 512)
    assert workload.traffic == 128 * 2048 * 656 + 128 * 128 * (576 + 512) * 2


def test_a_window_and_chosen_entries_are_two_lists():
    workload = WORKLOADS["decode_mla_sparse-64x128x1x32768-1-fp8_v4-w128"]
    assert workload.flops == 2 * 64 * 128 * 640 * (512 + 512)
    assert workload.traffic == 64 * 640 * 584 + 64 * 128 * (512 + 512) * 2
    small = replace(workload, requests=2, heads=2, tokens=700)
    varying, shared = inputs(small)
    (_, _, cache, window), options = arguments(small, filled(small), varying, shared, 0)
    assert (window.shape, options["extra"].slots.shape) == ((2, 1, 128), (2, 1, 512))
    assert cache is options["extra"].cache
    for chosen in np.concatenate([window, options["extra"].slots], axis=-1).reshape(2, -1):
        assert np.unique(chosen).size == 640


@pytest.mark.parametrize(
    ("name", "traffic"),
    [
        ("write_mla-128x1-61", 2 * 128 * 1152),
        ("write_mla-128x1-61-rotated", 128 * (2 * 1152 + 4 * 64)),
        ("gather_kv-8x1024-61", 2 * 8192 * 8 * 512),
        ("write_indexer_k-8x1024-61", 8192 * (256 + 132)),
        ("copy_blocks-1x4096-61", 2 * 64 * 61 * 64 * 1152),
        ("read_blocks-1x4096-61", 2 * 64 * 61 * 64 * 1152),
    ],
)
def test_copies_count_bytes_read_and_written(name, traffic):
    assert WORKLOADS[name].traffic == traffic
    assert WORKLOADS[name].flops == 0


def test_rotated_writes_pass_cosines_and_sines():
    small = replace(WORKLOADS["write_mla-8x1024-61-rotated"], requests=2, tokens=20, layers=2)
    (cache, *new, slots), options = arguments(small, filled(small), *inputs(small), 1)
    assert [x.shape for x in (*new, options["cos_sin"], slots)] == [(40, 512), (40, 64), (40, 64), (40,)]
    assert options["cos_sin"].dtype == "float32"
    written = jaxkv.write_mla(cache, *new, slots, **options, implementation="xla")
    assert (np.asarray(written.buffer) != np.asarray(cache.buffer)).any()


def test_lengths_vary_and_repeat():
    workload = WORKLOADS["decode_mla-128x128x1x8192v-61"]
    lengths = workload.lengths
    assert lengths.min() >= 1
    assert lengths.max() <= 8192
    assert len(set(lengths.tolist())) > 64
    np.testing.assert_array_equal(lengths, WORKLOADS["decode_mla-128x16x1x8192v-1"].lengths)


def test_lengths_are_those_of_published_cases():
    assert WORKLOADS["decode_mla-4x16x4x45118t-1"].lengths.tolist() == [4641, 45118, 1730, 1696]
    short = WORKLOADS["decode_mla-64x16x1x1024u-1"].lengths
    np.testing.assert_array_equal(short, np.random.default_rng(1).integers(256, 1025, 64))


def test_query_tokens_that_select_the_same_entries_read_them_once():
    workload = WORKLOADS["decode_mla_sparse-1x128x4096x32768-1-bf16"]
    assert workload.flops == 2 * 4096 * 128 * 2048 * (576 + 512)
    assert workload.traffic == 32768 * 1152 + 4096 * 128 * (576 + 512) * 2


def test_layers_that_do_not_fit_are_left_out():
    workload = WORKLOADS["decode_mla-128x128x1x16384-61"]
    a_layer = 128 * 16384 * 1152
    assert workload.fitted(26 * a_layer).layout.nbytes == 26 * a_layer
    assert workload.fitted(27 * a_layer - 1).layers == 26
    assert workload.fitted(0).layers == 1
    assert workload.fitted(10**12) == workload
