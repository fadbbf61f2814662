"""The numbers of the experts' kernels that can be tuned, and the reason for each default.

Times are in milliseconds of the whole operation on an H200 (jax 0.11.2), with DeepSeek V2-Lite's 64 experts of 2,048 to
1,408 values and six experts per token.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxkv_kernels.expert_groups import usual_rows
from jaxkv_kernels.mosaic_gpu.runtime.device import multiprocessors
from jaxkv_kernels.tuning import require

FEATURES = 64
"""Rows of weights per product: those of a warpgroup's wgmma."""
ALIGN = 8
"""Groups of rows begin at multiples of it: wgmma's columns, and the rows of a swizzled tile."""
STEP = 64
"""Values of the summed dimension per step: a row of a swizzled tile."""
MOST_ROWS = 128
"""The most rows of a tile: a consumer's two accumulators then take 128 registers per lane."""
ONE_CONSUMER = 64
"""The most rows of a tile for which one consumer is faster than two."""
FEW_TOKENS = 64
"""Up to so many tokens, a tile has room for all of them, and they are not sorted by expert."""
MOST_ROWS_OF_FP8 = 112
"""The most rows of a tile with weights in float8.  With 128, for which registers do not suffice, 8,192 tokens take 2.22
instead of 1.85; with 64, 2.09."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The configuration of both products of `grouped_swiglu`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rows": (8, 16, 24, 32, 48, 64, 96, 128),
        "consumers": (1, 2),
        "stages": (3, 4, 6, 8, 12),
    }

    rows: int
    """Rows of a tile: tokens that are multiplied with weights in shared memory."""
    consumers: int
    """Warpgroups that multiply, each with 2 x 64 rows of weights.  Two read fewer bytes of tokens per weight."""
    stages: int = 12
    """Steps of 64 values of the summed dimension in shared memory; fewer if they do not fit."""
    producer_registers: int = 40
    """Registers per lane of the producer warpgroup, if there are two consumers."""

    @property
    def features(self) -> int:
        """Rows of weights that a CTA multiplies at a time, of each of two matrices or halves."""
        return self.consumers * FEATURES

    def __post_init__(self):
        require(
            self.rows % ALIGN == 0 and 0 < self.rows <= MOST_ROWS, self, "rows", f"a multiple of 8 up to {MOST_ROWS}"
        )
        require(self.consumers in (1, 2), self, "consumers", "1 or 2")
        require(self.stages >= 2, self, "stages", "2 or more")
        require(self.producer_registers in (24, 40, 56), self, "producer_registers", "24, 40 or 56")


def default_config(tokens: int, choices: int, experts: int) -> ExpertsConfig:
    """The default configuration for `choices` rows of `tokens` tokens in all, divided among `experts`.

    A tile has `usual_rows`, because weights are read once per tile.  128 tokens take 0.290 with tiles of 24 rows,
    0.294 with 16 and 0.291 with 32; 256 tokens take 0.300 with 40 and 0.306 with 32.  With few rows, which are bound
    by memory, smaller tiles of weights divide the work more evenly: with two consumers instead of one, 1 token takes
    0.042 instead of 0.040, 128 tokens 0.296 instead of 0.290, and 512 tokens, with tiles of 64 rows, 0.328 instead of
    0.322.
    """
    rows = tokens if tokens <= FEW_TOKENS else usual_rows(choices, experts, min(tokens, MOST_ROWS))
    rows = math.ceil(rows / ALIGN) * ALIGN
    return ExpertsConfig(rows=rows, consumers=1 if rows <= ONE_CONSUMER else 2)


def default_config_of_fp8(tokens: int, choices: int, experts: int, inner: int) -> ExpertsConfig:
    """The same for weights in float8, of experts of `inner` values.

    Two consumers convert weights while the other one multiplies: 32 tokens take 0.167 instead of 0.176, 128 tokens
    0.184 instead of 0.200, and 512 tokens 0.227 instead of 0.260.  But if there are too few tiles of features for all
    multiprocessors, one consumer divides them further: 1 token takes 0.034 instead of 0.037.
    """
    rows = math.ceil(usual_rows(choices, experts, min(tokens, MOST_ROWS_OF_FP8)) / ALIGN) * ALIGN
    tiles = min(choices, experts) * math.ceil(inner / (2 * FEATURES))
    return ExpertsConfig(rows=min(rows, MOST_ROWS_OF_FP8), consumers=1 if tiles < 0.75 * multiprocessors() else 2)
