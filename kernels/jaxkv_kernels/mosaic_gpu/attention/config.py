"""The numbers of the attention kernels that can be tuned, and the reason for each default.

Defaults were measured on an H200.  What is not here follows from the hardware: tiles are 64 rows by 64 keys because
a warpgroup's wgmma has 64 rows and because two such tiles of latents are what shared memory holds beside the queries.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxkv_kernels.mosaic_gpu.tile_scheduler import PAIR_COSTS, TILE_COSTS, SplitCosts
from jaxkv_kernels.tuning import require

TILE = 64
"""Rows of a tile of queries, and keys (tokens) of a tile of keys."""
PAIR = 2 * TILE
"""Keys of two tiles: one for each consumer warpgroup."""
HALF = 256
"""Columns of an MLA latent, and of the output, that one of two consumer warpgroups accumulates."""
FEW_ROWS = 16
"""Rows (query tokens x heads of a request) up to which `decode_mla` runs the schedule with swapped operands.

At 16 rows it is memory-bound.  32 rows would fit, with half of the query stages, but took 6 % longer than the wide
schedule.
"""
GATHERED = ("fp8_v4", "nvfp4_ds_mla", "mxfp4_ds_mla")
"""Formats of latents that only the schedule of sparse attention decodes."""


def by_slots(entry, rows: int) -> bool:
    """Whether dense calls with `rows` rows per request run as sparse attention to all slots of the request."""
    return entry.format in GATHERED or (entry.format == "fp8_ds_mla" and rows > FEW_ROWS)


_QUANTISED_TILE_COSTS = replace(TILE_COSTS, least=4)
THRESHOLDS = (0, 4, 8, 12)
_PRODUCER_REGISTERS = (24, 40)


@dataclass(frozen=True, kw_only=True)
class WideConfig:
    """`decode_mla` with more than FEW_ROWS rows per request."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "prefetch": (True, False),
        "rescale_threshold": THRESHOLDS,
        "producer_registers": _PRODUCER_REGISTERS,
        "split_costs": tuple(replace(PAIR_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    producer_registers: int = 24
    """Registers per lane of the producer warpgroup.  The consumers get the rest, 240 each: an output half takes 128."""
    rescale_threshold: int = 8
    """How far, in powers of 2, a score may exceed the running maximum before sums are rescaled.  At 8, sums are nearly
    never rescaled after the first tiles, and weights of at most 256 lose no precision in bf16 or float16."""
    prefetch: bool = True
    """Whether a cluster prefetches its next pair of tiles to the L2 cache, where a page is contiguous.  CTAs without a
    cluster never prefetch: they are memory-bound, and lose 10 % to the additional requests."""
    split_costs: SplitCosts = PAIR_COSTS
    """In steps of two tiles.  For each request, a CTA loads 64 KiB of queries and stores 64 KiB of results."""

    def __post_init__(self):
        _check_registers(self, 24, 40, 56)
        check_threshold(self)


def wide_config(rows: int) -> WideConfig:
    """The default configuration of a `decode_mla` call with `rows` rows per request.

    With up to TILE rows, an overhead of 1 instead of 2 steps is faster: 64 requests of 256 to 1,024 tokens, with 16
    heads and 4 query tokens, take 0.0309 ms instead of 0.0320.  Clusters, which have more rows, are up to 1 % slower.
    With `split` of 16, a plan would leave such requests whole, which takes 0.0376 ms.
    """
    return WideConfig(split_costs=replace(PAIR_COSTS, overhead=1, split=4)) if rows <= TILE else WideConfig()


@dataclass(frozen=True, kw_only=True)
class QuantisedWideConfig:
    """`decode_mla` with more than FEW_ROWS rows per request, and quantised entries."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "prefetch": (True, False),
        "producer_registers": (56, 72, 88),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(PAIR_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    producer_registers: int = 72
    """Registers per lane of the producer warpgroup, which holds half a tile of keys, 32 registers, to convert it."""
    prefetch: bool = True
    """As in WideConfig."""
    rescale_threshold: int = 8
    """As in WideConfig."""
    split_costs: SplitCosts = PAIR_COSTS
    """In steps of two tiles, as in WideConfig."""

    def __post_init__(self):
        _check_registers(self, 56, 72, 88)
        check_threshold(self)


@dataclass(frozen=True, kw_only=True)
class FewRowsConfig:
    """`decode_mla` with up to FEW_ROWS rows per request."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "query_stages": (2, 3, 4),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(TILE_COSTS, least=least) for least in (1, 2, 4)),
    }

    stages: int = 2
    """Tiles of keys in shared memory, 72 KiB each."""
    query_stages: int = 4
    """Work tiles whose queries, or results, are in shared memory, 18 KiB each."""
    rescale_threshold: int = 8
    """As in WideConfig.  Here a rescale costs more, since all warps must agree on the maximum."""
    split_costs: SplitCosts = TILE_COSTS
    """In steps of one tile.  Queries and results are copied during the walk over keys, and splits are small."""

    def __post_init__(self):
        require(self.stages == 2, self, "stages", "2, which is what shared memory holds")
        require(2 <= self.query_stages <= 4, self, "query_stages", "2 to 4, which is what shared memory holds")
        check_threshold(self)


@dataclass(frozen=True, kw_only=True)
class FewRowsQuantisedConfig:
    """`decode_mla` with up to FEW_ROWS rows per request, and entries of format `fp8` or `fp8_ds_mla`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "keys_at_once": (1, 2, 3),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(_QUANTISED_TILE_COSTS, least=least) for least in (2, 4, 8)),
    }

    stages: int = 4
    """Tiles of entries in shared memory, 36 or 41 KiB each.  A multiple of the number of consumers, so that a consumer
    always uses the same stages."""
    consumers: int = 2
    """Consumer warpgroups, which take turns at tiles."""
    query_stages: int = 2
    """Work tiles whose queries are in shared memory, 18 KiB each."""
    keys_at_once: int = 2
    """Groups of 64 columns of keys that are converted at once, while the products of the previous groups run.  Each
    converted group takes 16 registers per lane."""
    values_at_once: int = 1
    """Groups of 16 tokens whose values are converted at once, likewise.  128 columns take 8 registers per lane."""
    producer_registers: int = 88
    """As in WideConfig.  The producer holds the queries of a work tile while it scales them."""
    rescale_threshold: int = 4
    """As in WideConfig.  Weights are float16, multiplied by a power of two for which the threshold leaves room.  So a
    lower threshold keeps all bits of smaller weights: with 4, of those down to 2**-24."""
    split_costs: SplitCosts = _QUANTISED_TILE_COSTS
    """In steps of one tile, which has half the bytes of a bf16 tile."""

    def __post_init__(self):
        require(self.consumers in (2, 3, 4), self, "consumers", "2 to 4, which have registers for their results")
        most = 20 if isinstance(self, KVQuantisedConfig) else 4
        ok = self.stages % self.consumers == 0 and self.consumers <= self.stages <= most
        require(ok, self, "stages", f"a multiple of the {self.consumers} consumers, at most {most}")
        require(1 <= self.query_stages <= 2, self, "query_stages", "1 or 2, which is what shared memory holds")
        require(1 <= self.keys_at_once <= 4, self, "keys_at_once", "1 to 4")
        require(self.values_at_once in (1, 2, 4), self, "values_at_once", "1, 2 or 4, divisors of the 4 of a tile")
        _check_registers(self, 72, 88, 104)
        check_threshold(self)


@dataclass(frozen=True, kw_only=True)
class KVQuantisedConfig(FewRowsQuantisedConfig):
    """`decode_kv` with quantised entries."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        **FewRowsQuantisedConfig.SEARCH,
        "stages": (3, 4, 6, 8, 9),
        "values_at_once": (1, 2, 4),
    }

    stages: int = 6
    """The most tiles of keys and values in shared memory, 9 to 17 KiB each for heads of 128; larger ones leave room for
    fewer."""
    consumers: int = 3


