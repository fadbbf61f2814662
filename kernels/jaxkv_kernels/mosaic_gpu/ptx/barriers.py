"""Barriers (mbarriers) that lanes address themselves.

Pallas cannot pass its barriers to inline PTX, so these are words of an array in shared memory that has rows of 32-bit
elements.  A barrier is given by its address.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, ptx


def barrier(ref, place: tuple[int, int], n) -> ir.Value:
    """The address of the n-th of the barriers that begin at row and column `place` of `ref`; the column is even.

    `n` is an int, or a register.
    """
    row, column = place
    first = 4 * (row * ir.MemRefType(ref.type).shape[1] + column)
    offset = c32(first + 8 * n) if isinstance(n, int) else arith.addi(c32(first), arith.shli(n, c32(3)))
    return at(mgpu.utils.memref_ptr(ref), offset)


def start(barriers: list[ir.Value], arrivals: int) -> None:
    """Initializes barriers; returns once all lanes of the CTA see them."""
    first = arith.cmpi(arith.CmpIPredicate.eq, mgpu.utils.thread_idx(), c32(0))
    for each in barriers:
        ptx(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", each, predicate=first)
    ptx("bar.sync 0;", convergent=True)


def arrive(barrier) -> None:
    """Arrives for the calling lane."""
    ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", barrier)


def arrive_for_copies(barrier) -> None:
    """Arrives for the calling lane once its copies (`cp.async`) have landed."""
    ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier)


def wait(barrier, phase) -> None:
    """Waits until a barrier has completed for the `phase`-th time, counted from 0."""
    ptx(
        "{ .reg .pred p; .reg .b32 parity; and.b32 parity, $1, 1; again: "
        "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], parity; @!p bra again; }",
        barrier,
        phase,
        convergent=True,
    )
