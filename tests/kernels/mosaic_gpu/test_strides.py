"""Any strides that are multiples of 16 bytes: the views lead to the entries, and no kernel copies the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxkv
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.paged_tma import token_rows
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.runtime.strided import restride
from jaxkv_kernels.mosaic_gpu.token_rows import in_entries_dtype
from support import kernels, scenes
from support.cases import further, slow
from support.hopper import large

MLA, KV = jaxkv.MLAEntry("bf16"), jaxkv.KVEntry("bf16", 64)


@pytest.mark.parametrize("entry", [MLA, KV])
@pytest.mark.parametrize("name", scenes.layout_names(KV))
def test_views_of_all_layouts_lead_to_the_entries(entry, name):
    layout = scenes.layouts(entry, num_heads=1 if entry.one_head else 2, num_blocks=5, block_size=16)[name]
    buffer = jnp.zeros(layout.size, layout.dtype)
    bytes_of = np.arange(layout.nbytes // 2)
    typed, pages = in_entries_dtype(buffer, layout.pages, layout.entry.dtype)
    assert typed.shape == bytes_of.shape
    view = token_rows(pages)
    seen = np.lib.stride_tricks.as_strided(bytes_of, view.shape, [8 * stride for stride in view.strides])
    strides, item = layout.strides, layout.itemsize
    for layer, block, head in np.ndindex(3, 5, layout.num_heads):
        origin, row = view.index(layer, block, 8, head)
        first = layout.offset + layer * strides.layer + block * strides.block + head * strides.head
        tokens = (first + np.arange(16) * strides.token) * item // 2
        assert (seen[origin, row:] == tokens[8:, None] + np.arange(entry.nbytes // 2)).all()
        assert typed.reshape(view.of(typed).shape).size == typed.size


def lowered(layout, heads):
    """The text of `decode_mla` for 4 requests."""
    shape = jax.ShapeDtypeStruct
    arrays = (
        *(shape((4, 1, heads, n), jnp.bfloat16) for n in layout.entry.sizes),
        shape((layout.size,), layout.dtype),
        *(shape(dims, jnp.int32) for dims in ((4, 9), (4,), ())),
        shape((), jnp.float32),
    )
    names = ("q_latent", "q_pe", "buffer", "block_tables", "seq_lens", "layer", "scale")
    options = {"pages": layout.pages, "entry": layout.entry, "logit_cap": None, "window": None, "ahead": 0}
    decode = kernels.called(
        MosaicGPU(), "decode_mla", names, kv_scale=None, plan=None, trailing=None, tree=None, mask=None, **options
    )
    return jax.jit(decode).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("heads", [16, slow(64), further(128)])
@pytest.mark.parametrize("name", ["packed, uint8", "gaps, offset", slow("BLNHC padded")])
def test_decode_reads_the_cache_as_it_is(name, heads):
    layout = scenes.layouts(MLA, num_layers=61, num_blocks=64)[name]
    text = lowered(layout, heads)
    # XLA compiles a change of the dtype of contiguous elements to a bitcast, like a reshape.
    found = large(text, layout.nbytes // 2)
    assert {"stablehlo.reshape"} <= found <= {"stablehlo.reshape", "stablehlo.bitcast_convert"}


def restrided(first, second):
    """A kernel that copies from two operands, the first of which has strides of its own."""

    def body(first, second, out, tile, full):
        del out
        restride(first, (32, 16, 64), (128, 64, 1))
        for ref in (first, second):
            plgpu.copy_gmem_to_smem(ref.at[0, pl.ds(0, 8)], tile, full)
            plgpu.barrier_wait(full)

    scratch = [swizzled(8, 64, dtype=jnp.bfloat16), plgpu.Barrier()]
    out = jax.ShapeDtypeStruct((8,), jnp.float32)
    return kernel(body, interpret=False, out_type=out, grid=(1,), grid_names=("x",), scratch_types=scratch)(
        first, second
    )


def test_an_operand_with_strides_must_have_a_type_of_its_own():
    def lower(*shapes):
        arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        jax.jit(restrided).trace(*arrays).lower(lowering_platforms=("cuda",))

    lower((32, 16, 64), (33, 16, 64))
    with pytest.raises(
        ValueError, match=r"copies from two operands of type memref<32x16x64xbf16.*strides \(128, 64, 1\)"
    ):
        lower((32, 16, 64), (32, 16, 64))
