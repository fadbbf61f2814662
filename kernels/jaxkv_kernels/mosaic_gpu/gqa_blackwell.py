"""Grouped-query and multi-head decode on Blackwell (sm_100a, sm_103a): tcgen05 products of 128 rows by 64 keys.

The kernel has not run on a GPU: it is compiled by the real compilers, and interpreted.  Nothing has been measured, and
no number has been tuned.

Work.  A tile is 128 rows by 64 keys with their values.  The rows of one KV head of a request are query tokens x query
heads of the KV head.  A CTA has one KV head and 128 rows, and walks its partition of the plan: work tiles, each a range
of key tiles of a request.  With fewer rows the tile is partly empty, which costs no time while reading keys and values
takes longer than multiplying full tiles; see the estimate below.  CTAs of neighbouring heads are neighbours in the
grid, so that they read neighbouring memory if the heads of a token are contiguous.

A CTA has three warpgroups: `Producer`, `Multiplier` and `Softmax` are the columns of the timeline.  All products are
issued by one thread of the multiplier.  `tcgen05_attention.py` has what this kernel and that of `decode_mla` share.
Timeline of key tile i, downwards.  `->` names the barrier that a line waits for; an arrival by TMA or by tcgen05 comes
when the copies or the products in front of it are complete.

    producer               multiplier                              softmax
    Ki (-> k_free)         S = Q Ki'      -> s_free, k_full
    Vi (-> v_free)           arrives k_free and s_full
                           S = Q K(i+1)'  -> s_free, k_full        S to registers       -> s_full
                                                                     arrives s_free
                                                                   softmax
                                                                   rescale O, store P   -> o_full of tile i - 1
                                                                   -> v_full; zeroes the values of unseen tokens
                                                                     arrives p_full
                           O += P Vi      -> p_full, v_full
                             arrives v_free and o_full

So the tensor cores compute the scores of tile i + 1 during the softmax of tile i, and S and P need one place each.
Sums in tensor memory are rescaled only if a running maximum was raised (`softmax.py`).

Around the key tiles of a work tile:

    producer                       multiplier                            softmax
    after the first key tile:
    Q  (-> q_free)                 the key tiles    -> q_full
                                                                         O to the place of Q, then to device memory
                                                                           (-> o_full); once TMA has read it,
                                                                           arrives q_free

Barriers (mbarriers), and how many arrivals complete them.  `tc` ones also order accesses to tensor memory.
    q_full             the queries have landed (1 per 64 columns)
    q_free             all products with the queries are complete, and TMA has read the results from their place (1)
    k_full[s]          the keys of a tile have landed in stage s (1 per page)
    k_free[s]  tc      they have been multiplied with the queries (1)
    v_full[s]          the values of a tile have landed in stage s (1 per page)
    v_free[s]  tc      they have been multiplied with P (1)
    s_full     tc      S is complete (1)
    s_free     tc      S is in registers (1)
    p_full     tc      P is in tensor memory, O is rescaled, and values of unseen tokens are zero (1)
    o_full     tc      O contains the products with P (1); so P may be overwritten, and O may be read and rescaled
A warpgroup must wait for every completion of a barrier that it waits on, because Pallas keeps one phase bit per barrier
and warpgroup.  So the softmax warpgroup waits for the values of each tile, and the producer and the multiplier wait for
the last completions before a CTA ends.

The kernel is compiled without the barriers that Mosaic GPU inserts by default (`auto_barriers`).  What a thread stores
to shared memory is visible to TMA and tcgen05 after `commit_smem`; what it stores to tensor memory, after
`commit_tmem`.

Budget, for heads of 128 + 128 values.  Tensor memory: O 128 columns (256 for values of 256), S 64, P 32, together 224
of 512.  Shared memory: Q 32 KiB + keys and values of six tiles 192 KiB + statistics 1 KiB = 225 KiB of 227;
`stages_of` fits the stages to the heads, two for 256 + 256 values.  Registers: 240 per lane of the softmax warpgroup,
128 of the others; ptxas reports 168, what a lane has before `set_max_registers`.  The loops over key tiles have no
spills.

Estimate per key tile and CTA for heads of 128 + 128 values, in cycles.  Reading 32 KiB from device memory: 1,120, at 8
TB/s for 148 multiprocessors and 1.85 GHz.  Products at 4,096 multiply-adds per cycle: 512.  Shared memory at 128 bytes
per cycle: 770, of which 260 for what TMA writes, 380 for S = Q K' and 130 for O += P V, whose P is in tensor memory.
In SASS, a warp of the softmax executes up to 850 instructions per key tile.  So reading should be the limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import DecodeCall, DecodeKV, PlanDecode
from jaxkv_kernels.mosaic_gpu import tcgen05_attention
from jaxkv_kernels.mosaic_gpu.attention_reasons import values_of
from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, KernelResults
from jaxkv_kernels.mosaic_gpu.gqa import CHUNK, GQAKernel, Operands, chunks_of
from jaxkv_kernels.mosaic_gpu.layout_reasons import block_sizes, origins
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, copies_per_tile
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, floordiv
from jaxkv_kernels.mosaic_gpu.runtime.device import SHARED_MEMORY
from jaxkv_kernels.mosaic_gpu.runtime.launch import named, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import TCGEN05, over_columns
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.softmax import OnlineSoftmax
from jaxkv_kernels.mosaic_gpu.tcgen05_attention import ROWS, BlackwellConfig, row_tiles
from jaxkv_kernels.mosaic_gpu.tile_scheduler import WorkTile

FORMATS = ("bf16", "f16")
"""The formats of entries that the kernel supports."""
SIZES = (64, 128, 192, 256)
"""The sizes of keys and of values that it supports."""
MOST_STAGES = 8
"""The most key tiles in shared memory."""
STATS_AND_BARRIERS = 3 * 1024
"""An upper bound of the bytes of shared memory other than tiles."""


@dataclass(frozen=True, kw_only=True)
class BlackwellGQAConfig(BlackwellConfig):
    """`decode_kv` on Blackwell."""


def stages_of(head_dim: int, value_dim: int, itemsize: int) -> int:
    """How many tiles of keys and values fit in shared memory."""
    room = SHARED_MEMORY - ROWS * max(head_dim, value_dim) * itemsize - STATS_AND_BARRIERS
    return min(room // (TILE * (head_dim + value_dim) * itemsize), MOST_STAGES)


def unsupported_reasons(call: DecodeCall | PlanDecode) -> Iterator[str]:
    """Reasons against attending to the entries of this call."""
    entry = call.entry
    if entry.format not in FORMATS:
        yield f"entries of format {entry.format!r} on Blackwell: supports {' and '.join(FORMATS)}"
    elif not {*entry.sizes} <= {*SIZES}:
        yield f"{values_of(entry)}: supports 64, 128, 192 and 256 of each"
    else:
        yield from block_sizes(call.pages)
        yield from origins(call.pages, call.buffer)


def attend(call: DecodeKV, q: jax.Array, config: BlackwellGQAConfig, *, interpret: bool) -> KernelResults:
    """Results of whole requests and splits, by the plan of `call`.

    `q` are its queries as [B, heads, rows, head dim].  A KV head's rows are query tokens x its query heads, padded to a
    multiple of 8, or of 128 if there are more than 128.
    """
    return GQABlackwell(call, q, config, interpret=interpret).run()


class Scratch(NamedTuple):
    """Tensor memory, shared memory, and the barriers of the table at the head of this file."""

    o: Any
    """Sums of weighted values, float32 [128, value dim]."""
    s: Any
    """Scores, float32 [128, 64]."""
    p: Any
    """Weights [128, 64]."""
    q: Any
    """Shared memory: queries, or results in their place [chunks, 128, CHUNK]: as many chunks of columns as the wider of
    the two has."""
    k: Any
    """Keys [stages, 64, head dim]."""
    v: Any
    """Values [stages, 64, value dim]."""
    stats: Any
    """Log-sum-exps and, of a split, scales, float32 [2, 128]."""
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    s_full: Any
    s_free: Any
    p_full: Any
    o_full: Any


class GQABlackwell(GQAKernel):
    """The kernel for Blackwell."""

    def __init__(self, call: DecodeKV, q: jax.Array, config: BlackwellGQAConfig, *, interpret: bool):
        super().__init__(call, q, interpret=interpret)
        self.row_tiles = row_tiles(self.rows)
        self.stages = stages_of(self.head_dim, self.value_dim, self.dtype.itemsize)
        self.softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret, tile=TCGEN05)

    @override
    def scratch_types(self):
        dtype, stages, copies = self.dtype, self.stages, copies_per_tile(self.pages)
        ordering = partial(plgpu.Barrier, orders_tensor_core=True)
        scratch = Scratch(
            o=plgpu.TMEM((ROWS, self.value_dim), jnp.float32),
            s=plgpu.TMEM((ROWS, TILE), jnp.float32),
            p=plgpu.TMEM((ROWS, TILE), dtype, packed=True),
            q=swizzled(max(self.head_dim, self.value_dim) // CHUNK, ROWS, CHUNK, dtype=dtype),
            k=swizzled(stages, TILE, self.head_dim, dtype=dtype),
            v=swizzled(stages, TILE, self.value_dim, dtype=dtype),
            stats=plgpu.SMEM((2, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=self.head_dim // CHUNK),
            q_free=plgpu.Barrier(),
            k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            k_free=ordering(num_barriers=stages),
            v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            v_free=ordering(num_barriers=stages),
            s_full=ordering(),
            s_free=ordering(),
            p_full=ordering(),
            o_full=ordering(),
        )
        return scratch._asdict()

    @override
    def cta(self, operands: Operands, results: KernelResults, **scratch) -> None:
        pdl_launch_dependents(operands.split_requests, interpret=self.interpret)
        partition, index, wg = (lax.axis_index(axis) for axis in ("partition", "tile", "wg"))
        head, row_tile = floordiv(index, self.row_tiles), lax.rem(index, jnp.int32(self.row_tiles))
        first_row = pl.multiple_of(row_tile * ROWS, ROWS)
        cta = CTA(self, operands, results, named(Scratch, scratch), partition, first_row, head)
        producer, multiplier, softmax = Producer(cta), Multiplier(cta), Softmax(cta)
        lax.cond(wg == 0, softmax.run, lambda: lax.cond(wg == 1, multiplier.run, producer.run))


@dataclass(frozen=True)
class CTA(tcgen05_attention.CTA):
    """What the warpgroups of a CTA share."""

    head: Any
    """Its KV head."""

    def stage(self, used):
        """The stage of a key tile that follows `used` others."""
        return lax.rem(used, jnp.int32(self.kernel.stages))


class Producer(tcgen05_attention.Producer):
    """The warpgroup that copies queries, keys and values to shared memory."""

    def loaders(self, layer):
        """Loaders of keys and of values, or of both."""
        cta, kernel, sources = self.cta, self.kernel, (self.cta.operands.kv, self.cta.operands.v)
        return [
            PagedKeys(source, view, cta.table, layer, cta.head)
            for source, view in zip(sources, kernel.views, strict=False)
        ]

    def start(self, tile):
        """The blocks of the first key tile."""
        return self.look_up(tile, tile.begin)

    def fetch(self, found, tile, i, used):
        """Starts the copies of a key tile and its values, and returns the blocks of the next one."""
        kernel, scratch, first_token = self.kernel, self.scratch, self.cta.first_token(tile, i)
        ahead = self.look_up(tile, i + 1)  # the loads proceed while the producer waits for free stages
        stage = self.cta.stage(used)
        first_value = 0 if len(self.paged) > 1 else kernel.head_dim
        for paged, first, into, full, free in (
            (self.paged[0], 0, scratch.k, scratch.k_full, scratch.k_free),
            (self.paged[-1], first_value, scratch.v, scratch.v_full, scratch.v_free),
        ):
            pl.when(used >= kernel.stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
            paged.fetch(found, first_token, Columns(first, into.shape[-1], into.at[stage], full.at[stage]))
        return ahead

    def fetch_queries(self, request, is_first) -> None:
        """Fetches the queries of a request, once those of the work tile before are no longer needed."""
        cta, scratch = self.cta, self.scratch
        pl.when(~is_first)(lambda: plgpu.barrier_wait(scratch.q_free))
        source = cta.operands.q.at[request, cta.head, cta.rows]
        for c, columns in enumerate(chunks_of(self.kernel.head_dim)):
            plgpu.copy_gmem_to_smem(source.at[:, columns], scratch.q.at[c], scratch.q_full)

    def rings(self, used):
        """The barriers of the stages of keys, and of values."""
        return (self.scratch.k_free, self.kernel.stages, used), (self.scratch.v_free, self.kernel.stages, used)


class Multiplier(tcgen05_attention.Multiplier):
    """The warpgroup that issues all products."""

    def multiply_queries(self, used, is_first) -> None:
        """S = Q K'."""
        scratch, stage = self.scratch, self.cta.stage(used)
        pl.when(used > 0)(lambda: plgpu.barrier_wait(scratch.s_free))
        pl.when(is_first)(lambda: plgpu.barrier_wait(scratch.q_full))
        plgpu.barrier_wait(scratch.k_full.at[stage])
        for c, columns in enumerate(chunks_of(self.kernel.head_dim)):
            keys = scratch.k.at[stage, :, columns].transpose((1, 0))
            plgpu.tcgen05_mma(scratch.s, scratch.q.at[c], keys, accumulate=c > 0)
        plgpu.tcgen05_commit_arrive(scratch.k_free.at[stage])
        plgpu.tcgen05_commit_arrive(scratch.s_full)

    def add_values(self, used, accumulate) -> None:
        """O = P V, or O += P V."""
        scratch, stage = self.scratch, self.cta.stage(used)
        plgpu.barrier_wait(scratch.p_full)
        plgpu.barrier_wait(scratch.v_full.at[stage])
        plgpu.tcgen05_mma(scratch.o, scratch.p, scratch.v.at[stage], scratch.v_free.at[stage], accumulate=accumulate)
        plgpu.tcgen05_commit_arrive(scratch.o_full)


