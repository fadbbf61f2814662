"""How consumers learn that half a tile of keys is stored: from the lanes of one CTA, or of two that share tiles.

Two CTAs of a cluster, which attend to the same keys, each store half of the rows of a tile to both.  What goes to the
other CTA is not ordered by an arrival: a barrier there counts its bytes as they land (`st.async`), beside the arrivals
of its own lanes.  Pallas's barriers have no such counts, so these are in `stats`.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.gather import lanes
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

HALVES = 4
"""Halves of the two tiles of a pair: 2 * tile + half."""


@dataclass(frozen=True)
class OwnFull:
    """For tiles that a CTA loads for itself."""

    barriers: Any

    def start(self) -> None:
        """Nothing: the kernel starts barriers of its own."""

    def arrive(self, n: int) -> None:
        """Each lane of the producer signals what it has stored."""
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
    """Of latents in shared memory."""

    def start(self) -> None:
        """Starts the barriers, in all lanes of both CTAs."""
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: lanes.start_barriers(ref, HALVES))(self.stats)

    def arrive(self, n: int) -> None:
        """As above; as many bytes come from the other CTA."""
        nbytes = TILE // 2 * HALF * self.itemsize // lanes.THREADS
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: lanes.arrive(ref, n, nbytes))(self.stats)

    def wait(self, n: int, turn) -> None:
        """As above."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def wait(_, ref, turn):
            lanes.wait(ref, n, turn.registers.item())

        wait(self.stats, turn)
