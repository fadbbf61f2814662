"""Triton kernels that attend: the whole suites on a GPU (`-m gpu`) and interpreted; compiled at the sizes of models."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv_kernels.triton.mla import LatentConfig
from jaxkv_kernels.tuning import using
from support import suites
from support.triton.builds import SHARED, builds, on_generations
from support.triton.runs import Triton, compiles, interpreted, on_gpu


@on_gpu
class TestDecodeMLA(Triton, suites.DecodeMLA):
    """The whole suite, on the GPU."""


@on_gpu
class TestDecodeKV(Triton, suites.DecodeKV):
    """The whole suite, on the GPU."""


@on_gpu
class TestMLAWindowsOfBothSides(Triton, suites.MLAWindowsOfBothSides):
    """The whole suite, on the GPU."""


@on_gpu
class TestKVWindowsOfBothSides(Triton, suites.KVWindowsOfBothSides):
    """The whole suite, on the GPU."""


@on_gpu
class TestMLAMasks(Triton, suites.MLAMasks):
    """The whole suite, on the GPU."""


@on_gpu
class TestMLATreeMasks(Triton, suites.MLATreeMasks):
    """The whole suite, on the GPU."""


@on_gpu
class TestKVMasks(Triton, suites.KVMasks):
    """The whole suite, on the GPU."""


@on_gpu
class TestKVTreeMasks(Triton, suites.KVTreeMasks):
    """The whole suite, on the GPU."""


@on_gpu
class TestDecodeMLASparse(Triton, suites.DecodeMLASparse):
    """The whole suite, on the GPU."""


@on_gpu
class TestMLASharedPrefixes(Triton, suites.MLASharedPrefixes):
    """The whole suite, on the GPU."""


@on_gpu
class TestKVSharedPrefixes(Triton, suites.KVSharedPrefixes):
    """The whole suite, on the GPU."""


@on_gpu
class TestGradients(Triton, suites.Gradients):
    """The whole suite, on the GPU."""


class ExtraSlots(Triton, suites.ExtraSlots):
    """Sparse attention to two caches."""

    forms = (
        ("f32", "bf16"),
        ("fp8", "fp8_ds_mla"),
        ("nvfp4_ds_mla", "mxfp4_ds_mla"),
        (jaxkv.MLAEntry.typical("fp8_v4"), jaxkv.MLAEntry.typical("fp8_v41_split")),
        (jaxkv.MLAEntry.typical("fp8_v41"), jaxkv.MLAEntry.typical("fp4_v41")),
    )


@on_gpu
class TestExtraSlots(ExtraSlots):
    """The whole suite, on the GPU."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedKVSharedPrefixes(Triton, suites.KVSharedPrefixes):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedGradients(Triton, suites.Gradients):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedExtraSlots(ExtraSlots):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedDecodeMLA(Triton, suites.DecodeMLA):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedDecodeKV(Triton, suites.DecodeKV):
    """The whole suite."""


@interpreted
@pytest.mark.slow
@pytest.mark.usefixtures("interpreting")
class TestInterpretedMLAWindowsOfBothSides(Triton, suites.MLAWindowsOfBothSides):
    """The whole suite."""


@interpreted
@pytest.mark.slow
@pytest.mark.usefixtures("interpreting")
class TestInterpretedKVWindowsOfBothSides(Triton, suites.KVWindowsOfBothSides):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedWindows(Triton, suites.DecodeKVChecks):
    """Some of the cases of windows of both sides."""

    def test_several_query_tokens(self):
        entry = self.entry()
        scene = suites.scenes.scene(entry, num_heads=2, lengths=(130, 3, 0))
        cache, q = scene.cache(suites.layout_of("BLNHC", entry, num_heads=2), 1), self.query(entry, 3, 9, 4)
        self.check(q, cache, scene, 1, window=(40, 3), causal=False)

    test_tokens_that_no_query_token_sees = (
        suites.KVWindowsOfBothSides.test_tokens_that_no_query_token_sees_do_not_matter
    )


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedMLATreeMasks(Triton, suites.MLATreeMasks):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedKVMasks(Triton, suites.KVMasks):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedDecodeMLASparse(Triton, suites.DecodeMLASparse):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedScoresOnce(Triton, suites.DecodeMLAChecks):
    """Scores that each warpgroup computes for some of the keys."""

    @pytest.mark.parametrize(("form", "columns"), [("bf16", 32), ("fp8", 32), ("fp8_ds_mla", 128)])
    def test_several_tiles(self, form, columns):
        entry = self.entry(form)
        scene = suites.scenes.scene(entry)
        cache, q = scene.cache(suites.layout_of("BLNHC", entry), 0), suites.queries(entry, len(scene.lengths), 2, 16)
        sizes = dict(rows=32, keys=32, columns=columns, warps=8, stages=2, programs_per_sm=1)
        with using(LatentConfig(**sizes, scores_once=True)):
            self.check(q, cache, scene, 0)


