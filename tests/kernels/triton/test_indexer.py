"""Triton kernels of the indexer: the whole suite on a GPU (`-m gpu`), telling parts of it in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.support import call_of
from jaxkv_kernels.triton import kernels
from support import suites
from support.cases import on_layouts
from support.suites import scenes
from support.triton.builds import SHARED, builds, on_generations
from support.triton.runs import Triton, compiles, interpreted, on_gpu


@on_gpu
class TestIndexer(Triton, suites.Indexer):
    """The whole suite, on the GPU."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpreted(Triton, suites.IndexerChecks):
    """The interpreter's word on addresses, masks and formats."""

    def case(
        self, entry, lengths=None, *, layout="BLNHC", block_size=64, dtype="bfloat16", tokens=1, heads=4, max_len=200
    ):
        scene = scenes.scene(entry, lengths=lengths, block_size=block_size)
        found = suites.layout_of(layout, entry, block_size=block_size)
        self.check(*self.arguments(scene, tokens, dtype, heads), scene, found, 1, max_len)

    @on_layouts([jaxkv.IndexerEntry(), jaxkv.IndexerEntry("bf16"), jaxkv.IndexerEntry("indexer_mxfp4")])
    def test_layouts(self, name, entry):
        self.case(entry, (0, 1, 63, 130), layout=name, tokens=2)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
    @pytest.mark.parametrize("form", ["indexer_fp8", "indexer_mxfp4"])
    def test_dtypes_of_queries(self, form, dtype):
        self.case(jaxkv.IndexerEntry(form), (3, 100), dtype=dtype)

    @pytest.mark.parametrize("form", ["f16", "f32"])
    def test_keys_of_more_digits(self, form):
        self.case(jaxkv.IndexerEntry(form), (65,), dtype=jaxkv.IndexerEntry(form).dtype)

    @pytest.mark.parametrize("block_size", [1, 16, 61, 128])
    def test_block_sizes(self, block_size):
        self.case(jaxkv.IndexerEntry(), block_size=block_size, lengths=(12, 3), max_len=70)

    def test_heads_and_values_that_fill_no_tile(self):
        self.case(jaxkv.IndexerEntry(head_dim=20), (70,), heads=19)
        self.case(jaxkv.IndexerEntry("indexer_mxfp4", head_dim=64), (70,), heads=19)

    def test_lengths_past_the_result(self):
        self.case(jaxkv.IndexerEntry(), (130, 64, 7), max_len=66)

    @pytest.mark.parametrize("k", [1, 7, 40])
    def test_select_topk(self, k):
        self.check_topk_of_short_rows(k)

    def test_select_topk_in_several_passes(self):
        rng = np.random.default_rng(0)
        self.check_topk(np.stack([rng.standard_normal(9000), rng.integers(0, 3, 9000)]).astype(np.float32), 100)

    test_every_e4m3_value = suites.Indexer.test_every_e4m3_value
    test_lengths_outside_the_table = suites.Indexer.test_lengths_outside_the_table_are_clamped_to_it
    test_select_topk_ranks_nan_first = suites.Indexer.test_select_topk_ranks_nan_first
    test_select_topk_orders_subnormal_logits = suites.Indexer.test_select_topk_orders_subnormal_logits
    test_blocks_outside_the_cache_are_not_seen = suites.Indexer.test_blocks_outside_the_cache_are_not_seen
    test_traced_layer_outside_the_cache_is_empty = suites.Indexer.test_traced_layer_outside_the_cache_is_empty
    test_lengths_per_query_token = suites.Indexer.test_lengths_per_query_token
    test_ragged_query_tokens = suites.Indexer.test_ragged_query_tokens


@compiles
@on_generations(
    "form, dtype, heads, block_size",
    [
        ("indexer_fp8", "bfloat16", 128, 64),
        ("indexer_fp8", "float32", 64, 16),
        ("indexer_mxfp4", "bfloat16", 128, 64),
        ("indexer_mxfp4", "float32", 64, 16),
        ("f32", "float32", 64, 61),
    ],
    4,
)
def test_the_largest_tiles_fit_the_gpu(form, dtype, heads, block_size, capability):
    entry = jaxkv.IndexerEntry(form)
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=block_size, entry=entry)
    shape = jax.ShapeDtypeStruct
    q, weights = shape((4, 2, heads, 128), jnp.dtype(dtype)), shape((4, 2, heads), jnp.float32)
    cache = jaxkv.KVCache(shape((layout.size,), layout.dtype), layout)  # type: ignore[arg-type]
    index = shape((4, 512), jnp.int32), shape((4,), jnp.int32)
    (built,) = builds(capability, jaxkv.indexer_logits, q, weights, cache, *index, layer=0, max_len=32768)
    assert built.shared <= SHARED[capability] * 1024
    assert built.stack == 0, f"spills {built.stack} bytes a thread, with {built.registers} registers"


@compiles
def test_the_largest_k_fits_the_least_gpu():
    for built in builds(86, jaxkv.select_topk, jax.ShapeDtypeStruct((64, 131072), jnp.float32), 4096):
        assert built.shared <= SHARED[86] * 1024, built.name
        assert built.stack == 0, f"{built.name} spills {built.stack} bytes a thread"


def unsupported_reasons(call):
    return kernels.Triton().unsupported_reasons(call)


@pytest.mark.parametrize(
    ("reason", "heads", "dim", "dtype"),
    [
        ("`q` of 129 heads of bfloat16", 129, 128, "bfloat16"),
        ("`q` of 65 heads of float32", 65, 128, "float32"),
        ("keys of 256 values", 64, 256, "bfloat16"),
    ],
)
def test_explain_reports_why_tiles_do_not_fit(reason, heads, dim, dtype):
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=64, entry=jaxkv.IndexerEntry(head_dim=dim))
    shape = jax.ShapeDtypeStruct
    found = call_of(
        jaxkv.indexer_logits,
        shape((2, 1, heads, dim), jnp.dtype(dtype)),
        shape((2, 1, heads), jnp.float32),
        jaxkv.KVCache(shape((layout.size,), layout.dtype), layout),  # type: ignore[arg-type]
        shape((2, 4), jnp.int32),
        shape((2,), jnp.int32),
        layer=0,
        max_len=256,
    )
    assert [why.startswith(reason) for why in unsupported_reasons(found)] == [True]


def test_explain_reports_the_largest_k():
    call = call_of(jaxkv.select_topk, jax.ShapeDtypeStruct((2, 9000), jnp.float32), 4097)
    assert unsupported_reasons(call) == ["`k` of 4097: supports at most 4096"]
