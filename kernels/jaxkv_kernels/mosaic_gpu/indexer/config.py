"""The numbers of the indexer's kernels that can be tuned, and the reason for each default.

Times are in milliseconds on an H200 (jax 0.11.2), for 64 requests of 32,768 tokens with 64 heads unless another call is
named.
"""

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
    """Tiles of keys in shared memory, per consumer; fewer if queries leave less room.  With 2, 3, 4 and 6 stages,
    calls with two query tokens of e4m3 take 0.0825, 0.0807, 0.0813 and 0.0830 ms."""
    query_stages: int = 2
    """How many groups of query tokens (`groups.py`) have their queries in shared memory at once."""
    producer_registers: int = 40
    """Registers per lane of the producer warpgroup."""

    @property
    def consumer_registers(self) -> int:
        """Registers per lane of each consumer: an equal share of those at launch, less the producer's."""
        warpgroups = self.consumers + 1
        launched = 512 // warpgroups // 8 * 8 * warpgroups
        return (launched - self.producer_registers) // self.consumers // 8 * 8

    def __post_init__(self):
        require(
            2 <= self.consumers <= 4, self, "consumers", "2 to 4, as a warpgroup has at most 256 registers per lane"
        )
        require(self.stages_per_consumer >= 1, self, "stages_per_consumer", "1 or more")
        require(1 <= self.query_stages <= 2, self, "query_stages", "1 or 2, which always fit in shared memory")
        require(self.producer_registers in (24, 40, 56), self, "producer_registers", "24, 40 or 56")


def default_config(*, quantised: bool, converted: bool, columns: int) -> IndexerConfig:
    """The default configuration of a call.

    `columns` is the width of its products (query tokens x heads); `quantised` is whether keys are e4m3, and `converted`
    whether they are converted to the dtype of the queries.

    Four consumers with two stages each are compared with the three consumers with three stages of `IndexerConfig`.  For
    e4m3 keys and two query tokens of e4m3 (128 columns), four take 0.0799 instead of 0.0807, but for one query token
    (64 columns) 0.0700 instead of 0.0690.  For converted keys and one query token of bf16 (64 columns), they take
    0.0882 (0.0897 with three stages) instead of 0.0946; with 128 columns, converted keys leave too few registers for
    four consumers.  For a chunk of 512 query tokens of one request, four consumers with three stages take 0.250 instead
    of 0.254 with e4m3 keys; with bf16 keys, four consumers take 0.505 instead of 0.387.
    """
    if quantised and (columns > TILE) != converted:
        return IndexerConfig(consumers=4, stages_per_consumer=2)
    return IndexerConfig()
