"""The calls that tests of other libraries make, as published with pull requests on the strides of caches.

Each `Calls` has the parameters of one test: every argument that varies, with its published values.  The words and the
code are jaxkv's own.  A shape of an array is written as its axes, outermost first, as in
`tests/layout/test_published_shapes.py`: L layers, B blocks, N tokens of a block, H heads, C content, and 2 for keys and
values.  The sizes of caches are published for GPUs; `on_cpu` has what replaces them where a CPU runs the calls.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest

from support.cases import combinations

STRIDES_OF_XPU = "https://github.com/vllm-project/vllm-xpu-kernels/pull/165"
CROSS_LAYER_OF_XPU = "https://github.com/vllm-project/vllm-xpu-kernels/pull/335"
LARGE_GROUPS_OF_XPU = "https://github.com/vllm-project/vllm-xpu-kernels/pull/409"
SPECULATIVE_OF_XPU = "https://github.com/vllm-project/vllm-xpu-kernels/pull/455"
CONTIGUITY_OF_TRTLLM = "https://github.com/vllm-project/vllm/pull/34158"
DEQUANTISED_FOR_TRTLLM = "https://github.com/vllm-project/vllm/pull/36867"

Request = tuple[int, int]
"""Query tokens, and all tokens of a request."""


@dataclass(frozen=True)
class Case:
    """A call.  The first fields are those of its cache."""

    requests: tuple[Request, ...]
    sizes: tuple[int, int]
    """Values of a key, and of a value."""
    block_size: int
    num_blocks: int
    heads: tuple[int, int]
    """Query heads and KV heads."""
    shape: str = "2BNHC"
    num_layers: int = 1
    formats: tuple[str, str] = ("bf16", "bfloat16")
    """The format of the entries, and the dtype of the queries."""
    window: tuple[int, int] = (-1, -1)
    causal: bool = True
    sinks: bool = False
    logit_cap: float | None = None

    @property
    def latents(self) -> bool:
        """Whether values are the first part of their keys."""
        return self.sizes[0] != self.sizes[1]


@dataclass(frozen=True)
class Calls:
    """The calls of a test: all combinations of its parameters."""

    source: str
    """The address of the pull request."""
    name: str
    """The name of the test there."""
    axes: Mapping[str, Sequence[Any]]
    """The values of the fields of `Case` that vary, or are not the default."""
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace published ones where a CPU runs the calls."""
    outside: str = ""
    """Parameters of the test that no call of jaxkv has."""

    def cases(self) -> Iterator[tuple[Case, bool]]:
        """All cases, those of one cache in a row, each with whether it is one of a few that have every value."""
        names = [name.name for name in fields(Case) if name.name in self.axes]
        for values, marks, _ in combinations(*(self.axes[name] for name in names), default=0):
            yield Case(**dict(zip(names, values, strict=True))), pytest.mark.slow not in marks


def drawn_requests(batch: int, most_new: int, most_before: int) -> tuple[Request, ...]:
    """Random numbers of new tokens, and of tokens before them, of which those of the last request are the largest."""
    rng = np.random.default_rng(batch)
    new = [*rng.integers(1, max(most_new, 2), batch - 1), most_new]
    before = [*rng.integers(1, most_before, batch - 1), most_before]
    return tuple((int(q), int(q + k)) for q, k in zip(new, before, strict=True))


DECODED = (
    ((1, 1025),),
    ((1, 523), (1, 37), (1, 2011)),
    ((1, 13000),),
    ((1, 523), (1, 37), (1, 2011), (1, 5000)),
)
WINDOWS = (-1, 127), (127, -1), (64, 64), (-1, -1)
BF16, F16, FP8 = ("bf16", "bfloat16"), ("f16", "float16"), ("fp8", "bfloat16")
HEAD_SIZES = tuple((size, size) for size in (64, 128, 192, 256))
FEW_BLOCKS = {"num_blocks": 240}
"""More than the blocks of all requests; the published tests have 2,048, or more than int32 offsets can address."""