@pytest.mark.parametrize("change", [{"warps": 4}, {"rows": 16}, {"keys": 16}])
def test_scores_once_is_for_two_warpgroups(change):
    config = LatentConfig(rows=32, keys=32, columns=32, warps=8, stages=2, programs_per_sm=1, scores_once=True)
    with pytest.raises(ValueError, match="expected 8 warps, and at least 32 rows and keys"):
        replace(config, **change)


@interpreted
@pytest.mark.usefixtures("interpreting")
@pytest.mark.parametrize("score", [1e-4, -0.03, 1.0, -15.0, 18.0, 200.0])
def test_capped_float32_scores_are_accurate_near_zero(score):
    """The log-sum-exp of one key is its score.  1 - exp2(...) for a small one would lose most of its bits."""
    cap = 30.0
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=16, entry=jaxkv.KVEntry("f32", 16, 16))
    ones = jnp.ones((1, 1, 16))
    cache = jaxkv.write_kv(jaxkv.KVCache.zeros(layout), ones, ones, jnp.zeros(1, jnp.int32), layer=0)
    q = jnp.full((1, 1, 16), score / 16, jnp.float32)
    tables, lengths = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    _, lse = jaxkv.decode_kv(
        q, cache, tables, lengths,
        layer=0, scale=1.0, logit_cap=cap, return_lse=True, implementation="triton",
    )  # fmt: skip
    # 16 roundings, for the scale, tanh, and the exponential and logarithm around it.
    np.testing.assert_allclose(lse[0, 0], cap * np.tanh(np.float64(score) / cap), rtol=2**-20)


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def cache_of(entry, heads=1):
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=64, num_heads=heads, entry=entry)
    return jaxkv.KVCache(array(layout.dtype, layout.size), layout)


SPILLED = 16
"""Bytes a thread, which ptxas spills where that makes room for one program more on a multiprocessor."""
REQUESTS = array("int32", 64, 64), array("int32", 64)


@compiles
@on_generations(
    "form, heads, tokens",
    [
        ("bf16", 128, 1),
        ("bf16", 16, 2),
        ("f16", 64, 1),
        ("fp8", 128, 1),
        ("fp8_ds_mla", 128, 2),
        ("fp8_v4", 128, 1),
        ("fp8_v4", 16, 1),
        ("nvfp4_ds_mla", 128, 1),
        ("mxfp4_ds_mla", 128, 1),
    ],
    3,
)
def test_latents_compile_at_the_sizes_of_models(form, heads, tokens, capability):
    dtype = "float16" if form == "f16" else "bfloat16"
    entry = jaxkv.MLAEntry.typical(form)
    q = [array(dtype, 64, tokens, heads, size) for size in entry.sizes]
    cache, options = cache_of(entry), {"kv_scale": 1.0} if form == "fp8" else {}
    attend, combine = builds(capability, jaxkv.decode_mla, *q, cache, *REQUESTS, layer=0, scale=1.0, **options)
    assert max(attend.shared, combine.shared) <= SHARED[capability] * 1024
    # With 64 rows there, results and addresses are about all registers: Triton 3.9 spills, 3.6 just does not.
    most = 512 if capability == 90 and heads * tokens >= 64 else SPILLED
    assert attend.stack <= most, attend.registers


@compiles
@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8_ds_mla"])
def test_two_programs_of_few_heads_share_a_multiprocessor(form):
    """As they would not if e4m3 values of `fp8` went through shared memory on their way to products."""
    q = array("bfloat16", 64, 1, 16, 512), array("bfloat16", 64, 1, 16, 64)
    cache, options = cache_of(jaxkv.MLAEntry(form)), {"kv_scale": 1.0} if form == "fp8" else {}
    attend, _ = builds(90, jaxkv.decode_mla, *q, cache, *REQUESTS, layer=0, scale=1.0, **options)
    assert 2 * (attend.shared + 1024) <= 228 * 1024  # a program has 1 KiB more than it asks for
    assert 2 * 4 * 32 * attend.registers <= 2**16