def kv_quantised_config(entry) -> KVQuantisedConfig:
    """The default configuration of a `decode_kv` call with quantised entries.

    64 requests of 8,192 tokens with 64 heads and 8 KV heads:

    - `fp8` takes 0.248 ms on an H200 with 3 consumers and 6 stages, 0.252 with 9 stages, and 0.254 with 2 consumers
      and 8 stages.
    - `int8` takes 0.420 ms on an H100 with 3 consumers and 3 stages, 0.432 with 2 and 4, and 0.444 with 4 and 4; on an
      H200, 0.296 ms with 2 consumers and 4 stages, 0.314 with 6 stages, and 0.326 with 8.  Entries of 272 bytes share
      lines of the L2 cache with those of other heads, which other CTAs load at about the same time.  The more is
      loaded in advance, the more often a line is loaded twice.
    - `nvfp4` takes 0.239 ms on an H100 with 3 consumers and 6 stages, and 0.257 with 4 and 8.  It is bound by copies,
      which alone take 0.243 and 0.254; with each head's entries of a block in one piece (`BLHNC`), it takes 0.220 ms.
    - With heads wider than 128, more than 2 consumers would spill registers.
    """
    if max(entry.sizes) > 128:
        return KVQuantisedConfig(consumers=2, stages=8)
    if entry.format == "int8":
        return KVQuantisedConfig(stages=3, values_at_once=4)
    if entry.format == "nvfp4":
        return KVQuantisedConfig(values_at_once=4)
    return KVQuantisedConfig()


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """`decode_kv`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "stages": (1, 2, 3, 4),
        "query_stages": (1, 2, 3),
        "rescale_threshold": THRESHOLDS,
        "producer_registers": _PRODUCER_REGISTERS,
        "split_costs": tuple(replace(PAIR_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    stages: int = 4
    """The most tiles of keys and values per consumer warpgroup; large heads leave room for fewer."""
    query_stages: int = 2
    """The most work tiles whose queries, or results, are in shared memory; large heads leave room for fewer."""
    producer_registers: int = 40
    """As in WideConfig.  With pages of 16 tokens, the producer holds the blocks of 16 copies."""
    rescale_threshold: int = 8
    """As in WideConfig."""
    split_costs: SplitCosts = PAIR_COSTS
    """In steps of two tiles, as in WideConfig."""

    def __post_init__(self):
        require(self.stages >= 1, self, "stages", "1 or more")
        require(1 <= self.query_stages <= 4, self, "query_stages", "1 to 4")
        _check_registers(self, 24, 40, 56)
        check_threshold(self)


def _check_registers(config, *supported: int) -> None:
    # Half of what remains of the registers of three warpgroups must be a multiple of 8 as well.
    *others, most = supported
    ok = config.producer_registers in supported
    require(ok, config, "producer_registers", f"{', '.join(map(str, others))} or {most}")


def check_threshold(config) -> None:
    """ValueError unless weights of up to 2**`rescale_threshold` of this configuration fit float16."""
    ok = 0 <= config.rescale_threshold <= 14
    require(ok, config, "rescale_threshold", "0 to 14: weights reach 2**threshold, and float16 at most 65,504")