ATTENTION = (
    Calls(
        STRIDES_OF_XPU,
        "test_varlen_with_paged_kv",
        {
            "requests": [((1, 1328), (5, 18), (129, 463))],
            "heads": [(8, 2)],
            "sizes": HEAD_SIZES,
            "block_size": [64, 128],
            "num_blocks": [2048],
            "window": WINDOWS,
            "causal": [False, True],
            "sinks": [False, True],
            "formats": [BF16, FP8],
        },
        on_cpu=FEW_BLOCKS,
        outside="is_paged=False: keys and values that are in no cache",
    ),
    Calls(
        STRIDES_OF_XPU,
        "test_varlen_with_paged_kv, few parameters",
        {
            "requests": [((1, 1328), (5, 18), (129, 463))],
            "heads": [(8, 2)],
            "sizes": [(64, 64), (128, 128)],
            "block_size": [64, 128],
            "num_blocks": [64],
            "window": [(-1, -1), (127, 127)],
            "causal": [False, True],
            "sinks": [False, True],
            "formats": [BF16, FP8],
        },
    ),
    # There, sinks are not combined with windows.
    Calls(
        STRIDES_OF_XPU,
        "test_decode_with_paged_kv",
        {
            "requests": DECODED,
            "heads": [(8, 2)],
            "sizes": HEAD_SIZES,
            "block_size": [64, 128],
            "num_blocks": [2048],
            "window": WINDOWS,
            "causal": [False],
            "sinks": [False, True],
            "formats": [BF16, FP8],
        },
        on_cpu=FEW_BLOCKS,
    ),
    # Values are the first 128 of the 192 values of their key.
    Calls(
        STRIDES_OF_XPU,
        "test_decode_with_paged_kv_mla",
        {
            "requests": [DECODED[0], DECODED[1], DECODED[3]],
            "heads": [(8, 1), (16, 1), (8, 2)],
            "sizes": [(192, 128)],
            "block_size": [64, 128],
            "num_blocks": [2048],
            "shape": ["BNHC"],
            "causal": [False],
        },
        on_cpu=FEW_BLOCKS,
    ),
    Calls(
        CROSS_LAYER_OF_XPU,
        "test_decode_with_cross_layer_paged_kv",
        {
            "requests": [DECODED[1]],
            "heads": [(8, 2)],
            "sizes": [(64, 64), (128, 128)],
            "block_size": [16],
            "num_blocks": [2048],
            "shape": ["BL2NHC"],
            "num_layers": [2, 16],
            "window": [(-1, -1), (127, -1)],
            "causal": [False],
            "formats": [BF16, FP8],
        },
        on_cpu=FEW_BLOCKS,
    ),
    Calls(
        LARGE_GROUPS_OF_XPU,
        "test_decode_large_gqa_ratio",
        {
            "requests": [((1, 523), (1, 37), (1, 211)), ((1, 13000),)],
            "heads": [(71, 1), (16, 1), (17, 1)],
            "sizes": [(64, 64)],
            "block_size": [16, 64],
            "num_blocks": [2048],
            "causal": [False, True],
            "formats": [BF16, F16],
        },
        on_cpu={"num_blocks": 820},
    ),
    Calls(
        SPECULATIVE_OF_XPU,
        "test_spec_decode_uniform_qlen",
        {
            "requests": [
                tuple((q, n) for n in lengths)
                for q, lengths in itertools.product((2, 3, 4), ((1328, 18, 463), (1025, 523, 37, 200)))
            ],
            "heads": [(8, 2), (16, 1)],
            "sizes": [(128, 128)],
            "block_size": [16, 32, 64],
            "num_blocks": [4096],
            "window": [(-1, -1), (256, 0)],
            "sinks": [False, True],
            "formats": [BF16, F16],
        },
        on_cpu=FEW_BLOCKS,
    ),
    Calls(
        CONTIGUITY_OF_TRTLLM,
        "test_flashinfer_trtllm_decode_with_baseline",
        {
            "requests": [drawn_requests(4, 1, 4096), drawn_requests(12, 1, 4096)],
            "heads": [(64, 8), (40, 8)],
            "sizes": [(128, 128)],
            "block_size": [16],
            "num_blocks": [32768],
            "shape": ["B2HNC"],
            "window": [(-1, -1), (127, -1)],
            "logit_cap": [None, 50.0],
            "sinks": [True, False],
            "formats": [BF16, FP8, ("fp8", "float8_e4m3fn")],
        },
        on_cpu={"num_blocks": 3200},
        outside="results in float8 and FP4",
    ),
    Calls(
        CONTIGUITY_OF_TRTLLM,
        "test_flashinfer_trtllm_prefill_with_baseline",
        {
            "requests": [drawn_requests(4, 1024, 4096), drawn_requests(12, 1024, 4096)],
            "heads": [(64, 8), (40, 8)],
            "sizes": [(128, 128)],
            "block_size": [16],
            "num_blocks": [32768],
            "shape": ["B2HNC"],
            "window": [(-1, -1), (127, -1)],
            "sinks": [True, False],
            "formats": [BF16, ("fp8", "float8_e4m3fn")],
        },
        on_cpu={"num_blocks": 3200, "requests": drawn_requests(4, 64, 512)},  # of 1,024 and 4,096 tokens
        outside="results in float8 and FP4",
    ),
    # Llama 3.2 1B, with which the pull request was run: 167,623 blocks take 88 GB.
    Calls(
        CONTIGUITY_OF_TRTLLM,
        "test_cpu_offloading, the cache",
        {
            "requests": [((1, 10002),), ((1, 301), (1, 10002))],
            "heads": [(32, 8)],
            "sizes": [(64, 64)],
            "block_size": [16],
            "num_blocks": [16384],
            "shape": ["B2HLNC"],
            "num_layers": [16],
        },
        on_cpu={"num_blocks": 40, "requests": ((1, 301), (1, 200))},
        outside="blocks in host memory of 48 tokens, three times those of the device",
    ),
)


