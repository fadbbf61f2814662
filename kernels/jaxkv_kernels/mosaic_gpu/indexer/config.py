"""The numbers of the indexer's kernels that can be tuned, and the reason for each default."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxkv_kernels.tuning import require

TILE = 64
"""Keys of a tile: the rows of a warpgroup's wgmma."""


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The configuration of `indexer_logits`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "consumers": (2, 3, 4),
        "stages_per_consumer": (2, 3, 4, 6),
        "query_stages": (1, 2),
    }

    consumers: int = 3
    """Warpgroups that multiply; each has tiles of its own."""
    stages_per_consumer: int = 3
    """Tiles of keys in shared memory, per consumer; fewer where queries leave room for fewer.  More were no faster."""
    query_stages: int = 2
    """Requests whose queries are in shared memory."""
    producer_registers: int = 40
    """Registers per lane of the producer warpgroup."""

    @property
    def consumer_registers(self) -> int:
        """Registers per lane of each consumer: what the kernel is launched with, less the producer's."""
        warpgroups = self.consumers + 1
        launched = 512 // warpgroups // 8 * 8 * warpgroups
        return (launched - self.producer_registers) // self.consumers // 8 * 8

    def __post_init__(self):
        require(1 <= self.consumers <= 4, self, "consumers", "1 to 4")
        require(self.stages_per_consumer >= 1, self, "stages_per_consumer", "1 or more")
        require(1 <= self.query_stages <= 4, self, "query_stages", "1 to 4")
        require(self.producer_registers in (24, 40, 56), self, "producer_registers", "24, 40 or 56")
