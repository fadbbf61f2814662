"""Two CTAs of a cluster share the keys of each work tile, and merge their results.

If requests are few, this leaves most of them whole: fewer splits go through device memory, and `combine` has less to do
or nothing.  Each CTA attends to half of the steps.  Then the CTAs exchange results, as splits: float16 values divided
by the largest magnitude of their row, log-sum-exps, and scales.  They go through the L2 cache, because remote shared
memory is slower: a CTA copies them to device memory by TMA, arrives at the cluster barrier `sent` once they are there,
and the other CTA copies them from there.

Work tiles use two places in device memory in turn.  A CTA may write to a place again once the other one has arrived at
`sent` for the next work tile, since it has then read this one.

How PTX's memory model orders a copy to device memory before the copy from there by the other CTA:

    sender     cp.async.bulk.wait_group 0       the copy is complete, and visible to the thread that issued it
               bar.sync of the warpgroup        and to the threads that arrive
               fence.acq_rel.cluster            `Exchange.arrive`: Pallas's arrive has the scope of the CTA alone
               mbarrier.arrive.shared::cluster
    receiver   mbarrier.try_wait
               fence.acq_rel.cluster            `Exchange.wait`: likewise
               fence.proxy.async.global         copies are made by another proxy than the one that has waited
               cp.async.bulk

The fences also order copies from a place before the next ones to it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, HalvesEpilogue, split_scale
from jaxkv_kernels.mosaic_gpu.ptx.inline import ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, WGMMA, filled, over_columns
from jaxkv_kernels.mosaic_gpu.softmax import EMPTY, OnlineSoftmax
from jaxkv_kernels.mosaic_gpu.tile_scheduler import CTAS, WorkTile

PLACES = 2
"""Places in device memory for the results of successive work tiles."""

ALIGNMENT = 128
"""Copies to shared memory begin at multiples of this many bytes."""


def own_steps(tile: WorkTile, cta, step: int) -> WorkTile:
    """The part of a work tile that one of the CTAs attends to: at least one step of `step` tokens.

    The second CTA has nothing to attend to in a work tile of one step.  It gets the step after the request's last one,
    which is masked.
    """
    middle = tile.begin + lax.div(tile.end - tile.begin + 1, jnp.int32(CTAS))
    past = lax.div(tile.keys + (step - 1), jnp.int32(step))
    is_first, has_steps = cta == 0, middle < tile.end
    begin = jnp.where(is_first, tile.begin, jnp.where(has_steps, middle, past))
    end = jnp.where(is_first, middle, jnp.where(has_steps, tile.end, past + 1))
    return tile._replace(begin=begin, end=end)


def exchange_types(
    partitions: int, rows: int, columns: int, dtype
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], dict[str, Any]]:
    """Results of a kernel that are the places in device memory, and scratch types.  Both hold splits of each CTA."""
    # Of short vectors, more are copied than the two that are used, for the sake of the alignment.
    shape, vectors = (partitions, PLACES, CTAS), (max(2, ALIGNMENT // (4 * rows)), rows)
    types = jax.ShapeDtypeStruct((*shape, rows, columns), dtype), jax.ShapeDtypeStruct((*shape, *vectors), jnp.float32)
    return types, {
        "rows": plgpu.SMEM((2, *vectors), jnp.float32),
        "sent": plgpu.ClusterBarrier(collective_axes=("cta",)),
        "arrived": plgpu.Barrier(num_arrivals=2),
    }


@dataclass(frozen=True)
class Exchange:
    """Sends the results of a work tile to the other CTA, or receives them."""

    refs: tuple[Any, ...]
    """The places of this cluster in device memory: values [PLACES, CTAS, rows, columns], and [PLACES, CTAS, >= 2, rows]
    log-sum-exps (base 2) and scales."""
    rows: Any
    """Shared memory [2, >= 2, rows] for log-sum-exps and scales, sent and received."""
    sent: Any
    """Cluster barrier: both CTAs have sent (1 per CTA)."""
    arrived: Any
    """The barrier of the copies to this CTA (2)."""
    cta: Any
    interpret: bool

    @classmethod
    def of(cls, refs, partition, memory: dict[str, Any], cta, *, interpret: bool) -> "Exchange":
        """From the results and the scratch memory of a kernel; see `exchange_types`."""
        places = tuple(ref.at[partition] for ref in refs)
        return cls(places, memory["rows"], memory["sent"], memory["arrived"], cta, interpret)

    def arrive(self) -> None:
        """Arrives at `sent`, after all that this CTA has copied to its places, and from those of the other one."""
        self._fence("fence.acq_rel.cluster;")
        plgpu.barrier_arrive(self.sent)

    def wait(self) -> None:
        """Waits for `sent`, before copies from the places of the other CTA, and to those of this one."""
        plgpu.barrier_wait(self.sent)
        self._fence("fence.acq_rel.cluster;", "fence.proxy.async.global;")

    def _fence(self, *instructions: str) -> None:
        if not self.interpret:
            plgpu.inline_mgpu()(lambda _: ptx(" ".join(instructions)))()

    def send(self, values, place) -> None:
        """Sends `values`, in shared memory, and `rows[0]`; returns when they are in device memory."""
        plgpu.commit_smem()
        for source, to in zip((values, self.rows.at[0]), self.refs, strict=True):
            plgpu.copy_smem_to_gmem(source, to.at[place, self.cta])
        plgpu.wait_smem_to_gmem(0)
        self.arrive()

    def receive(self, values, place) -> None:
        """Receives what the other CTA has sent, to `values` and `rows[1]`."""
        self.wait()
        for source, into in zip(self.refs, (values, self.rows.at[1]), strict=True):
            plgpu.copy_gmem_to_smem(source.at[place, 1 - self.cta], into, self.arrived)
        plgpu.barrier_wait(self.arrived)


def merge_factors(softmax: OnlineSoftmax, lse, scale, other_lse, other_scale):
    """Factors of this CTA's values and of the other's, which add up to the merged values, and log-sum-exps (base 2)."""
    highest = jnp.maximum(jnp.maximum(lse, other_lse), EMPTY)
    own, other = jnp.exp2(lse - highest), jnp.exp2(other_lse - highest)
    inverse, merged = softmax.finalize(own + other, highest)
    return scale * own * inverse, other_scale * other * inverse, merged


@dataclass(frozen=True, kw_only=True)
class SharedEpilogue(HalvesEpilogue):
    """Merges the results of two CTAs, and stores them.

    Each CTA merges and stores half of the columns: CTA c those of its consumer c, while its other consumer sends its
    half.
    """

    exchange: Exchange

    def store_shared(self, side: int, acc, row_sum, running_max, request, split, stage, place) -> None:
        """As `store`; `place` is the place of the work tile in device memory."""
        inverse, lse = self.finalize(side, row_sum, running_max)
        exchange = self.exchange

        def send():
            magnitude = split_scale(jnp.abs(acc).max(axis=1))
            values = (acc * over_columns(1 / magnitude, acc.shape[1])).astype(SPLIT_DTYPE)
            stage[...] = lax.bitcast_convert_type(values, stage.dtype)
            for n, x in enumerate((lse, magnitude * inverse)):
                exchange.rows[0, n] = x
            exchange.send(stage, place)

        def receive():
            exchange.receive(stage, place)
            values = lax.bitcast_convert_type(plgpu.load(stage, layout=WGMMA), SPLIT_DTYPE).astype(jnp.float32)
            others = (plgpu.load(exchange.rows.at[1, n], layout=ROW) for n in range(2))
            own, other, merged = merge_factors(self.softmax, lse, inverse, *others)
            values = acc * over_columns(own, acc.shape[1]) + values * over_columns(other, acc.shape[1])
            plgpu.commit_smem()  # all lanes have read `stage`
            self.store_final(side, values, lambda: (filled(ROW, 1, values.shape[0]), merged), request, split, stage)

        lax.cond(exchange.cta == side, receive, send)
