"""What the scheduler weighs, and the numbers of sparse attention that can be tuned.

Defaults were measured on an H200.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxkv_kernels.mosaic_gpu.softmax import THRESHOLDS, check_threshold
from jaxkv_kernels.tuning import require

CTAS = 2
"""CTAs of a cluster that share the keys of each work tile, if requests are few."""
MERGING = 4
"""The cost of merging the results of these CTAs, in steps."""
SPLIT_COST_UNIT = 256
"""The cost of walking one step, in the unit of `SplitCosts.combining` and `SplitCosts.split`."""
PREFETCHED_TILES = 32
"""Key tiles per CTA from which sparse attention to `fp8_ds_mla` entries prefetches: with 64 it takes 1 % less time."""


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """The costs, besides walking over keys, that a plan weighs when it divides requests."""

    least: int
    """The fewest steps of a partition.  Combining shorter splits takes more time than they save."""
    overhead: int
    """The cost of beginning and ending a request, in steps."""
    combining: int
    """The cost of combining, if any request is split; a step costs SPLIT_COST_UNIT."""
    split: int
    """The cost of each split, in the same unit."""

    def __post_init__(self):
        require(self.least >= 1, self, "least", "at least 1 step")
        for field in ("overhead", "combining", "split"):
            require(getattr(self, field) >= 0, self, field, "0 or more")

    def of_shared_steps(self) -> "SplitCosts":
        """The costs if two CTAs share each step, which then takes half the time, and merge their results.

        Combining is made to look four times as expensive as it is, so that requests that are not much longer than
        others stay whole.  With the real cost, 64 requests of 256 to 1,024 tokens with 16 heads would be split, and
        take 0.0247 ms instead of 0.0215.
        """
        overhead = 2 * self.overhead + MERGING
        return replace(self, overhead=overhead, combining=8 * self.combining, split=2 * self.split)


PAIR_COSTS = SplitCosts(least=1, overhead=2, combining=256, split=16)
SLOT_COSTS = replace(PAIR_COSTS, split=4)
TILE_COSTS = SplitCosts(least=2, overhead=0, combining=128, split=2)


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """`decode_mla_sparse`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "producer_registers": (40, 56, 72, 88, 104),
        "units_ahead": (1, 2, 4),
        "prefetch": (True, False),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(SLOT_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    producer_registers: int = 56
    """Registers per lane of the producer warpgroup, which holds addresses of rows, the slots of two tiles and, for
    quantised entries, the units that are being loaded.  The consumers get the rest, 224 each."""
    units_ahead: int = 2
    """Units of quantised latents, 16 registers per lane each, that are loaded before the first of them is stored.  A
    divisor of the 4 units of a tile, so that each unit always has the same registers.  With 4, which need 104 registers
    of the producer, one request with 128 heads and `fp8_ds_mla` entries takes 0.0153 ms instead of 0.0145."""
    prefetch: bool = False
    """Whether the rows of the tile after next are prefetched to the L2 cache.  `fp8_ds_mla` entries are faster with
    it if a CTA has many tiles, and `fp8_v4` entries if it has few; 128 requests with 128 heads and bf16 entries take
    0.160 ms with it instead of 0.134.  The first two tiles of a CTA are not prefetched: one request took 0.0208 ms
    instead of 0.0145."""
    rescale_threshold: int = 8
    """As in MLADenseConfig."""
    split_costs: SplitCosts = SLOT_COSTS
    """In steps of two tiles.  With `split` of 16, 8 requests with 128 heads and `fp8_ds_mla` entries take 0.0255 ms
    instead of 0.0215: fewer, longer partitions.  With `least` of 2, one request takes 0.0190 ms instead of 0.0145."""

    def __post_init__(self):
        require(self.producer_registers in (40, 56, 72, 88, 104), self, "producer_registers", "40, 56, 72, 88 or 104")
        require(self.units_ahead in (1, 2, 4), self, "units_ahead", "1, 2 or 4, divisors of the units of a tile")
        check_threshold(self)


def sparse_config(format: str, tiles: int) -> SparseConfig:
    """The default configuration of a `decode_mla_sparse` call, for entries of a format and key tiles per CTA.

    Calls with few tiles per CTA are slower with prefetching: 8 requests with 128 heads and 2,048 slots (4 tiles) take
    0.0276 ms instead of 0.0215, and 32 requests (16 tiles) 0.0634 instead of 0.0594.  With an overhead of 2 steps, 64
    requests with 64 heads and 128 + 512 slots of `fp8_v4` entries stay whole, and take 0.0404 ms instead of 0.0354.
    With prefetching, these took 0.0300 ms instead of 0.0303, later, and with 128 heads 0.0354 instead of 0.0356 (the
    least of seven chains, beside other programs).  More tiles per CTA were not timed with the present loads.
    """
    if format in ("bf16", "f16"):
        return SparseConfig()
    if format == "fp8_v4":
        return SparseConfig(
            producer_registers=88, prefetch=tiles < PREFETCHED_TILES, split_costs=replace(SLOT_COSTS, overhead=1)
        )
    return SparseConfig(producer_registers=88, prefetch=format == "fp8_ds_mla" and tiles >= PREFETCHED_TILES)
