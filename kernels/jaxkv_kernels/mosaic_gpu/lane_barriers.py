"""Barriers (mbarriers) in an array of shared memory, at which each lane arrives by inline PTX.

Pallas's barriers cannot be passed to inline PTX.  Waits are given the phase.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.ptx import barriers
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES
from jaxkv_kernels.mosaic_gpu.ptx.inline import ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

PLAIN = plgpu.RefType()


@dataclass(frozen=True)
class LaneBarriers:
    """`count` barriers in shared memory."""

    memory: Any
    """Shared memory with rows of 32-bit elements; barrier n takes two elements, from column 2 n after `place` on."""
    place: tuple[int, int]
    """Row and column."""
    count: int
    arrivals: int = LANES

    def start(self) -> None:
        """Initializes the barriers; all lanes of the CTA call this."""

        @plgpu.inline_mgpu(arg_types=(PLAIN,))
        def start(_, ref):
            own = [self.of(ref, n) for n in range(self.count)]
            barriers.start(own, self.arrivals)

        start(self.memory)

    def of(self, ref, n):
        """The address of a barrier, for inline PTX, where `ref` is `memory`, and `n` an int or a register."""
        return barriers.barrier(ref, self.place, n)

    def arrive(self, n: int) -> None:
        """Signals that the calling lane of the producer has stored its chunks."""

        @plgpu.inline_mgpu(arg_types=(PLAIN,))
        def arrive(_, ref):
            barriers.arrive(self.of(ref, n))

        arrive(self.memory)

    def wait(self, n: int, phase) -> None:
        """Waits for completion number `phase` of barrier `n`, counted from 0; wgmma may then read the memory."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR))
        def wait(_, ref, phase):
            barriers.wait(self.of(ref, n), phase.registers.item())
            ptx("fence.proxy.async.shared::cta;")

        wait(self.memory, phase)

    def wait_for_copies(self, n, phase) -> None:
        """The same for what bulk copies bring, where `n` is traced."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR))
        def wait(_, ref, n, phase):
            barriers.wait(self.of(ref, n.registers.item()), phase.registers.item())

        wait(self.memory, n, phase)


class CopyBarriers(LaneBarriers):
    """Each lane arrives twice: for what it has stored, and once what it copies (`cp.async`) has landed."""

    def arrive(self, n: int) -> None:
        """Signals that the calling lane of the producer has started the last of its copies."""

        @plgpu.inline_mgpu(arg_types=(PLAIN,))
        def arrive(_, ref):
            barriers.arrive(self.of(ref, n))
            barriers.arrive_for_copies(self.of(ref, n))

        arrive(self.memory)


@dataclass(frozen=True)
class InterpretedBarriers:
    """Barriers of Pallas, for its interpreter."""

    barriers: Any

    def start(self) -> None:
        """Does nothing, because Pallas initializes its barriers itself."""

    def arrive(self, n: int) -> None:
        """Signals that the producer has stored what the barrier is for."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers[n])

    def wait(self, n: int, phase) -> None:
        """Waits for a barrier; Pallas knows the phase."""
        del phase
        plgpu.barrier_wait(self.barriers[n])
