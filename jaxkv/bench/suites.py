"""The named shapes of the benchmark, in suites."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxkv.bench.workload import Workload, workload

MLA_LAYERS = 61
"""The number of layers of DeepSeek V3."""

DENSE = (
    *("128x128x1x4096", "128x128x1x16384", "128x128x2x4096", "128x64x1x4096", "64x16x1x4096", "128x16x1x8192"),
    *("1x128x1x65536", "1x16x1x65536", "8x128x1x16384", "1x128x1x4096", "1x16x1x4096", "64x128x1x4096"),
    *("128x128x1x8192v", "128x16x1x8192v", "4x16x4x45118t"),
    *("64x16x1x1024u", "64x16x4x1024u", "64x128x1x1024u", "64x128x4x1024u"),
)
"""Dense decoding: requests x heads x query tokens x cached tokens, and the key of `LENGTHS` if lengths differ."""

QUANTISED = "128x128x1x4096", "128x16x1x8192", "64x16x1x4096", "1x128x1x65536"
"""Dense decoding of quantised entries."""

SPARSE = (
    *("128x128x1x8192", "128x128x2x32768", "64x64x1x8192", "8x128x1x32768", "1x128x1x65536"),
    *("64x16x1x32768", "64x8x1x32768"),
)
"""Attention to 2,048 selected slots; 16 and 8 heads are those of a device that shares 128 with others."""

V4 = "64x128x1x32768", "64x64x1x32768"
"""Attention to a window of 128 tokens and to 512 compressed entries, as DeepSeek V4 decodes."""

LOGITS = "64x64x1x32768", "64x64x2x32768", "128x64x1x8192"
"""The indexer's logits."""

LOGITS_OF_PREFILL = "1x64x512x32768"
"""The indexer's logits of a chunk of a prompt."""


def _cpu() -> Iterator[Workload]:
    """The suite `cpu`: every operation, with sizes that take about a second each on two cores."""
    for layers in (1, 4):
        for operation in ("write_mla", "gather_mla"):
            yield workload(suite="cpu", operation=operation, requests=2, tokens=4096, layers=layers)
        yield workload(suite="cpu", operation="decode_mla", requests=2, heads=16, tokens=2048, layers=layers)
    cross = partial(workload, suite="cpu", layers=4)
    yield cross(operation="decode_mla", requests=4, heads=16, q_len=2, tokens=1024, varlen="v")
    yield cross(operation="decode_mla_sparse", requests=2, heads=16, tokens=4096, chosen=1024)
    yield cross(operation="prefill_mla", requests=2, heads=4, q_len=128, tokens=256)
    yield cross(operation="prefill_kv", requests=2, heads=16, q_len=256, tokens=512, kv_heads=4)
    yield cross(operation="write_kv", requests=2, tokens=2048, kv_heads=4)
    yield cross(operation="gather_kv", requests=2, tokens=2048, kv_heads=4)
    yield cross(operation="decode_kv", requests=2, heads=16, tokens=2048, kv_heads=4)
    yield cross(operation="write_indexer_k", requests=2, tokens=4096)
    yield cross(operation="write_entries", requests=2, tokens=4096, format="fp8_ds_mla")
    yield cross(operation="gather_indexer_k", requests=2, tokens=4096)
    yield cross(operation="gather_entries", requests=2, tokens=4096, format="fp8_ds_mla")
    yield cross(operation="read_mla", requests=2, tokens=4096)
    yield cross(operation="read_kv", requests=2, tokens=2048, kv_heads=4)
    yield cross(operation="read_indexer_k", requests=2, tokens=4096)
    yield cross(operation="indexer_logits", requests=2, heads=16, tokens=4096)
    yield cross(operation="write_state", requests=2, tokens=1, block_size=1)
    yield cross(operation="read_state", requests=2, tokens=1, block_size=1)
    yield cross(operation="decode_delta_rule", requests=2, tokens=1, block_size=1)
    yield cross(operation="copy_blocks", requests=1, tokens=2048)
    yield cross(operation="read_blocks", requests=1, tokens=2048)
    yield cross(operation="write_blocks", requests=1, tokens=2048)
    yield cross(operation="plan_decode", requests=2, heads=16, tokens=2048)
    yield cross(operation="select_topk", requests=2, tokens=4096, chosen=1024)
    yield cross(operation="merge_states", requests=2, heads=16, tokens=4)
    yield workload(suite="cpu", operation="grouped_swiglu", requests=16, tokens=8, chosen=2, layers=1)
    yield workload(suite="cpu", operation="select_experts", requests=16, tokens=64, chosen=8, layers=1)
    yield workload(suite="cpu", operation="scaled_linear", requests=16, tokens=256, chosen=512, layers=1)


