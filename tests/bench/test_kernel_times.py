"""Times of kernels, from timelines of the profiler, and how the kernels of a step are divided into kinds."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from jaxkv.bench import kernel_times
from jaxkv.bench.kernel_times import KernelTimes, describe_shares, kind, shares, time_kernels

NAMES = "attend", "combine", "MemcpyD2D", "jit_call"
STREAM, MODULES = "Stream #13(Compute,MemcpyD2D)", "XLA Modules"


class Device:
    class client:
        platform_version = "PJRT C API\ncuda 13000"


@pytest.fixture
def profiled(monkeypatch):
    """`profiled(lines)` has profilers find events (name, begin, end; microseconds) in the lines of the first GPU."""

    def profile(lines, device="GPU:0"):
        text = ""
        for line, events in lines.items():
            texts = [
                f"events {{ metadata_id: {NAMES.index(name)} offset_ps: {begin}000000 duration_ps: {took}000000 }}"
                for name, begin, took in ((name, begin, end - begin) for name, begin, end in events)
            ]
            text += f'lines {{ name: "{line}" {" ".join(texts)} }}'
        for i, name in enumerate(NAMES):
            text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        found = ProfileData.from_text_proto(f'planes {{ name: "/device:{device}" {text} }}')
        monkeypatch.setattr(kernel_times, "ProfileData", type("", (), {"from_file": lambda file: found}))

    monkeypatch.setattr(kernel_times.jax, "devices", lambda: [Device])
    return profile


def timed(repeats):
    return time_kernels(lambda x: x + 1, jnp.ones(3), repeats=repeats)


def test_medians_a_kernel_and_of_their_sum(profiled):
    spans = [("attend", 10, 12), ("combine", 13, 15), ("attend", 20, 23), ("combine", 25, 26), ("attend", 30, 39)]
    profiled({STREAM: [*spans, ("combine", 40, 49), ("MemcpyD2D", 50, 60)], MODULES: [("jit_call", 0, 99)]})
    found = timed(3)
    assert [name for name, _ in found.kernels] == ["attend", "combine"]
    assert [seconds for _, seconds in found.kernels] == pytest.approx([3e-6, 2e-6])
    assert found.median == pytest.approx(4e-6)  # of 4, 4 and 18


def test_what_overlaps_is_counted_once(profiled):
    profiled({STREAM: [("attend", 0, 10), ("combine", 4, 13), ("attend", 12, 20), ("combine", 15, 18)]})
    found = timed(2)
    assert [seconds for _, seconds in found.kernels] == pytest.approx([8.5e-6, 1.5e-6])
    assert [seconds for _, seconds in found.whole] == pytest.approx([9e-6, 6e-6])
    assert found.median == pytest.approx(10e-6)


def test_kernels_side_by_side_may_change_their_order(profiled):
    profiled({STREAM: [("combine", 0, 2), ("attend", 3, 7), ("attend", 10, 16), ("combine", 17, 21)]})
    kernels = ("attend", pytest.approx(5e-6)), ("combine", pytest.approx(3e-6))
    assert timed(2) == KernelTimes(pytest.approx(8e-6), kernels, whole=kernels)


def test_whole_times_of_kernels_that_overlap_and_change_their_order(profiled):
    profiled({STREAM: [("combine", 0, 4), ("attend", 3, 7), ("attend", 10, 16), ("combine", 12, 18)]})
    found = timed(2)
    assert dict(found.kernels) == pytest.approx({"attend": 4.5e-6, "combine": 3e-6})
    assert dict(found.whole) == pytest.approx({"attend": 5e-6, "combine": 5e-6})
    assert found.median == pytest.approx(7.5e-6)


def test_kernels_of_several_streams_are_listed_in_order(profiled):
    profiled({STREAM: [("combine", 5, 6)], "Stream #14(Compute)": [("attend", 1, 4)]})
    kernels = ("attend", pytest.approx(3e-6)), ("combine", pytest.approx(1e-6))
    assert timed(1) == KernelTimes(pytest.approx(4e-6), kernels, whole=kernels)


@pytest.mark.parametrize(
    ("events", "device"),
    [
        ([("attend", 0, 1), ("combine", 2, 3), ("attend", 4, 5)], "GPU:0"),
        ([("attend", 0, 1), ("combine", 2, 3)], "GPU:0"),
        ([], "GPU:0"),
        ([("attend", 0, 1), ("attend", 2, 3)], "GPU:1"),
    ],
    ids=["one too many", "different ones", "none", "another GPU"],
)
def test_calls_that_cannot_be_distinguished_have_no_times(profiled, capsys, events, device):
    profiled({STREAM: events}, device)
    assert timed(2) is None
    assert "expected the same of each" in capsys.readouterr().err


def test_a_second_profiler_has_no_times(profiled, capsys, tmp_path):
    profiled({STREAM: [("attend", 0, 1)]})
    with jax.profiler.trace(tmp_path):
        assert timed(1) is None
    assert "no kernel times: " in capsys.readouterr().err


def test_there_are_none_on_cpus(profiled, monkeypatch):
    profiled({STREAM: [("attend", 0, 1)]})
    monkeypatch.setattr(Device.client, "platform_version", "cpu")
    assert timed(1) is None


def test_times_of_several_calls_are_divided_by_their_number():
    found = KernelTimes(9e-6, (("write", 1e-6), ("fill", 3e-6), ("write", 5e-6)), (("write", 8e-6), ("write", 4e-6)))
    assert found.divided(1) == found
    assert found.divided(2) == KernelTimes(4.5e-6, (("write", 3e-6), ("fill", 1.5e-6)), (("write", 6e-6),))


KINDS = {
    "experts_down_mosaic_gpu_kernel": "experts",
    "decode_mla_mosaic_gpu_kernel": "attention",
    "combine_mosaic_gpu_kernel": "attention",
    "plan_divide_mosaic_gpu_kernel": "attention",
    "indexer_logits_mosaic_gpu_kernel": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x192": "attention",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "store_mosaic_gpu_kernel": "others",
    "gemm_fusion_dot_12": "products",
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop>": "products",
    "loop_convert_fusion": "others",
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_kernels(name):
    assert kind(name) == KINDS[name]


def test_shares_and_gaps_add_up_to_the_step():
    kernels = [("decode_mla_mosaic_gpu_kernel", 2e-6), ("gemm_fusion", 1e-6), ("decode_mla_mosaic_gpu_kernel", 3e-6)]
    found = shares(kernels, 10e-6)
    assert found == pytest.approx({"attention": 5e-6, "products": 1e-6, "gaps": 4e-6})
    assert describe_shares(found, 10e-6) == "attention 0.005 ms (50%), products 0.001 ms (10%), gaps 0.004 ms (40%)"


def test_a_step_of_overlapping_kernels_has_no_gaps():
    assert shares([("fusion", 3.0)], 2.0) == {"others": 3.0}