class Softmax(tcgen05_attention.Softmax):
    """The warpgroup that turns scores into weights, rescales sums, and stores results."""

    @property
    def values(self):
        """The values."""
        return self.scratch.v

    def value_stage(self, used):
        """The stage of a tile's values."""
        return self.cta.stage(used)

    def wait_for_values(self, used) -> None:
        """Waits for the values of each tile, before those of unseen tokens are cleared."""
        plgpu.barrier_wait(self.scratch.v_full.at[self.cta.stage(used)])

    def store(self, tile: WorkTile, running_max, row_sum) -> None:
        """Stores the results of a work tile, by way of the place of its queries."""
        cta, refs, scratch = self.cta, self.cta.results, self.scratch
        inverse, lse = self.softmax.finalize(row_sum.sum(axis=1), running_max)

        def store_result(factor, dtype, to, *per_row):
            for c, (_, x) in enumerate(self.sums()):
                x = (x * over_columns(factor, CHUNK)).astype(dtype)
                scratch.q[c] = x if x.dtype == scratch.q.dtype else lax.bitcast_convert_type(x, scratch.q.dtype)
            for i, (x, _) in enumerate(per_row):
                scratch.stats[i] = x
            plgpu.wait_load_tmem()
            plgpu.commit_smem()
            stored = min(self.kernel.rows, ROWS)  # TMA does not clip copies of one value per row
            staged, rows = pl.ds(0, stored), pl.ds(cta.first_row, stored)
            for c, columns in enumerate(chunks_of(self.kernel.value_dim)):
                plgpu.copy_smem_to_gmem(scratch.q.at[c, staged], to.at[rows, columns])
            for i, (_, into) in enumerate(per_row):
                plgpu.copy_smem_to_gmem(scratch.stats.at[i, staged], into.at[rows])

        @pl.when(tile.split < 0)
        def _():
            place = tile.request, cta.head
            store_result(inverse, self.kernel.dtype, refs.out.at[place], (lse * (1 / LOG2E), refs.lse.at[place]))

        @pl.when(tile.split >= 0)
        def _():
            magnitude, place = self.split_scales(), (tile.split, cta.head)
            scales = magnitude * inverse, refs.split_scale.at[tile.split, 0, cta.head]
            store_result(1 / magnitude, SPLIT_DTYPE, refs.split_out.at[place], (lse, refs.split_lse.at[place]), scales)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
