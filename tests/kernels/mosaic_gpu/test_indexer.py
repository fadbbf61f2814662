"""The Mosaic GPU kernels of the indexer: lowered, interpreted, the whole suite on a Hopper GPU (`-m gpu`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from support import kernels, suites
from support.cases import slow
from support.hopper import kernel_operands, on_hopper
from support.suites import scenes

FLOATS = [("bf16", "bfloat16"), ("f16", "float16"), ("bf16", "float8_e4m3fn"), ("f16", "float8_e4m3fn")]
"""Formats of keys that are not quantised, and dtypes of queries."""


class Mosaic:
    """What every suite of this kernel says of itself."""

    implementation = "mosaic_gpu"
    gaps = (
        "entries of format",  # float32 has no wgmma
        "`q` of",  # of float32, and of float16 with bf16 keys: there is no such wgmma
        "blocks of",  # of 1, 3 and 61 tokens; of 16 e4m3 keys, which are not whole rows of 128 bytes
        "offset of",
        "layer stride of",
        "block stride of",
        "buffer size of",
    )

    def case(
        self, lengths, *, keys="indexer_fp8", layout="BLNHC", block_size=64, dtype="float8_e4m3fn", tokens=1, heads=4,
        max_len=200,
    ):  # fmt: skip
        """Checks requests of those lengths."""
        entry = jaxkv.IndexerEntry(keys)
        scene = scenes.scene(entry, lengths=lengths, block_size=block_size)
        found = suites.layout_of(layout, entry, block_size=block_size)
        self.check(*self.arguments(scene, tokens, dtype, heads), scene, found, 1, max_len)


@on_hopper
class TestIndexer(Mosaic, suites.Indexer):
    """The whole suite, and what only sizes of real calls show, on the GPU."""

    e4m3_roundings = 2**13  # Hopper adds up products of e4m3 with 13 bits after the leading one

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16"])
    @pytest.mark.parametrize(("heads", "tokens"), [(64, 1), (64, 2), (64, 4), (128, 2), (19, 3)])
    def test_heads_and_query_tokens(self, dtype, heads, tokens):
        self.case((700, 3, 0, 90), dtype=dtype, heads=heads, tokens=tokens, max_len=1000)

    @pytest.mark.parametrize(("keys", "dtype"), FLOATS)
    @pytest.mark.parametrize("layout", ["BLNHC", "packed, uint8", "gaps, offset"])
    @pytest.mark.parametrize(("heads", "tokens"), [(64, 1), (64, 2), (64, 64), (8, 70), (128, 3), (19, 40), (256, 2)])
    def test_float_keys(self, keys, dtype, layout, heads, tokens):
        self.case(
            (700, 3, 0, 90), keys=keys, layout=layout, dtype=dtype, heads=heads, tokens=tokens, max_len=1000
        )  # fmt: skip

    @pytest.mark.parametrize("block_size", [16, 32, 128, 256])
    def test_blocks_of_float_keys(self, block_size):
        self.case((130, 64, 7), keys="bf16", dtype="bfloat16", block_size=block_size, heads=64, max_len=300)

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
    @pytest.mark.parametrize(("heads", "tokens"), [(64, 64), (104, 5)])
    def test_groups_of_query_tokens(self, dtype, heads, tokens):
        self.case((700, 3, 0, 90), dtype=dtype, heads=heads, tokens=tokens, max_len=1000)


@pytest.mark.usefixtures("interpreted")
class TestInterpreted(Mosaic, suites.IndexerChecks):
    """Numerics, barriers and races of a few cases, each of which takes the interpreter many seconds."""

    def test_query_tokens_and_requests_without_keys(self):
        self.case((70, 0, 190), tokens=3, heads=64)

    def test_queries_that_are_converted(self):
        self.case((0, 1, 130), dtype="bfloat16", tokens=2)

    @pytest.mark.parametrize(("keys", "dtype"), [FLOATS[0], *(slow(*case) for case in FLOATS[1:])])
    def test_float_keys(self, keys, dtype):
        self.case((70, 0, 190), keys=keys, dtype=dtype, tokens=2)

    def test_float_keys_of_blocks_with_gaps(self):
        self.case((130, 64, 7), keys="bf16", dtype="bfloat16", layout="gaps, offset", block_size=16, max_len=66)

    @pytest.mark.parametrize(("keys", "dtype"), [slow("bf16", "bfloat16"), ("indexer_fp8", "float8_e4m3fn")])
    def test_groups_of_query_tokens(self, keys, dtype):
        """Three groups of two query tokens; the first has one token of padding."""
        self.case((70, 3, 0), keys=keys, dtype=dtype, tokens=5, heads=100, max_len=100)

    @pytest.mark.slow
    def test_blocks_of_half_a_tile(self):
        self.case((130, 64, 7), block_size=32, dtype="float16", max_len=66)

    @pytest.mark.slow
    def test_blocks_of_two_tiles(self):
        self.case((300, 64, 7), block_size=128, layout="LBNHC", max_len=266)

    @pytest.mark.slow
    def test_a_buffer_of_another_dtype(self):
        self.case((190, 64), layout="packed, bfloat16")

    @pytest.mark.parametrize("k", [7, slow(40)])
    def test_select_topk(self, k):
        self.check_topk_of_short_rows(k)

    def test_select_topk_of_several_chunks(self):
        rng = np.random.default_rng(0)
        logits = np.stack([rng.standard_normal(33_000), rng.integers(0, 3, 33_000)])
        logits[0, 100:] = -np.inf
        self.check_topk(logits.astype(np.float32), 100)

    def test_select_topk_returns_slots(self):
        suites.Indexer.test_select_topk_returns_slots(self, 40, 16)

    test_select_topk_ranks_nan_first = suites.Indexer.test_select_topk_ranks_nan_first
    test_select_topk_orders_subnormal_logits = suites.Indexer.test_select_topk_orders_subnormal_logits
    test_blocks_outside_the_cache = suites.Indexer.test_blocks_outside_the_cache_are_not_seen


@pytest.mark.parametrize(
    ("keys", "dtype", "tokens"),
    [
        ("indexer_fp8", "float8_e4m3fn", 2), ("indexer_fp8", "bfloat16", 1), ("indexer_fp8", "float8_e4m3fn", 70),
        ("bf16", "bfloat16", 1), ("f16", "float16", 70), ("bf16", "float8_e4m3fn", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("order", "block_size"), [("BLNHC", 64), ("LBNHC", 128)])
def test_lowers_for_hopper(keys, dtype, tokens, order, block_size):
    entry = jaxkv.IndexerEntry(keys)
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=block_size, entry=entry, order=order)
    shape = jax.ShapeDtypeStruct
    arrays = (
        shape((4, tokens, 64, 128), jnp.dtype(dtype)),
        shape((4, tokens, 64), jnp.float32),
        shape((layout.size,), layout.dtype),
        shape((4, 300), jnp.int32),
        shape((4,), jnp.int32),
        shape((), jnp.int32),
    )
    names = ("q", "weights", "buffer", "block_tables", "seq_lens", "layer")
    options = {"pages": layout.pages, "entry": entry, "max_len": 10_001}
    logits = kernels.called(MosaicGPU(), "indexer_logits", names, **options)
    text = jax.jit(logits).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert len(kernel_operands(text)) == 1
    for operation in ("concatenate", "transpose", "pad", "dynamic_slice", "bitcast_convert"):
        assert f"stablehlo.{operation} %arg2" not in text  # the cache goes in as it is


@pytest.mark.parametrize(
    ("length", "k", "launches"), [(250, 300, 1), (32_768, 2048, 1), (70_001, 2048, 2), (500_000, 2048, 3)]
)
def test_select_topk_lowers_for_hopper(length, k, launches):
    def select(logits):
        return kernels.run(MosaicGPU(), "select_topk", logits=logits, k=k, block_tables=None, block_size=None)

    traced = jax.jit(select).trace(jax.ShapeDtypeStruct((3, 2, length), jnp.float32))
    assert len(kernel_operands(traced.lower(lowering_platforms=("cuda",)).as_text())) == launches


SIZES = dict(num_layers=3, num_blocks=4, block_size=64)
UNSUPPORTED = {
    "entries of format 'f32'": dict(entry=jaxkv.IndexerEntry("f32")),
    "keys of 64 values": dict(entry=jaxkv.IndexerEntry(head_dim=64)),
    "blocks of 16 tokens": dict(block_size=16),
    "block stride of": dict(block_padding=16),
    "`q` of float32": dict(dtype=jnp.float32),
    "`q` of 300 heads": dict(heads=300),
    "`q` of float16": dict(entry=jaxkv.IndexerEntry("bf16"), dtype=jnp.float16),
    "`q` of bfloat16": dict(entry=jaxkv.IndexerEntry("f16")),
    "blocks of 8 tokens": dict(entry=jaxkv.IndexerEntry("bf16"), block_size=8),
    "block stride of 49160 bytes": dict(entry=jaxkv.IndexerEntry("bf16"), block_padding=4),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_explain_reports_the_reason(reason):
    found = {**SIZES, "entry": jaxkv.IndexerEntry(), **UNSUPPORTED[reason]}
    dtype, heads = found.pop("dtype", jnp.bfloat16), found.pop("heads", 16)
    layout = jaxkv.CacheLayout(**found)
    shape = jax.ShapeDtypeStruct
    q, weights = shape((1, 1, heads, layout.entry.head_dim), dtype), shape((1, 1, heads), jnp.float32)
    cache = jaxkv.KVCache(shape((layout.size,), layout.dtype), layout)
    index = shape((1, 8), jnp.int32), shape((1,), jnp.int32)
    with interpreting(True):
        explained = jaxkv.explain(jaxkv.indexer_logits, q, weights, cache, *index, layer=0, max_len=300)
    assert any(why.startswith(reason) for why in explained.reasons["mosaic_gpu"]), explained


def test_explain_reports_a_k_that_is_too_large():
    with interpreting(True):
        explained = jaxkv.explain(jaxkv.select_topk, jax.ShapeDtypeStruct((2, 10_000), jnp.float32), 5000)
    assert explained.reasons["mosaic_gpu"] == ("`k` of 5000: supports at most 4096, which are sorted in registers",)
