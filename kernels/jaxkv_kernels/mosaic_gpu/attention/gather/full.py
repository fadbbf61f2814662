"""How consumers learn that half a tile of keys is in shared memory: stored by the producer's lanes, or copied.

A copy of a lane (`cp.async`) lands after the lane has gone on, and then arrives at a barrier by itself.  Pallas has no
such arrivals, so the barriers of copied tiles are words of `stats`.
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
    """For tiles that lanes store."""

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
    """For tiles that are copied.  A lane arrives twice: for what it has stored (factors), and for its copies."""

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
