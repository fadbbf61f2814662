"""How the kernels of a step are divided into kinds."""

import pytest

from jaxkv.bench.shares import described, kind, shares

NAMES = {
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


@pytest.mark.parametrize("name", NAMES)
def test_kinds_of_kernels(name):
    assert kind(name) == NAMES[name]


def test_shares_and_gaps_add_up_to_the_step():
    kernels = [("decode_mla_mosaic_gpu_kernel", 2e-6), ("gemm_fusion", 1e-6), ("decode_mla_mosaic_gpu_kernel", 3e-6)]
    found = shares(kernels, 10e-6)
    assert found == pytest.approx({"attention": 5e-6, "products": 1e-6, "gaps": 4e-6})
    assert described(found, 10e-6) == "attention 0.005 ms (50%), products 0.001 ms (10%), gaps 0.004 ms (40%)"


def test_a_step_of_overlapping_kernels_has_no_gaps():
    assert shares([("fusion", 3.0)], 2.0) == {"others": 3.0}