def _shape(text: str) -> dict[str, Any]:
    """A shape of the tables above as fields of a workload."""
    requests, heads, q_len, tokens = text.split("x")
    varlen = tokens.lstrip("0123456789")
    sizes = {"requests": requests, "heads": heads, "q_len": q_len, "tokens": tokens.removesuffix(varlen)}
    return {"varlen": varlen, **{name: int(size) for name, size in sizes.items()}}


def _peers() -> Iterator[Workload]:
    """The suite `peers`: the shapes that other libraries are timed on.

    Dense ones are mostly bound by arithmetic with 128 heads, and by memory with 16.
    """
    for layers in (1, MLA_LAYERS):
        row = partial(workload, suite="peers", layers=layers)
        for shape in DENSE:
            yield row(operation="decode_mla", **_shape(shape))
        for entries in ("fp8", "fp8_ds_mla"):
            for shape in QUANTISED:
                yield row(operation="decode_mla", format=entries, **_shape(shape))
        for shape in SPARSE:
            yield row(operation="decode_mla_sparse", chosen=2048, **_shape(shape))
        for dtype in ("bfloat16", "float8_e4m3fn"):
            for shape in LOGITS:
                yield row(operation="indexer_logits", query_dtype=dtype, **_shape(shape))
    once = partial(workload, suite="peers", layers=1)
    for shape in V4:
        yield once(operation="decode_mla_sparse", format="fp8_v4", window=128, chosen=512, **_shape(shape))
    yield once(operation="decode_mla_sparse", format="bf16", chosen=2048, **_shape("1x128x4096x32768"))
    yield once(operation="select_topk", requests=64, tokens=32768, chosen=2048)
    yield once(operation="select_topk", requests=128, tokens=8192, chosen=2048)
    yield once(operation="plan_decode", requests=128, heads=128, tokens=8192)
    yield from _blocks()
    cold = partial(workload, suite="peers", layers=MLA_LAYERS, cold=True, requests=8, tokens=1024)
    for operation in ("write_mla", "gather_mla"):
        for entries in ("bf16", "fp8", "fp8_ds_mla"):
            yield cold(operation=operation, format=entries)
    for operation in ("write_indexer_k", "gather_indexer_k"):
        yield cold(operation=operation)
    yield cold(operation="gather_entries", format="fp8_ds_mla")


def _blocks() -> Iterator[Workload]:
    """Blocks that DeepSeek V3.2's latents and indexer keys share, and padded blocks, to compare with plain ones."""
    for blocks in ("packed", "padded"):
        row = partial(workload, suite="peers", layers=MLA_LAYERS, blocks=blocks)
        for heads in (128, 16):
            yield row(operation="decode_mla", **_shape(f"64x{heads}x1x4096"))
        yield row(operation="decode_mla", format="fp8_ds_mla", **_shape(QUANTISED[1]))
        yield row(operation="decode_mla_sparse", chosen=2048, **_shape(SPARSE[0]))
        yield row(operation="indexer_logits", query_dtype="float8_e4m3fn", **_shape(LOGITS[2]))


def _copies() -> Iterator[Workload]:
    """The suite `copies`: writes, gathers and reads of 8,192 tokens, writes of 128 tokens, and copies of 64 blocks."""
    mla = partial(workload, suite="copies", layers=MLA_LAYERS)
    yield mla(operation="write_mla", requests=8, tokens=1024)
    yield mla(operation="write_mla", requests=128, tokens=1)
    yield mla(operation="write_mla", requests=8, tokens=1024, rotated=True)
    yield mla(operation="write_mla", requests=128, tokens=1, rotated=True)
    yield mla(operation="gather_mla", requests=8, tokens=1024)
    yield mla(operation="write_kv", requests=8, tokens=1024, kv_heads=8)
    yield mla(operation="gather_kv", requests=8, tokens=1024, kv_heads=8)
    yield mla(operation="write_indexer_k", requests=8, tokens=1024)
    yield mla(operation="write_entries", requests=8, tokens=1024, format="fp8_ds_mla")
    yield mla(operation="gather_indexer_k", requests=8, tokens=1024)
    yield mla(operation="gather_entries", requests=8, tokens=1024, format="fp8_ds_mla")
    yield mla(operation="read_mla", requests=8, tokens=1024, format="fp8_ds_mla")
    yield mla(operation="read_kv", requests=8, tokens=1024, kv_heads=8)
    yield mla(operation="read_indexer_k", requests=8, tokens=1024)
    yield mla(operation="copy_blocks", requests=1, tokens=4096)
    yield mla(operation="read_blocks", requests=1, tokens=4096)
    yield mla(operation="write_blocks", requests=1, tokens=4096)


