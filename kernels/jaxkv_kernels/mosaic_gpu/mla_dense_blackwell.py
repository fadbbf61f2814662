"""MLA decode on Blackwell (sm_100a, sm_103a): tcgen05 products of 128 rows by 64 keys, with half of the output per CTA.

The kernel has not run on a GPU: it is compiled by the real compilers, and interpreted.  Nothing has been measured, and
no number has been tuned.

Work.  A tile is 128 rows (query tokens x heads of a request) by 64 keys.  The float32 sums of 128 rows by 512 columns
would fill the tensor memory of a multiprocessor, so a CTA has one half of the columns of its rows, its "own" half, and
computes the scores of its rows from whole keys.  It walks its partition of the plan: work tiles, each a range of key
tiles of a request.  Both halves of a tile of rows walk the same partition, so one of them should find most keys in the
L2 cache.

A CTA has three warpgroups: `Producer`, `Multiplier` and `Softmax` are the columns of the timeline.  All products are
issued by one thread of the multiplier.  `tcgen05_attention.py` has what this kernel and that of `decode_kv` share.
Timeline of key tile i, downwards.  `->` names the barrier that a line waits for; an arrival by TMA or by tcgen05 comes
when the copies or the products in front of it are complete.

    producer                       multiplier                            softmax
    rotary keys, then the other    S = Q Ki'        -> s_free, part_full, own_full
      half of Ki, in 5 parts         each part of Ki arrives part_free
      (-> part_free)                 then arrives s_full
    own half of Ki                                                       S to registers       -> s_full
      (-> own_free)                S = Q K(i+1)'    (-> s_free, ...)       arrives s_free
                                                                         softmax
                                                                         rescale O, store P   -> o_full of tile i - 1
                                                                           arrive p_full
                                   O += P Ki own    -> p_full
                                     arrives own_free and o_full

So the tensor cores compute the scores of tile i + 1 during the softmax of tile i, and S and P need one place each.
Sums in tensor memory are rescaled only if a running maximum was raised (`softmax.py`).  If a tile needs a mask, the
softmax warpgroup masks scores, and zeroes the values of unseen tokens in the own half of the keys: after s_full,
nothing but O += P Ki reads them.

Around the key tiles of a work tile:

    producer                       multiplier                            softmax
    after the first key tile:
    own half of Q   (-> q_free)
    rotary queries                 own half of Q to tensor memory
                                     (-> q_landed), arrives q_copied
    other half of Q, in the same
      place         (-> q_copied)  the key tiles    -> q_full
                                                                         O to the place of Q, then to device memory
                                                                           (-> o_full); once TMA has read it,
                                                                           arrives q_free

The multiplier copies the own half of the queries to tensor memory (tcgen05.cp), from where it is multiplied.  Otherwise
queries would take 144 KiB of shared memory, and there would be room for a single tile of keys.  These products also
read less shared memory: 2 KiB of keys for 128 x 64 x 16, but not 4 KiB of queries.

Quantised entries (`fp8`, `fp8_ds_mla`).  The multiplier and the softmax warpgroup do the same as for bf16.  The
producer, a whole warpgroup, converts keys to bf16 (`latent_pieces.py`).  TMA copies a key tile as it is stored, in
three pieces with a place each: the other half, the own half, and the rest of the entries, which are scales and rotary
keys.

    -> raw_full of the rest and of the other half of Ki
    both to registers, converted; then the copy of the other half of K(i+1)
    -> part_free of all parts of K(i-1)
    stores rotary keys and other half, arrives part_full
    -> raw_full of the own half of Ki
    to registers, converted; then the copies of the own half and the rest of K(i+1)
    -> own_free of K(i-2)
    stores the own half, arrives own_full

So TMA copies the next key tile while this one is converted.  A piece is converted in registers first, and then waits
for its place.  The parts of K(i-1) become free first, before its own half is multiplied and O += P K(i-2) is computed:
in that time, those of Ki are stored.  The own half is multiplied last, so its store has the time of the products with
the parts.  The scale of all `fp8` entries is part of the softmax scale, and also multiplies the result.

Barriers (mbarriers), and how many arrivals complete them.  `tc` ones also order accesses to tensor memory.
    q_landed           the own half of the queries has landed (1)
    q_copied   tc      it is in tensor memory (1)
    q_full             the other half and the rotary queries have landed (2)
    q_free             all products with the queries are complete, and TMA has read the results from their place (1)
    raw_full[piece]    a piece of a quantised key tile has landed (1 per page)
    own_full[s]        the own half of a key tile has landed in stage s (1 per page), or has been converted (1)
    own_free[s] tc     it has been multiplied with P (1)
    part_full[s]       a part of a key tile has landed in stage s (1 per page), or has been converted (1)
    part_free[s] tc    it has been multiplied with the queries (1)
    s_full     tc      S is complete (1)
    s_free     tc      S is in registers (1)
    p_full     tc      P is in tensor memory, O is rescaled, and values of unseen tokens are zero (1)
    o_full     tc      O contains the products with P (1); so P may be overwritten, and O may be read and rescaled
A warpgroup must wait for every completion of a barrier that it waits on, because Pallas keeps one phase bit per barrier
and warpgroup.  So the producer and the multiplier also wait for the last ones before a CTA ends.

The kernel is compiled without the barriers that Mosaic GPU inserts by default (`auto_barriers`).  What a thread stores
to shared memory is visible to TMA and tcgen05 after `commit_smem`; what it stores to tensor memory, after
`commit_tmem`.

Budget.  Tensor memory: O 256 columns, own half of Q 128, S 64, P 32, together 480 of 512.  Shared memory: Q 64 KiB +
rotary queries 16 KiB + own halves of three key tiles 96 KiB + six parts of keys 48 KiB = 224 KiB of 227.  For
quantised entries, Q and rotary queries 80 KiB + own halves of two key tiles 64 KiB + five parts 40 KiB + a tile as it
is stored 41 KiB (`fp8` 36) = 225 KiB.  Registers: 240 per lane of the softmax warpgroup, which holds a tile of scores
in 64, and 128 of the others, of which the converted half of a tile takes 64; ptxas reports 168, what a lane has before
`set_max_registers`.  The loops over key tiles have no spills.

Estimate per key tile and CTA, in cycles, at 4,096 multiply-adds and 128 bytes of shared memory per cycle.  Products:
1,664 if they wait for nothing else.  Shared memory: 2,050 for bf16, namely 580 for what TMA writes, 960 for the
products with the parts, which read queries as well, and 260 each for those with the own half and for O += P V; 2,700
for `fp8_ds_mla`, where the stored bytes are written and read as well.  So shared memory is the limit.  In SASS, a warp
of the softmax executes up to 830 instructions per key tile, and one that converts 1,080.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import DecodeCall, DecodeMLA, PlanDecode
from jaxkv_kernels.mosaic_gpu import tcgen05_attention
from jaxkv_kernels.mosaic_gpu.attention_reasons import latent_sizes
from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, KernelResults, result_types
from jaxkv_kernels.mosaic_gpu.interpreter.latent_pieces import InterpretedLatentPieces
from jaxkv_kernels.mosaic_gpu.latent_pieces import LatentPieces
from jaxkv_kernels.mosaic_gpu.layout_reasons import block_sizes, origins
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, copies_per_tile, token_rows
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, named, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import TCGEN05, over_columns, store
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.sizes import HALF, LATENT, ROPE, TILE
from jaxkv_kernels.mosaic_gpu.softmax import OnlineSoftmax
from jaxkv_kernels.mosaic_gpu.tcgen05_attention import O_COLUMNS, ROWS, BlackwellConfig, row_tiles
from jaxkv_kernels.mosaic_gpu.tile_scheduler import WorkTile
from jaxkv_kernels.mosaic_gpu.token_rows import in_entries_dtype

FORMATS = ("bf16", "f16", "fp8", "fp8_ds_mla")
"""The formats of entries that the kernel supports."""
HALVES = LATENT // HALF
"""CTAs per tile of rows: each has half of the columns."""
PART = 64
"""Columns of a part of a key tile: one tile of swizzled shared memory."""
PARTS = (ROPE + LATENT - HALF) // PART
OTHER, OWN, REST = range(3)
"""The pieces of a quantised key tile: the other half, the own half, and what follows the latents of each entry."""


@dataclass(frozen=True, kw_only=True)
class BlackwellMLAConfig(BlackwellConfig):
    """`decode_mla` on Blackwell."""


def unsupported_reasons(call: DecodeCall | PlanDecode) -> Iterator[str]:
    """Reasons against attending to the entries of this call."""
    entry = call.entry
    if entry.format not in FORMATS:
        yield f"entries of format {entry.format!r} on Blackwell: supports {', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
    else:
        yield from latent_sizes(entry)
        yield from block_sizes(call.pages)
        yield from origins(call.pages, call.buffer)


def attend(
    call: DecodeMLA, queries: Sequence[jax.Array], config: BlackwellMLAConfig, *, interpret: bool
) -> KernelResults:
    """Results of whole requests and splits, by the plan of `call`.

    `queries` are those of `call` as [B, rows, 512] and [B, rows, 64], with a multiple of 8 rows.
    """
    return MLADenseBlackwell(call, queries, config, interpret=interpret).run()


class Operands(NamedTuple):
    """The arrays that the kernel reads; in the kernel, references to them."""

    q: Any
    """Queries [B, rows, 512]."""
    qr: Any
    """Rotary queries [B, rows, 64]."""
    kv: Any
    """The cache, in the view of `token_rows`."""
    block_tables: Any
    layer: Any
    """int32 [1]."""
    scale: Any
    """The softmax scale, float32 [1]."""
    kv_scale: Any
    """The scale of all entries, float32 [1]; None if the format has none."""
    partitions: Any
    """Of the plan, like the next two."""
    work_tiles: Any
    split_requests: Any


class Scratch(NamedTuple):
    """Tensor memory, shared memory, and the barriers of the table at the head of this file."""

    o: Any
    """Sums of weighted values, float32 [128, 256]."""
    q_own: Any
    """The own half of the queries [128, 256]."""
    s: Any
    """Scores, float32 [128, 64]."""
    p: Any
    """Weights [128, 64]."""
    q: Any
    """Shared memory: a half of the queries, and then of the results [128, 256]."""
    qr: Any
    """Rotary queries [128, 64]."""
    own: Any
    """Own halves of key tiles [stages, 64, 256]."""
    parts: Any
    """Parts of the rest of key tiles [stages, 64, 64]."""
    raw_halves: Any
    """Halves of a quantised key tile as they are stored: OTHER and OWN, uint8 [2, 64, 256]; None for other formats."""
    raw_rest: Any
    """Its scales and rotary keys, uint8 [64, bytes]."""
    raw_full: Any
    q_landed: Any
    q_copied: Any
    q_full: Any
    q_free: Any
    own_full: Any
    own_free: Any
    part_full: Any
    part_free: Any
    s_full: Any
    s_free: Any
    p_full: Any
    o_full: Any


class MLADenseBlackwell:
    """The kernel for calls of these shapes: its sizes, its memory, and its launch."""

    def __init__(self, call: DecodeMLA, queries: Sequence[jax.Array], config: BlackwellMLAConfig, *, interpret: bool):
        self.call, self.plan, self.interpret = call, call.plan, interpret
        self.q, self.qr = queries
        self.batch, self.rows, _ = self.q.shape
        _, self.tokens, self.rows_per_token, _ = call.q_latent.shape
        self.buffer, self.pages = in_entries_dtype(call.buffer, call.pages, call.entry.dtype)
        self.view = token_rows(self.pages)
        self.row_tiles = row_tiles(self.rows)
        self.dtype = self.q.dtype
        self.producer = ConvertingProducer if call.entry.quantised else CopyingProducer
        self.pieces = (InterpretedLatentPieces if interpret else LatentPieces)(call.entry)
        self.softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret, tile=TCGEN05)

    def run(self) -> KernelResults:
        """Launches a CTA per partition of the plan, tile of rows and half of the columns."""
        call, plan = self.call, self.plan
        (results,) = kernel(
            self.cta,
            interpret=self.interpret,
            auto_barriers=False,
            out_type=(self.result_types(),),
            grid=(HALVES * self.row_tiles, plan.num_partitions),
            grid_names=("half", "partition"),
            num_threads=3,
            thread_name="wg",
            kernel_name="decode_mla",
            scratch_types={name: kind for name, kind in self.scratch_types()._asdict().items() if kind is not None},
        )(
            Operands(
                q=self.q,
                qr=self.qr,
                kv=self.view.of(self.buffer),
                block_tables=call.block_tables,
                layer=jnp.reshape(call.layer, (1,)),
                scale=jnp.reshape(call.scale, (1,)),
                kv_scale=None if call.kv_scale is None else jnp.reshape(call.kv_scale, (1,)),
                partitions=plan.partitions,
                work_tiles=plan.work_tiles,
                split_requests=plan.split_requests,
            )
        )
        return results

    def result_types(self) -> KernelResults:
        """Shapes and dtypes of the results."""
        stored = self.row_tiles * ROWS  # in the arrays with a value per row, whose stores are not clipped
        return result_types(
            (self.batch,),
            self.plan.max_splits,
            self.dtype,
            rows=self.rows,
            width=LATENT,
            lse=stored,
            split_lse=stored,
            scales=HALVES,
        )

    def scratch_types(self) -> Scratch:
        """Types of the scratch memory."""
        dtype, producer, copies = self.dtype, self.producer, copies_per_tile(self.pages)
        ordering = partial(plgpu.Barrier, orders_tensor_core=True)
        converts = producer is ConvertingProducer
        arrivals = 1 if converts else copies
        return Scratch(
            o=plgpu.TMEM((ROWS, HALF), jnp.float32),
            q_own=plgpu.TMEM((ROWS, HALF), dtype, packed=True),
            s=plgpu.TMEM((ROWS, TILE), jnp.float32),
            p=plgpu.TMEM((ROWS, TILE), dtype, packed=True),
            q=swizzled(ROWS, HALF, dtype=dtype),
            qr=swizzled(ROWS, ROPE, dtype=dtype),
            own=swizzled(producer.own_stages, TILE, HALF, dtype=dtype),
            parts=swizzled(producer.part_stages, TILE, PART, dtype=dtype),
            raw_halves=plgpu.SMEM((2, TILE, HALF), jnp.uint8) if converts else None,
            raw_rest=plgpu.SMEM((TILE, self.pieces.rest_nbytes), jnp.uint8) if converts else None,
            raw_full=plgpu.Barrier(num_arrivals=copies, num_barriers=3) if converts else None,
            q_landed=plgpu.Barrier(),
            q_copied=ordering(),
            q_full=plgpu.Barrier(num_arrivals=2),
            q_free=plgpu.Barrier(),
            own_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=producer.own_stages),
            own_free=ordering(num_barriers=producer.own_stages),
            part_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=producer.part_stages),
            part_free=ordering(num_barriers=producer.part_stages),
            s_full=ordering(),
            s_free=ordering(),
            p_full=ordering(),
            o_full=ordering(),
        )

    def cta(self, operands: Operands, results: KernelResults, **scratch) -> None:
        """What a CTA runs."""
        pdl_launch_dependents(operands.split_requests, interpret=self.interpret)
        index, partition, wg = (lax.axis_index(axis) for axis in ("half", "partition", "wg"))
        half, row_tile = lax.rem(index, jnp.int32(HALVES)), lax.div(index, jnp.int32(HALVES))
        cta = CTA(self, operands, results, named(Scratch, scratch), partition, row_tile * ROWS, half)
        producer, multiplier, softmax = self.producer(cta), Multiplier(cta), Softmax(cta)
        lax.cond(wg == 0, softmax.run, lambda: lax.cond(wg == 1, multiplier.run, producer.run))


@dataclass(frozen=True)
class CTA(tcgen05_attention.CTA):
    """What the warpgroups of a CTA share."""

    half: Any
    """The index of its own half of the columns."""

    def columns(self, half) -> pl.Slice:
        """The columns of a half."""
        return pl.ds(pl.multiple_of(half * HALF, HALF), HALF)

    def own_stage(self, used):
        """The stage of the own half of a key tile that follows `used` others."""
        return lax.rem(used, jnp.int32(self.kernel.producer.own_stages))


class Producer(tcgen05_attention.Producer):
    """The warpgroup that brings queries and keys to shared memory; the base class of one for each kind of format."""

    own_stages: ClassVar[int]
    """Own halves of key tiles that are in shared memory."""
    part_stages: ClassVar[int]
    """Parts of the rest of key tiles that are."""

    def loaders(self, layer):
        """The loader of whole keys."""
        return [PagedKeys(self.cta.operands.kv, self.kernel.view, self.cta.table, layer)]

    def fetch_queries(self, request, is_first) -> None:
        """Fetches the queries of a request, once those of the work tile before are no longer needed."""
        cta, operands, scratch = self.cta, self.cta.operands, self.scratch
        pl.when(~is_first)(lambda: plgpu.barrier_wait(scratch.q_free))
        own, other = (operands.q.at[request, cta.rows, cta.columns(half)] for half in (cta.half, 1 - cta.half))
        plgpu.copy_gmem_to_smem(own, scratch.q, scratch.q_landed)
        plgpu.copy_gmem_to_smem(operands.qr.at[request, cta.rows], scratch.qr, scratch.q_full)
        plgpu.barrier_wait(scratch.q_copied)
        plgpu.copy_gmem_to_smem(other, scratch.q, scratch.q_full)

    def rings(self, used):
        """The barriers of the stages of own halves, and of parts."""
        own, parts = self.scratch.own_free, self.scratch.part_free
        return (own, self.own_stages, used), (parts, self.part_stages, used * PARTS)


class CopyingProducer(Producer):
    """The producer of keys of the queries' dtype, which TMA copies to where they are multiplied.

    An own half stays until it is multiplied with P, after the scores of the next key tile: two are in use, and one
    lands.  A part is free once it is multiplied with the queries.  With one stage more than a tile has parts, its copy
    has about the time of a whole key tile.
    """

    own_stages, part_stages = 3, 6

    def start(self, tile):
        """The blocks of the first key tile."""
        return self.look_up(tile, tile.begin)

    def fetch(self, found, tile, i, used):
        """Starts the copies of a key tile, and returns the blocks of the next one."""
        cta, scratch, first_token = self.cta, self.scratch, self.cta.first_token(tile, i)
        ahead = self.look_up(tile, i + 1)  # the loads proceed while the producer waits for free stages
        for n in range(PARTS):
            number = used * PARTS + n
            stage = lax.rem(number, jnp.int32(self.part_stages))
            column = LATENT if n == 0 else (1 - cta.half) * HALF + (n - 1) * PART
            pl.when(number >= self.part_stages)(lambda stage=stage: plgpu.barrier_wait(scratch.part_free.at[stage]))
            part = Columns(column, PART, scratch.parts.at[stage], scratch.part_full.at[stage])
            self.paged[0].fetch(found, first_token, part)
        stage = cta.own_stage(used)
        pl.when(used >= self.own_stages)(lambda: plgpu.barrier_wait(scratch.own_free.at[stage]))
        own = Columns(cta.half * HALF, HALF, scratch.own.at[stage], scratch.own_full.at[stage])
        self.paged[0].fetch(found, first_token, own)
        return ahead


class ConvertingProducer(Producer):
    """The producer of quantised keys: TMA copies them as they are stored, and the warpgroup converts them to bf16.

    A piece of the next key tile is copied as soon as the warpgroup holds this one's in registers, and a piece is
    converted before its place is free.  The order is that in which places become free: the parts once the scores of
    the tile before are computed, the own half once P of the one before that is multiplied with it.
    """

    own_stages, part_stages = 2, PARTS

    def start(self, tile):
        """Starts the copies of the first key tile; returns the blocks of the second one."""
        self.copy(self.look_up(tile, tile.begin), tile, tile.begin, OTHER, OWN, REST)
        return self.look_up(tile, tile.begin + 1)

    def copy(self, found, tile: WorkTile, i, *pieces: int) -> None:
        """Starts the copies of pieces of key tile `i`, as they are stored."""
        half, halves, rest = self.cta.half, self.scratch.raw_halves, self.scratch.raw_rest
        columns = {
            OTHER: ((1 - half) * HALF, HALF, halves.at[OTHER]),
            OWN: (half * HALF, HALF, halves.at[OWN]),
            REST: (LATENT, rest.shape[1], rest),
        }
        parts = [Columns(*columns[piece], self.scratch.raw_full.at[piece]) for piece in pieces]
        self.paged[0].fetch(found, self.cta.first_token(tile, i), *parts)

    def fetch(self, found, tile, i, used):
        """Converts a key tile, and starts the copies of the next one; returns the blocks of the one after that."""
        cta, scratch, pieces = self.cta, self.scratch, self.kernel.pieces
        ahead = self.look_up(tile, i + 2)

        def copy_next(*which):
            plgpu.commit_smem()  # all warps have loaded what TMA overwrites
            pl.when(i + 1 < tile.end)(lambda: self.copy(found, tile, i + 1, *which))

        plgpu.barrier_wait(scratch.raw_full.at[REST])
        plgpu.barrier_wait(scratch.raw_full.at[OTHER])
        rope = pieces.load_rope(scratch.raw_rest)
        other = pieces.load_half(scratch.raw_halves, scratch.raw_rest, OTHER, 1 - cta.half)
        copy_next(OTHER)
        for n in range(PARTS):  # part n of each key tile is in stage n
            pl.when(used > 0)(lambda n=n: plgpu.barrier_wait(scratch.part_free.at[n]))
        pieces.store_parts(scratch.parts, rope, other)
        plgpu.commit_smem()
        for n in range(PARTS):
            plgpu.barrier_arrive(scratch.part_full.at[n])
        plgpu.barrier_wait(scratch.raw_full.at[OWN])
        own = pieces.load_half(scratch.raw_halves, scratch.raw_rest, OWN, cta.half)
        copy_next(OWN, REST)
        stage = cta.own_stage(used)
        pl.when(used >= self.own_stages)(lambda: plgpu.barrier_wait(scratch.own_free.at[stage]))
        pieces.store_half(scratch.own, stage, own)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.own_full.at[stage])
        return ahead


class Multiplier(tcgen05_attention.Multiplier):
    """The warpgroup that issues all products."""

    def prepare_queries(self) -> None:
        """Copies the own half of the queries to tensor memory."""
        scratch = self.scratch
        plgpu.barrier_wait(scratch.q_landed)
        plgpu.async_copy_smem_to_tmem(scratch.q, scratch.q_own)
        plgpu.tcgen05_commit_arrive(scratch.q_copied)

    def multiply_queries(self, used, is_first) -> None:
        """S = Q K'."""
        scratch = self.scratch
        pl.when(used > 0)(lambda: plgpu.barrier_wait(scratch.s_free))
        pl.when(is_first)(lambda: plgpu.barrier_wait(scratch.q_full))
        for n in range(PARTS):
            stage = lax.rem(used * PARTS + n, jnp.int32(self.kernel.producer.part_stages))
            plgpu.barrier_wait(scratch.part_full.at[stage])
            q = scratch.qr if n == 0 else scratch.q.at[:, pl.ds((n - 1) * PART, PART)]
            part, free = scratch.parts.at[stage].transpose((1, 0)), scratch.part_free.at[stage]
            plgpu.tcgen05_mma(scratch.s, q, part, free, accumulate=n > 0)
        stage = self.cta.own_stage(used)
        plgpu.barrier_wait(scratch.own_full.at[stage])
        plgpu.tcgen05_mma(scratch.s, scratch.q_own, scratch.own.at[stage].transpose((1, 0)), accumulate=True)
        plgpu.tcgen05_commit_arrive(scratch.s_full)

    def add_values(self, used, accumulate) -> None:
        """O = P V, or O += P V."""
        scratch = self.scratch
        stage = self.cta.own_stage(used)
        plgpu.barrier_wait(scratch.p_full)
        plgpu.tcgen05_mma(
            scratch.o, scratch.p, scratch.own.at[stage], scratch.own_free.at[stage], accumulate=accumulate
        )
        plgpu.tcgen05_commit_arrive(scratch.o_full)


