"""How consumers learn that half a tile of keys is stored: from the lanes of one CTA, or of two that share tiles.

Two CTAs of a cluster, which attend to the same keys, each store half of the rows of a tile to both.  An arrival does
not order the stores to the other CTA (`st.async`): a barrier there counts their bytes as they land, beside the arrivals
of its own lanes.  Pallas's barriers cannot count bytes of such stores, so these barriers are words of `stats`.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.gather import lanes
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

HALVES = 4
"""Halves of the two tiles of a pair, numbered 2 * tile + half."""


@dataclass(frozen=True)
class OwnFull:
    """For tiles that a CTA loads for itself."""

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
class SharedFull:
    """For tiles that two CTAs share."""

    stats: Any
    itemsize: int
    """Bytes per value of the latents in shared memory."""

    def start(self) -> None:
        """Initializes the barriers; all lanes of both CTAs call this."""
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: lanes.start_barriers(ref, HALVES))(self.stats)

    def arrive(self, n: int) -> None:
        """Signals the same, and that the barrier is to count as many bytes from the other CTA."""
        nbytes = TILE // 2 * HALF * self.itemsize // lanes.THREADS
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: lanes.arrive(ref, n, nbytes))(self.stats)

    def wait(self, n: int, turn) -> None:
        """Waits for a half, with the bytes of both CTAs; `turn` counts the pairs."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def wait(_, ref, turn):
            lanes.wait(ref, n, turn.registers.item())

        wait(self.stats, turn)
