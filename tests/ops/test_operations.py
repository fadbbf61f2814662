"""What each operation declares is complete and true, and everything that enumerates the declarations covers them."""

import inspect

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import dispatch
from jaxkv.bench.suites import WORKLOADS
from jaxkv.bench.workload import FAMILIES
from jaxkv.ops import OPERATIONS
from jaxkv.ops.samples import sample_cache
from jaxkv.testing.families import FAMILIES as FUZZED
from jaxkv_kernels.calls import MergeStates
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.xla.kernels import XLA

KINDS = (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry)

COMBINATIONS = {"mla_ragged_paged_attention", "ragged_paged_attention", "select_slots"}
"""Public functions that are not operations, but pass `implementation` on to operations."""

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def test_every_public_function_that_chooses_an_implementation_is_declared():
    public = {
        name: value
        for name, value in ((name, getattr(jaxkv, name)) for name in jaxkv.__all__)
        if inspect.isfunction(value) and "implementation" in inspect.signature(value).parameters
    }
    declared = {operation.name: operation.function for operation in OPERATIONS}
    assert public == declared | {name: getattr(jaxkv, name) for name in COMBINATIONS}
    assert len(OPERATIONS) == len(declared)


@every_operation
def test_samples_bind(operation):
    samples, formats = [], [name for kind in operation.entries for name in kind.formats]
    for variant in ("", *operation.variants):
        found = [*operation.samples(variant)]
        assert [sample.format for sample in found] == (formats or [""])
        samples += found
    for sample in samples:
        call = operation.call(*sample.args, **sample.kwargs, implementation="ignored")
        assert call.operation == operation.name
        for array in jax.tree.leaves(call):
            assert hasattr(array, "dtype")
        jax.eval_shape(lambda call: call.run_on(XLA()), call)


def test_a_call_is_captured_without_running(monkeypatch):
    operation = next(operation for operation in OPERATIONS if operation.function is jaxkv.merge_states)
    monkeypatch.setattr(XLA, "merge_states", None)
    call = operation.call(np.ones((2, 3, 4), np.float32), np.zeros((2, 3), np.float32))
    assert isinstance(call, MergeStates)
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=4, entry=jaxkv.MLAEntry("bf16"))
    with pytest.raises(TypeError, match="chooses no implementation"):
        dispatch.captured(jaxkv.slots_for, np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32), layout)


@every_operation
def test_caches_of_other_entries_are_rejected(operation):
    sample = next(operation.samples())
    for kind in KINDS:
        args = [sample_cache(kind("bf16")) if isinstance(x, jaxkv.KVCache) else x for x in sample.args]
        if operation.entries and kind not in operation.entries:
            with pytest.raises(ValueError, match="this operation takes a cache of"):
                operation.call(*args, **sample.kwargs)
    assert all(issubclass(kind, Entry) for kind in operation.entries)


HOT_ROWS = {"fetch_rows", "load_rows", "store_rows"}
"""Methods of `Kernels` for `jaxkv.offload.HotRows`."""


@pytest.mark.parametrize("backend", dispatch.BACKENDS, ids=lambda backend: backend.name)
def test_kernels_are_of_declared_operations(backend):
    declared = {operation.name for operation in OPERATIONS}
    kernels = backend.kernels()
    others = {"transformable", "least_prefill", "stamp"}
    methods = {name for name in vars(type(kernels)) if not name.startswith("_")} - others
    assert methods <= declared | HOT_ROWS
    assert all(kernels.support(name) for name in methods)
    if backend.name == "xla":
        assert methods == declared | HOT_ROWS


def test_every_operation_is_fuzzed():
    assert set(FUZZED) == {operation.name for operation in OPERATIONS}


def test_every_operation_is_benchmarked():
    assert set(FAMILIES) == {workload.operation for workload in WORKLOADS.values()}
    assert set(FAMILIES) == {operation.name for operation in OPERATIONS}


@pytest.mark.parametrize(
    "function",
    [jaxkv.slots_for, jaxkv.positions_to_slots, jaxkv.select_slots, print],
)
def test_explain_is_for_operations(function):
    with pytest.raises(TypeError, match="is not an operation of jaxkv that chooses an implementation"):
        jaxkv.explain(function)


def test_explain_checks_the_signature():
    with pytest.raises(TypeError, match="scale"):
        jaxkv.explain(jaxkv.decode_mla, 1, 2, 3, 4, 5, layer=0)


def test_availability_belongs_to_a_kernel(monkeypatch):
    monkeypatch.delattr(MosaicGPU, "write_indexer_k")
    sample = next(next(operation for operation in OPERATIONS if operation.name == "write_indexer_k").samples())
    found = jaxkv.explain(jaxkv.write_indexer_k, *sample.args, **sample.kwargs)
    assert found.reasons["mosaic_gpu"] == ("has no kernel for write_indexer_k",)