class Softmax(tcgen05_attention.Softmax):
    """The warpgroup that turns scores into weights, rescales sums, and stores results."""

    value_scale: Any = None
    """The scale of all entries, if they have one."""

    def load_scale(self):
        """The factor of the scores, which the scale of the entries is part of."""
        scale, kv_scale = super().load_scale(), self.cta.operands.kv_scale
        if kv_scale is None:
            return scale
        self.value_scale = kv_scale[0]
        return scale * self.value_scale

    @property
    def values(self):
        """The own halves of keys."""
        return self.scratch.own

    def value_stage(self, used):
        """Their stage."""
        return self.cta.own_stage(used)

    def store(self, tile: WorkTile, running_max, row_sum) -> None:
        """Stores the results of a work tile, by way of the place of its queries."""
        cta, refs, staged = self.cta, self.cta.results, self.scratch.q
        inverse, lse = self.softmax.finalize(row_sum.sum(axis=1), running_max)
        if self.value_scale is not None:
            inverse *= self.value_scale

        def store_values(factor, dtype, to, place):
            for columns, x in self.sums():
                x = (x * over_columns(factor, O_COLUMNS)).astype(dtype)
                staged[:, columns] = x if x.dtype == staged.dtype else lax.bitcast_convert_type(x, staged.dtype)
            plgpu.wait_load_tmem()
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, to.at[place, cta.rows, cta.columns(cta.half)])

        @pl.when(tile.split < 0)
        def _():
            store_values(inverse, self.kernel.dtype, refs.out, tile.request)
            pl.when(cta.half == 0)(lambda: store(refs.lse.at[tile.request, cta.rows], lse * (1 / LOG2E)))

        @pl.when(tile.split >= 0)
        def _():
            magnitude = self.split_scales()
            store_values(1 / magnitude, SPLIT_DTYPE, refs.split_out, tile.split)
            store(refs.split_scale.at[tile.split, cta.half, cta.rows], magnitude * inverse)
            pl.when(cta.half == 0)(lambda: store(refs.split_lse.at[tile.split, cta.rows], lse))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
