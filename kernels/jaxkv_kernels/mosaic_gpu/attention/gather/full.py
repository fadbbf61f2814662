"""How consumers wait for half a tile of keys, which the producer's lanes store or copy to shared memory.

Copies (`cp.async`) are asynchronous.  A lane therefore requests an arrival, which takes effect once its copies have
landed (`cp.async.mbarrier.arrive`).  Pallas has no such arrivals, so the barriers of copied tiles are words of `stats`.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.gather import lanes
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

HALVES = 4
"""Halves of the two tiles of a pair, numbered 2 * tile + half."""


@dataclass(frozen=True)
class StoredFull:
    """Barriers of tiles that lanes store."""

    barriers: Any

    def start(self) -> None:
        """Does nothing, because Pallas initializes its barriers itself."""

    def arrive(self, n: int) -> None:
        """Signals that the calling lane of the producer has stored its chunks of a half."""
        plgpu.barrier_arrive(self.barriers[n])

    def wait(self, n: int, turn) -> None:
        """Waits for a half; `turn` counts the pairs."""
        del turn
        plgpu.barrier_wait(self.barriers[n])


@dataclass(frozen=True)
class CopiedFull:
    """Barriers of tiles that are copied.  A lane arrives twice: for the factors that it stored, and for its copies."""

    stats: Any

    def start(self) -> None:
        """Initializes the barriers; all lanes of the CTA call this."""
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: lanes.start_barriers(ref, HALVES))(self.stats)

    def arrive(self, n: int) -> None:
        """Signals that the calling lane of the producer has started the last of its copies of a half."""
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: lanes.arrive(ref, n))(self.stats)

    def wait(self, n: int, turn) -> None:
        """Waits for a half; `turn` counts the pairs."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def wait(_, ref, turn):
            lanes.wait(ref, n, turn.registers.item())

        wait(self.stats, turn)