@compiles
@pytest.mark.parametrize(("size", "programs"), [(64, 3), (128, 4)])
def test_programs_of_e4m3_pairs_share_a_multiprocessor(size, programs):
    """As they would not if values went through shared memory, or through float32, on their way to products."""
    q, cache = array("bfloat16", 64, 1, 64, size), cache_of(jaxkv.KVEntry("fp8", size, size), 8)
    options = {"layer": 0, "scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}
    attend, _ = builds(90, jaxkv.decode_kv, q, cache, *REQUESTS, **options)
    assert programs * (attend.shared + 1024) <= 228 * 1024
    assert programs * 4 * 32 * attend.registers <= 2**16


@compiles
@pytest.mark.parametrize(("form", "of_values"), [("bf16", 32), ("fp8", 0), ("fp8_ds_mla", 0)])
def test_warpgroups_share_the_scores(form, of_values):
    """Products of 64 rows and 576 columns take a warpgroup 72 instructions for 64 keys, and 36 for half of them.

    There is another branch with as many, of which Triton merges those of the first product.  Products with values in
    tiles of 64 columns are `of_values` more.
    """
    q = array("bfloat16", 64, 1, 128, 512), array("bfloat16", 64, 1, 128, 64)
    cache, options = cache_of(jaxkv.MLAEntry(form)), {"kv_scale": 1.0} if form == "fp8" else {}
    attend, _ = builds(90, jaxkv.decode_mla, *q, cache, *REQUESTS, layer=0, scale=1.0, **options)
    count = attend.assembly.count("wgmma.mma_async.sync.aligned.m64n32k16")
    assert 36 < count - of_values < 72


@compiles
@on_generations(
    "form, sizes, sharing, tokens, options",
    [
        ("bf16", (128, 128), 1, 1, {}),
        ("bf16", (128, 128), 40, 2, {"logit_cap": 30.0}),
        ("f16", (192, 128), 16, 1, {}),
        ("bf16", (256, 256), 4, 3, {"window": 100}),
        ("bf16", (128, 128), 8, 9, {"window": (64, 3), "causal": False}),
        ("bf16", (512, 512), 8, 1, {}),
        ("bf16", (512, 512), 8, 4, {}),
        ("f32", (512, 512), 8, 1, {}),
        ("fp8", (128, 128), 8, 1, {"k_scale": 1.0, "v_scale": 1.0}),
        ("int8", (128, 128), 8, 1, {}),
        ("nvfp4", (128, 128), 8, 1, {"k_scale": 1.0, "v_scale": 1.0}),
    ],
    3,
)
def test_pairs_compile_at_the_sizes_of_models(form, sizes, sharing, tokens, options, capability):
    q = array({"f16": "float16", "f32": "float32"}.get(form, "bfloat16"), 64, tokens, 8 * sharing, sizes[0])
    cache = cache_of(jaxkv.KVEntry(form, *sizes), 8)
    attend, combine = builds(capability, jaxkv.decode_kv, q, cache, *REQUESTS, layer=0, scale=1.0, **options)
    assert max(attend.shared, combine.shared) <= SHARED[capability] * 1024
    assert attend.stack <= SPILLED, attend.registers


@compiles
@on_generations(
    "form, options",
    [
        ("bf16+fp8", {"v_scale": 1.0}),
        ("bf16+int8", {}),
        ("bf16+nvfp4", {"v_scale": 1.0}),
        ("fp8+nvfp4", {"k_scale": 1.0, "v_scale": 1.0}),
        ("int8+bf16", {}),
    ],
    1,
)
def test_pairs_in_different_formats_compile(form, options, capability):
    entry = suites.scenes.entry_of(jaxkv.KVEntry, form, 128, 128)
    cache, q, options = cache_of(entry, 8), array("bfloat16", 64, 1, 64, 128), {"layer": 0, **options}
    built = builds(capability, jaxkv.decode_kv, q, cache, *REQUESTS, scale=1.0, **options)
    if form == "bf16+fp8":
        new = [array("bfloat16", 64, 8, size) for size in entry.sizes]
        built += builds(capability, jaxkv.write_kv, cache, *new, array("int32", 64), **options)
        built += builds(capability, jaxkv.gather_kv, cache, *REQUESTS[:1], array("int32", 65), total=64, **options)
    assert max(each.shared for each in built) <= SHARED[capability] * 1024
    assert max(each.stack for each in built) <= SPILLED
