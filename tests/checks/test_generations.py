"""GPU generations: what is claimed of kernels is what the tests compile, and calls choose only what has been run."""

import json
import logging

import jax
import pytest

import cubins
import jaxkv
from jaxkv import dispatch
from jaxkv.cli import main
from jaxkv.dispatch import BACKENDS
from jaxkv.ops import OPERATIONS
from jaxkv.testing import equivalence
from jaxkv_kernels import generations
from jaxkv_kernels.generations import AMD, GENERATIONS, TESTED, mark
from jaxkv_kernels.mosaic_gpu.runtime.device import TCGEN05
from jaxkv_kernels.triton import available
from support.available import assume_available
from support.triton.builds import AMD_SHARED, SHARED

LAYOUT = jaxkv.CacheLayout(num_layers=1, num_blocks=8, block_size=64, entry=jaxkv.MLAEntry("bf16"))
DECODE = (
    jax.ShapeDtypeStruct((2, 1, 16, 512), "bfloat16"),
    jax.ShapeDtypeStruct((2, 1, 16, 64), "bfloat16"),
    jax.eval_shape(lambda: jaxkv.KVCache.zeros(LAYOUT)),
    jax.ShapeDtypeStruct((2, 4), "int32"),
    jax.ShapeDtypeStruct((2,), "int32"),
)
OPTIONS = {"layer": 0, "scale": 0.1}
HEADS = jaxkv.CacheLayout(num_layers=1, num_blocks=8, block_size=64, num_heads=2, entry=jaxkv.KVEntry("bf16", 128))
DECODE_KV = (
    jax.ShapeDtypeStruct((2, 16, 128), "bfloat16"),
    jax.eval_shape(lambda: jaxkv.KVCache.zeros(HEADS)),
    *DECODE[3:],
)
SLOTS = jax.ShapeDtypeStruct((2, 1, 64), "int32")
COPY = (DECODE[2], jax.ShapeDtypeStruct((3,), "int32"), jax.ShapeDtypeStruct((3,), "int32"))


def has_gpu(monkeypatch, capability, kind="A GPU"):
    """Makes this machine one with such a GPU."""
    gpu = type("GPU", (), {"compute_capability": capability, "device_kind": kind, "core_count": 100})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    dispatch._warn_of_untried.cache_clear()


@pytest.fixture
def on(monkeypatch):
    """Makes this machine one with a GPU of a compute capability, for which both packages are installed."""

    def make(capability):
        has_gpu(monkeypatch, capability)
        assume_available(monkeypatch, "triton")

    return make


@pytest.fixture
def reports(monkeypatch, tmp_path):
    """An empty folder of reports."""
    monkeypatch.setattr(generations, "REPORTS", tmp_path)
    generations._reported.cache_clear()
    yield tmp_path
    generations._reported.cache_clear()


def test_triton_is_compiled_for_every_generation():
    assert {f"{number // 10}.{number % 10}" for number in SHARED} == {*GENERATIONS}
    assert {*AMD_SHARED} == {*AMD}


@pytest.mark.parametrize("version", ["0.11", "0.12"])
def test_mosaic_gpu_is_compiled_for_the_generations_that_it_claims(version):
    """Every operation that is offered on a generation has a kernel in the table of its GPU."""
    (mosaic_gpu, *_) = BACKENDS
    for name, capability in cubins.TARGETS.items():
        rows = json.loads((cubins.DATA / f"{name}-jax-{version}.json").read_text())["kernels"]
        compiled = {row.split("-")[0] for row in rows}
        # These run the kernels of others: reads and prefills those of gathers.
        compiled |= {"read_mla", "read_kv", "read_indexer_k", "prefill_mla", "prefill_kv"}
        for operation in OPERATIONS:
            support = mosaic_gpu.kernels().support(operation.name)
            if (
                support
                and mark("mosaic_gpu", operation.name, support.machines.generations, capability) != "unsupported"
            ):
                assert operation.name in compiled, f"{operation.name} on {name}"
    claimed = {
        capability
        for operation in OPERATIONS
        if (support := mosaic_gpu.kernels().support(operation.name))
        for capability in support.machines.generations
    }
    assert claimed == {*cubins.TARGETS.values()}


def test_the_generation_of_the_tests_chooses_as_ever(on, caplog):
    on(TESTED)
    found = jaxkv.explain(jaxkv.decode_mla, *DECODE, **OPTIONS)
    assert found.chosen == "mosaic_gpu"
    assert not found.untried
    assert not caplog.records


@pytest.mark.parametrize("capability", [found for found in GENERATIONS if found != TESTED])
def test_kernels_that_were_not_run_are_chosen_by_name_only(capability, on, reports, caplog):
    on(capability)
    found = jaxkv.explain(jaxkv.decode_mla, *DECODE, **OPTIONS)
    assert found.chosen == "xla"
    assert [*found.untried] == [*["mosaic_gpu"] * (capability in TCGEN05), "triton"]
    assert f"  triton: if it is named; its kernel has not been run on compute capability {capability}" in str(found)
    call = dispatch.captured(jaxkv.decode_mla, *DECODE, **OPTIONS)
    with caplog.at_level(logging.WARNING, "jaxkv"):
        for _ in range(2):
            assert dispatch.choose(call, None).name == "xla"
            assert dispatch.choose(call, "triton").name == "triton"
            assert dispatch.choose(call, ("triton", "xla")).name == "triton"
        assert not dispatch.has_kernel(call)
    *skipped, named = (record.getMessage() for record in caplog.records)
    for message, name in zip(skipped, found.untried, strict=True):
        assert message.startswith(f"decode_mla does not run on {name}: its kernel has not been run")
    assert named.startswith("decode_mla runs on triton, although its kernel has not been run")


