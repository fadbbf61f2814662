"""Barriers (mbarriers) that lanes address themselves, and stores to the shared memory of another CTA that they count.

Pallas cannot pass its barriers to inline PTX, so these are words of an array in shared memory that has rows of 32-bit
elements.  A barrier is given by its address.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.ptx.stores import STORE_SHARED

STORE_PEER = (
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}}, [$5];"
)
"""Stores 16 bytes to the shared memory of another CTA, whose barrier counts them."""


def barrier(ref, place: tuple[int, int], n) -> ir.Value:
    """The address of the n-th of the barriers that begin at row and column `place` of `ref`; the column is even.

    `n` is an int, or a register.
    """
    row, column = place
    first = 4 * (row * ir.MemRefType(ref.type).shape[1] + column)
    offset = c32(first + 8 * n) if isinstance(n, int) else arith.addi(c32(first), arith.shli(n, c32(3)))
    return at(mgpu.utils.memref_ptr(ref), offset)


def start(barriers: list[ir.Value], arrivals: int, *, cluster: bool) -> None:
    """Initializes barriers; returns once all lanes of the CTA see them or, with `cluster`, those of all its CTAs."""
    first = arith.cmpi(arith.CmpIPredicate.eq, mgpu.utils.thread_idx(), c32(0))
    for each in barriers:
        ptx(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", each, predicate=first)
    if cluster:
        ptx("fence.mbarrier_init.release.cluster;")
        ptx("barrier.cluster.arrive.release.aligned;", convergent=True)
        ptx("barrier.cluster.wait.acquire.aligned;", convergent=True)
    else:
        ptx("bar.sync 0;", convergent=True)


def arrive(barrier, nbytes: int = 0) -> None:
    """Arrives for the calling lane.  The barrier then also waits for `nbytes` that another CTA stores."""
    if nbytes:
        first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(mgpu.utils.thread_idx(), c32(LANES)), c32(0))
        ptx(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], {nbytes};", barrier, predicate=first)
    ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", barrier)


def arrive_for_copies(barrier) -> None:
    """Arrives for the calling lane once its copies (`cp.async`) have landed."""
    ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier)


def wait(barrier, phase) -> None:
    """Waits until a barrier has completed for the `phase`-th time, counted from 0.

    Bytes that another CTA stores with `st.async` are in shared memory when its barrier has counted them.  A wait with
    `.acquire.cluster` would also invalidate the L1 cache, and with it the registers that were spilled there: sparse
    decode of 128 requests with 128 heads then takes 0.240 ms.
    """
    ptx(
        "{ .reg .pred p; .reg .b32 parity; and.b32 parity, $1, 1; again: "
        "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], parity; @!p bra again; }",
        barrier,
        phase,
        convergent=True,
    )


@dataclass(frozen=True)
class Peer:
    """The other CTA of a cluster of two, where a lane stores what it stores in its own."""

    rank: Any
    """Its number in the cluster: an int, or a register."""
    barrier: ir.Value
    """The barrier, in the calling CTA, whose counterpart there counts the bytes."""

    def store(self, start, offset: int, values) -> None:
        """Stores 16 bytes to the place that is `offset` bytes after `start` in the calling CTA."""
        ptx(STORE_PEER.format(offset=offset), self._there(start), *values, self._there(self.barrier))

    def _there(self, address) -> ir.Value:
        rank = c32(self.rank) if isinstance(self.rank, int) else self.rank
        return ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, rank, result_types=i32())


def store_16_bytes(start, offset: int, values, peer: Peer | None) -> None:
    """Stores 16 bytes to shared memory, and to the same place of the peer's."""
    ptx(STORE_SHARED.format(offset=offset), start, *values)
    if peer is not None:
        peer.store(start, offset, values)