def of_pages(heads: int, size: int, block_size: int, batch: int, pages: int, shape: str = "B2HNC", **more: int) -> Case:
    """A case of `pages` whole blocks of float8 per request."""
    sizes = {"sizes": (size, size), "block_size": block_size, "heads": (heads, heads), "num_blocks": 128}
    requests = ((1, pages * block_size),) * batch
    return Case(requests=requests, shape=shape, formats=FP8, **{**sizes, **more})  # type: ignore[arg-type]


GATHERS = {
    **{
        f"{heads} x {size}, blocks of {block_size}, {batch} x {pages} pages, {shape}": of_pages(
            heads, size, block_size, batch, pages, shape, num_layers=1 if shape == "B2HNC" else 4
        )
        for heads, size, block_size, batch, pages, shape in itertools.product(
            (1, 8), (64, 128), (16, 32), (1, 4), (3, 8), ("B2HNC", "B2HLNC")
        )
    },
    "pages of no block": of_pages(8, 64, 16, 3, 3),
    "no pages": of_pages(4, 64, 16, 2, 4),
    "scales that differ": of_pages(8, 64, 16, 1, 2),
    "one page per request": of_pages(8, 128, 16, 3, 1),
    "large ids": of_pages(8, 128, 16, 1, 3, num_blocks=32768),
    "large blocks": of_pages(4, 128, 64, 2, 4),
    "many layers": of_pages(8, 64, 16, 4, 6, "B2HLNC", num_layers=36),
}
"""The calls of `test_trtllm_kvfp8_dequant.py` of `DEQUANTISED_FOR_TRTLLM`, by which pages of float8 become bfloat16.
Four layers are jaxkv's number: the published one is not in the page.  On CPUs, "large ids" has 1,024 blocks.
"""
ABSENT = {"pages of no block": [[0, 1, 0], [1, 1, 1], [0, 0, 1]], "no pages": [[1] * 4] * 2}
"""Which pages have no block, in those cases; the published tests have page 0 there, and jaxkv -1."""