@pytest.fixture
def amd(monkeypatch):
    """Makes this machine one with an AMD GPU of an architecture, for which the packages are installed."""

    def make(architecture):
        has_gpu(monkeypatch, architecture, "An AMD GPU")
        monkeypatch.setattr(available, "_missing", lambda *packages: ())
        monkeypatch.setattr(available, "_misfit", lambda: ())
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return make


@pytest.mark.parametrize("architecture", AMD)
def test_amd_gpus_run_what_is_compiled_for_them_if_it_is_named(architecture, amd, reports, caplog):
    amd(architecture)
    found = jaxkv.explain(jaxkv.decode_mla, *DECODE, **OPTIONS)
    assert found.chosen == "xla"
    assert f"  triton: if it is named; its kernel has not been run on {architecture} (An AMD GPU)" in str(found)
    assert "  mosaic_gpu: needs compute capability 9.0" in str(found)
    call = dispatch.captured(jaxkv.decode_mla, *DECODE, **OPTIONS)
    with caplog.at_level(logging.WARNING, "jaxkv"):
        assert dispatch.choose(call, "triton").name == "triton"
    (named,) = (record.getMessage() for record in caplog.records)
    assert named.startswith("decode_mla runs on triton, although its kernel has not been run")


@pytest.mark.parametrize("architecture", AMD)
def test_other_kernels_are_unsupported_on_amd_gpus(architecture, amd):
    amd(architecture)
    needs_nvidia = [f"needs an NVIDIA GPU; An AMD GPU is {architecture}"]
    kernels, marks = BACKENDS[1].kernels(), {}
    for operation in OPERATIONS:
        if support := kernels.support(operation.name):
            found = mark("triton", operation.name, support.machines.generations, architecture)
            assert support.unavailable_reasons() == ([] if found == "compiled" else needs_nvidia), operation.name
            marks.setdefault(found, set()).add(operation.name)
    assert {*marks} == {"compiled", "unsupported"}
    assert {"decode_mla", "decode_kv", "write_mla", "gather_kv", "read_mla"} <= marks["compiled"]
    assert {"select_topk", "indexer_logits", "copy_blocks", "decode_mla_sparse"} <= marks["unsupported"]


def test_other_amd_gpus_are_rejected(amd):
    amd("gfx90a")
    needed = "an NVIDIA GPU or gfx942 (AMD MI300) or gfx950 (AMD MI350)"
    assert BACKENDS[1].unavailable_reasons() == [f"needs {needed}; An AMD GPU is gfx90a"]


@pytest.mark.parametrize("capability", ["10.0", "10.3"])
def test_kernels_of_mosaic_gpu_run_on_blackwell_if_they_are_named(capability, on, reports):
    on(capability)
    found = jaxkv.explain(jaxkv.copy_blocks, *COPY)
    assert {*found.untried} == {"mosaic_gpu", "triton"}
    assert dispatch.choose(dispatch.captured(jaxkv.copy_blocks, *COPY), "mosaic_gpu").name == "mosaic_gpu"
    for operation, arguments in ((jaxkv.decode_mla, DECODE), (jaxkv.decode_kv, DECODE_KV)):
        assert jaxkv.explain(operation, *arguments, **OPTIONS).chosen == "xla"
        assert dispatch.choose(dispatch.captured(operation, *arguments, **OPTIONS), "mosaic_gpu").name == "mosaic_gpu"
    with pytest.raises(NotImplementedError, match=r"needs compute capability 9\.0"):
        dispatch.choose(dispatch.captured(jaxkv.decode_mla_sparse, *DECODE[:3], SLOTS, **OPTIONS), "mosaic_gpu")


def test_a_report_makes_what_was_right_an_ordinary_choice(on, reports):
    operations = {"decode_mla": {"right": True}, "copy_blocks": {"right": False}}
    about = {"implementation": "triton", "compute_capability": "8.9", "operations": operations}
    (reports / "l4.json").write_text(json.dumps(about))
    on("8.9")
    assert jaxkv.explain(jaxkv.decode_mla, *DECODE, **OPTIONS).chosen == "triton"
    assert jaxkv.explain(jaxkv.copy_blocks, *COPY).chosen == "xla"
    assert mark("triton", "decode_mla", GENERATIONS, "8.9") == "run"
    assert mark("triton", "decode_mla", GENERATIONS, "8.6") == "compiled and interpreted"


def test_verify_writes_a_report(monkeypatch, tmp_path):
    """A tampered result is not right, and a report is read as it was written."""
    cases = [
        equivalence.Outcome("decode_mla", "BLNHC"),
        equivalence.Outcome("copy_blocks", "BLNHC", wrong="block 3 differs"),
        equivalence.Outcome("select_topk", "BLNHC", rejected="not here"),
    ]
    monkeypatch.setattr(equivalence, "ENTRIES", equivalence.ENTRIES[:1])
    monkeypatch.setattr(equivalence, "verify_all", lambda implementation: iter([cases]))
    file = tmp_path / "report.json"
    assert main(["verify", "--report", str(file)]) == 1
    report = json.loads(file.read_text())
    assert {name: found["right"] for name, found in report["operations"].items()} == {
        "decode_mla": True,
        "copy_blocks": False,
        "select_topk": False,
    }
    assert (report["implementation"], report["compute_capability"]) == ("xla", None)
    with pytest.raises(SystemExit, match="--report and --calls are given"):
        main(["verify", "--report", str(file), "--calls", "3"])