def _models() -> Iterator[Workload]:
    """The suite `models`: GQA and MHA, the indexer with bf16 keys and for chunks of prompts, and other operations."""
    for layers in (1, MLA_LAYERS):
        model = partial(workload, suite="models", layers=layers, operation="decode_kv")
        yield model(requests=64, heads=64, tokens=4096, kv_heads=8)
        yield model(requests=64, heads=32, tokens=8192, kv_heads=32)
        yield model(requests=1, heads=32, tokens=65536, kv_heads=8)
        yield model(requests=64, heads=64, tokens=4096, kv_heads=8, format="fp8")
    yield model(requests=64, heads=64, tokens=4096, kv_heads=8, blocks="planes")
    for entries in ("fp8", "int8", "nvfp4"):
        yield workload(
            suite="models", operation="decode_kv", layers=1,
            requests=64, heads=64, tokens=8192, kv_heads=8, format=entries,
        )  # fmt: skip
    logits = partial(workload, suite="models", layers=1)
    for shape in (*LOGITS[:2], LOGITS_OF_PREFILL):
        yield logits(operation="indexer_logits", format="bf16", **_shape(shape))
    yield logits(operation="indexer_logits", query_dtype="float8_e4m3fn", **_shape(LOGITS_OF_PREFILL))
    sparse = partial(workload, suite="models", operation="decode_mla_sparse", layers=1, chosen=2048)
    for entries in ("fp8_v4", "nvfp4_ds_mla", "mxfp4_ds_mla"):
        yield sparse(format=entries, **_shape(SPARSE[0]))
    for operation in ("write_state", "read_state"):
        yield workload(suite="models", operation=operation, requests=64, tokens=1, layers=4, block_size=1)
    step = partial(workload, suite="models", operation="decode_delta_rule", tokens=1, layers=4, block_size=1)
    for requests in (1, 64):
        for channel_decays in (False, True):
            yield step(requests=requests, channel_decays=channel_decays)
    experts = partial(workload, suite="models", operation="grouped_swiglu", layers=1)
    for tokens in (1, 32, 128, 256, 512, 8192):
        yield experts(requests=tokens, tokens=64, chosen=6)
    for tokens in (1, 32, 128):
        yield experts(requests=tokens, tokens=256, chosen=8)
    for tokens in (1, 32, 128, 8192):
        yield experts(requests=tokens, tokens=64, chosen=6, format="fp8")
    for tokens in (1, 32, 128):
        yield experts(requests=tokens, tokens=256, chosen=8, format="fp8")
    for tokens in (1, 32, 128):
        yield workload(suite="models", operation="scaled_linear", requests=tokens, tokens=16384, chosen=7168, layers=1)
        yield workload(suite="models", operation="select_experts", requests=tokens, tokens=256, chosen=8, layers=1)
    yield workload(suite="models", operation="merge_states", requests=128, heads=128, tokens=8, layers=1)
    prefill = partial(workload, suite="models", layers=1, requests=1, q_len=512, tokens=8192)
    yield prefill(operation="prefill_mla", heads=128)
    yield prefill(operation="prefill_kv", heads=64, kv_heads=8)


def _triton() -> Iterator[Workload]:
    """The suite `triton`: dense attention by GPUs without kernels of their own, beside the shapes of other suites.

    These are many tokens of few requests, quantised latents with 128 heads, and the heads of Llama 3 and GPT-OSS.
    """
    row = partial(workload, suite="triton", layers=1)
    for entries in ("bf16", "fp8", "fp8_ds_mla"):
        yield row(operation="decode_mla", format=entries, **_shape("8x16x1x32768"))
    for entries in ("fp8", "fp8_ds_mla"):
        yield row(operation="decode_mla", format=entries, **_shape("64x128x1x4096"))
    pairs = partial(row, operation="decode_kv", kv_heads=8)
    for entries in ("bf16", "fp8"):
        yield pairs(format=entries, **_shape("128x32x1x4096"))
        yield pairs(format=entries, head_dim=64, **_shape("64x64x1x8192"))


SHAPES = _cpu, _peers, _copies, _models, _triton
"""Functions that each yield the shapes of one suite."""

WORKLOADS = {made.name: made for suite in SHAPES for made in suite()}
"""Every shape, by name."""

SUITES = tuple(dict.fromkeys(made.suite for made in WORKLOADS.values()))
