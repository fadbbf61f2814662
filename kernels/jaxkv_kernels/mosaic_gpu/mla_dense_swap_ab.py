"""MLA decode of few rows (query tokens x heads of a request): the operands of the products are swapped.

A tile of 64 rows, as in `mla_dense.py`, would be mostly padding.  Here keys and values provide the 64 rows of wgmma,
and the few queries its columns:

    S' = K Q'     [64 keys, rows]      K as it is stored, Q likewise
    O' += V' P'   [R, rows]            V is K's first R columns, transposed; P is stored as [rows, 64 keys]

Latents have R values, a multiple of 64 up to 512.  Rotary parts have 64, or fewer: these have tiles of their own, whose
swizzle is narrower.

The schedule is memory-bound: the tensor cores are busy for half of the time that a tile takes to load.

Work.  A CTA of two warpgroups walks its partition of the plan: work tiles, each a range of key tiles of a request.  If
the plan is shared, a cluster of two CTAs walks a partition.  Each CTA has half of the keys of a work tile.  At its end,
the second CTA sends its result to the first one, which merges and stores it (`cluster_sharing.py`).

Timeline, downwards; `->` names the barrier that a line waits for.

    producer                                    consumer
    tile of keys: one copy per page
      -> k_free[stage]
    queries of the next work tile,              S' = K Q'                    -> q_full[stage] once, k_full[stage]
      while this one is computed                mask; vote: does any score exceed the running max by more than the
      -> done[stage], of 4 work tiles ago         threshold?  If so: new maximum over keys, rescale O' and the row sums
    stores that work tile's result first        P = exp2(S' - running max) to shared memory
                                                in a masked tile: zeroes the values of unseen tokens
                                                O' += V' P', arrives k_free[stage]
                                                after the last tile: stores the result in place of the
                                                  queries, arrives done[stage]

The producer's lines are `fetch`, `fetch_queries` and `store_result` of `Producer`, in the order of
`Producer.work_tile`.  The consumer's are `Consumer.step`, around which `Consumer.work_tile` waits for the queries and
stages the result.

Keys are copied in whole rows, since reads of whole pages have the highest bandwidth.  O' stays in registers.  Each
warp has the scores of all rows against 16 of the 64 keys, and all warps must use the same running max, so the warpgroup
votes once per tile.  A lane keeps row sums over its own keys until the work tile ends.  A result stays in shared memory
until the queries of a later work tile need its stage, or until the end of the kernel.  Most CTAs have no more work
tiles than query stages, and so store nothing while they read.  This matters: 4 MB of writes of splits among 853 MB of
reads cost 3 % of the time.

Barriers (the fields of `Barriers`), and how many arrivals complete them: TMA copies for `full`, the consumer for the
others.  `MLASwapAB.types` has their counts.
    q_full[stage]    the queries have landed (2: their rotary part is copied separately)
    k_full[stage]    a tile of keys has landed (1 per page, or 2 if rotary keys have tiles of their own)
    k_free[stage]    the tile has been multiplied (1)
    done[stage]      the result is in place of the queries (1)
Within the consumer warpgroup, the vote is also a barrier: after it, all warps have finished with the previous tile's P
and with the first product of this tile, so that P may be overwritten and values may be cleared.

With a window, the tiles of a request begin at the one with the first key that some query sees.

Budget, for 16 rows and entries of 512 + 64; smaller ones leave room for more tiles of keys.  Shared memory: K 144 KiB +
queries or results 72 KiB + P 2 KiB + maxima across warps 2 KiB + stats and barriers 1 KiB = 221 KiB of 227.  Registers:
O' 64 per lane, S' and the row sums 8 each; two warpgroups leave 255 for each lane.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import DecodeCall, DecodeMLA, PlanDecode
from jaxkv_kernels.mosaic_gpu.attention_reasons import plain_latents
from jaxkv_kernels.mosaic_gpu.cluster_sharing import PLACES, Exchange, exchange_types, merge_factors, own_steps
from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, KernelResults, result_types, split_scale
from jaxkv_kernels.mosaic_gpu.masks import Ends, apply_mask, clear_values, first_seen, is_masked, seen_tokens
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, PageTable, copies_per_tile, token_rows
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, multiply_add
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, named, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, WGMMA, filled, over_rows, zeros
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import rotary_type, swizzled
from jaxkv_kernels.mosaic_gpu.sizes import LATENT, ROPE, TILE
from jaxkv_kernels.mosaic_gpu.softmax import THRESHOLDS, OnlineSoftmax, check_threshold
from jaxkv_kernels.mosaic_gpu.tile_scheduler import (
    CTAS,
    TILE_COSTS,
    SplitCosts,
    WorkTile,
    load_work_range,
    load_work_tile,
)
from jaxkv_kernels.mosaic_gpu.token_rows import in_entries_dtype
from jaxkv_kernels.tuning import require


@dataclass(frozen=True, kw_only=True)
class MLASwapABConfig:
    """`decode_mla` with up to SWAP_AB_ROWS rows per request."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "query_stages": (2, 3, 4),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(TILE_COSTS, least=least) for least in (1, 2, 4)),
    }

    stages: int = 2
    """Tiles of keys in shared memory, 72 KiB each."""
    query_stages: int = 4
    """Work tiles whose queries, or results, are in shared memory, 18 KiB each."""
    rescale_threshold: int = 8
    """As in MLADenseConfig.  Here a rescale costs more, since all warps must agree on the maximum."""
    split_costs: SplitCosts = TILE_COSTS
    """In steps of one tile.  Queries and results are copied during the walk over keys, and splits are small."""

    def __post_init__(self):
        require(self.stages == 2, self, "stages", "2, which is what shared memory holds")
        require(2 <= self.query_stages <= 4, self, "query_stages", "2 to 4, which is what shared memory holds")
        check_threshold(self)


def unsupported_reasons(call: DecodeCall | PlanDecode) -> Iterator[str]:
    """Reasons against attending to the entries of this call."""
    yield from plain_latents(call)


def attend(call: DecodeMLA, queries: Sequence[jax.Array], config: MLASwapABConfig, *, interpret: bool) -> KernelResults:
    """Results of whole requests and splits, by the plan of `call`.

    `queries` are those of `call` as [B, rows, R] and, if entries have a rotary part, [B, rows, P], with 8 or 16 rows.
    """
    return MLASwapAB(call, queries, config, interpret=interpret).run()


class Operands(NamedTuple):
    """The arrays that the kernel reads; in the kernel, references to them."""

    q: Any
    """Queries [B, rows, R]."""
    qr: Any
    """Rotary queries [B, rows, P]; None if entries have no rotary part."""
    kv: Any
    """The cache, in the view of `token_rows`."""
    block_tables: Any
    layer: Any
    """int32 [1]."""
    scale: Any
    """The softmax scale, float32 [1]."""
    partitions: Any
    """Of the plan, like the next two."""
    work_tiles: Any
    split_requests: Any


class Memory(NamedTuple):
    """Shared memory."""

    q: Any
    """Queries, or results in their place [query stages, rows, R]."""
    qr: Any
    """Rotary queries [query stages, rows, P]; None if entries have no rotary part."""
    k: Any
    """Tiles of keys [stages, 64, R], or [stages, 64, R + 64] with rotary parts of 64."""
    kr: Any
    """Tiles of rotary keys [stages, 64, P], if they are not in `k`; None otherwise."""
    p: Any
    """P [rows, 64]."""
    stats: Any
    """float32 [query stages, 2, rows]: log-sum-exps and, of splits, scales."""


class Barriers(NamedTuple):
    """The barriers of the table at the head of this file, one per stage."""

    q_full: Any
    done: Any
    k_full: Any
    k_free: Any


class MLASwapAB:
    """The kernel for calls of these shapes: its sizes, its memory, and its launch."""

    def __init__(self, call: DecodeMLA, queries: Sequence[jax.Array], config: MLASwapABConfig, *, interpret: bool):
        self.call, self.plan, self.interpret = call, call.plan, interpret
        self.q, self.qr, *_ = *queries, None
        self.batch, self.rows, self.latent = self.q.shape
        self.rope = 0 if self.qr is None else self.qr.shape[-1]
        _, self.tokens, self.heads, _ = call.q_latent.shape
        self.buffer, self.pages = in_entries_dtype(call.buffer, call.pages, call.entry.dtype)
        self.view = token_rows(self.pages)
        self.beside = self.rope if self.rope == ROPE else 0  # columns of rotary keys in the same tiles as latents
        self.dtype = self.q.dtype
        self.stages = config.stages * (LATENT + ROPE) // (self.latent + self.rope)
        self.query_stages = config.query_stages
        self.softmax = OnlineSoftmax(keys=0, threshold=config.rescale_threshold, interpret=interpret)

    def run(self) -> KernelResults:
        """Launches a CTA, or a cluster, per partition of the plan."""
        call, plan = self.call, self.plan
        results = result_types(
            (self.batch,), plan.max_splits, self.dtype,
            rows=self.rows, width=self.latent, lse=self.rows, split_lse=self.rows, scales=1,
        )  # fmt: skip
        exchanged, exchange_scratch = (), {}
        if plan.shared:
            exchanged, exchange_scratch = exchange_types(plan.num_partitions, self.rows, self.latent, self.dtype)
        results, _ = kernel(
            self.cta,
            interpret=self.interpret,
            auto_barriers=False,
            reduction_bytes=128 * self.rows,  # for maxima across warps: a place for each lane of each warp
            out_type=(results, exchanged),
            grid=(plan.num_partitions,),
            grid_names=("partition",),
            cluster=(CTAS if plan.shared else 1,),
            cluster_names=("cta",),
            num_threads=2,
            thread_name="wg",
            kernel_name="decode_mla",
            scratch_types=self.types() | exchange_scratch,
        )(
            Operands(
                q=self.q,
                qr=self.qr,
                kv=self.view.of(self.buffer),
                block_tables=call.block_tables,
                layer=jnp.reshape(call.layer, (1,)),
                scale=jnp.reshape(call.scale, (1,)),
                partitions=plan.partitions,
                work_tiles=plan.work_tiles,
                split_requests=plan.split_requests,
            )
        )
        return results

    def types(self) -> dict[str, Any]:
        """Scratch types: shared memory and barriers."""
        rows, stages, query_stages, dtype = self.rows, self.stages, self.query_stages, self.dtype
        rotary = partial(rotary_type, rope=self.rope, dtype=dtype)
        parts_of_queries = 2 if self.rope else 1
        parts_of_keys = 1 if self.rope == self.beside else 2  # tiles per stage
        return {
            "q": swizzled(query_stages, rows, self.latent, dtype=dtype),
            **({"qr": rotary(query_stages, rows)} if self.rope else {}),
            "k": swizzled(stages, TILE, self.latent + self.beside, dtype=dtype),
            **({"kr": rotary(stages, TILE)} if parts_of_keys > 1 else {}),
            "p": swizzled(rows, TILE, dtype=dtype),
            "stats": plgpu.SMEM((query_stages, 2, rows), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=parts_of_queries, num_barriers=query_stages),
            "done": plgpu.Barrier(num_barriers=query_stages),
            "k_full": plgpu.Barrier(num_arrivals=copies_per_tile(self.pages) * parts_of_keys, num_barriers=stages),
            "k_free": plgpu.Barrier(num_barriers=stages),
        }

    def cta(self, operands: Operands, results: KernelResults, exchanged, **scratch) -> None:
        """What a CTA runs; `exchanged` are the places of `cluster_sharing`, if the plan is shared."""
        pdl_launch_dependents(operands.split_requests, interpret=self.interpret)
        partition, rank, wg = (lax.axis_index(axis) for axis in ("partition", "cta", "wg"))
        exchange = None
        if self.plan.shared:
            exchange = Exchange.of(exchanged, partition, scratch, rank, interpret=self.interpret)
        cta = CTA(self, operands, named(Memory, scratch), named(Barriers, scratch), partition, rank)
        lax.cond(wg == 0, Consumer(cta, exchange).run, Producer(cta, results).run)


class CTA:
    """What producer and consumer of a CTA share."""

    def __init__(self, kernel: MLASwapAB, operands: Operands, memory: Memory, barriers: Barriers, partition, rank):
        self.kernel, self.operands, self.memory, self.barriers = kernel, operands, memory, barriers
        self.rank = rank
        """The index of the CTA in its cluster."""
        layer = operands.layer
        self.in_cache = (layer[0] >= 0) & (layer[0] < kernel.pages.num_layers)
        self.table = PageTable(operands.block_tables, kernel.pages)
        self.stores = rank == 0 if kernel.plan.shared else True
        self.first, self.end, first_tile = load_work_range(operands.partitions, partition)
        """The indices of the first work tile, and of the one after the last."""
        self.first_tile = self.own_part(first_tile)

    def load_tile(self, n) -> WorkTile:
        """This CTA's part of the n-th work tile."""
        return self.own_part(load_work_tile(self.operands.work_tiles, n))

    def own_part(self, tile: WorkTile) -> WorkTile:
        """The steps of a work tile that this CTA walks: all, unless the two CTAs of a cluster share its keys."""
        return own_steps(tile, self.rank, TILE) if self.kernel.plan.shared else tile

    def first_token(self, tile: WorkTile, step):
        """The position of a step's first token in the request."""
        token = step * TILE
        return token if self.kernel.call.window is None else tile.origin + token

    def query_stage_of(self, n):
        """The stage of the queries of the n-th work tile."""
        return lax.rem(n - self.first, jnp.int32(self.kernel.query_stages))

    def stage_of(self, used):
        """The stage of a tile of keys, which follows `used` others."""
        return lax.rem(used, jnp.int32(self.kernel.stages))


class Producer:
    """The warpgroup that copies queries and keys to shared memory, and results from there."""

    def __init__(self, cta: CTA, results: KernelResults):
        self.cta, self.kernel, self.operands, self.results = cta, cta.kernel, cta.operands, results
        self.memory, self.barriers = cta.memory, cta.barriers
        self.paged: PagedKeys  # set by `run`: to make it emits instructions

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        cta, kernel = self.cta, self.kernel
        layer = jnp.where(cta.in_cache, self.operands.layer[0], 0)
        self.paged = PagedKeys(self.operands.kv, kernel.view, cta.table, layer)
        start = jnp.int32(0), self.look_up(cta.first_tile, cta.first_tile.begin), cta.first_tile
        used = lax.fori_loop(cta.first, cta.end, self.work_tile, start)[0]

        @pl.loop(jnp.maximum(used - kernel.stages, 0), used)
        def _(use):
            plgpu.barrier_wait(self.barriers.k_free.at[cta.stage_of(use)])  # every completion must be waited for

        pl.loop(jnp.maximum(cta.end - kernel.query_stages, cta.first), cta.end)(self.store_result)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def work_tile(self, n, carry):
        """Fetches the keys and queries of a work tile; `found` is its first tile of keys."""
        used, found, tile = carry
        next_tile = self.cta.load_tile(n + 1)
        fetch = partial(self.fetch, tile)
        carry = fetch(tile.begin, (used, found))
        self.fetch_queries(tile.request, n)
        next_found = self.look_up(next_tile, next_tile.begin)  # early: keys of this work tile are still to be fetched
        used, _ = lax.fori_loop(tile.begin + 1, tile.end, fetch, carry)
        return used, next_found, next_tile

    def look_up(self, tile: WorkTile, step):
        """The blocks of a tile of keys."""
        return self.paged.look_up(tile.request, self.cta.first_token(tile, step))

    def fetch(self, tile: WorkTile, step, carry):
        """Fetches a tile of keys, once its stage is free, and looks up the next one."""
        used, found = carry
        kernel, memory, barriers, stage = self.kernel, self.memory, self.barriers, self.cta.stage_of(carry[0])
        next_found = self.look_up(tile, step + 1)  # the loads proceed while the producer waits
        pl.when(used >= kernel.stages)(lambda: plgpu.barrier_wait(barriers.k_free.at[stage]))
        full = barriers.k_full.at[stage]
        parts = [Columns(0, kernel.latent + kernel.beside, memory.k.at[stage], full)]
        if memory.kr is not None:
            parts.append(Columns(kernel.latent, kernel.rope, memory.kr.at[stage], full))
        self.paged.fetch(found, self.cta.first_token(tile, step), *parts)
        return used + 1, next_found

    def fetch_queries(self, request, n) -> None:
        """Fetches the queries of the n-th work tile, once the result in their stage is stored."""
        kernel, memory, stage = self.kernel, self.memory, self.cta.query_stage_of(n)

        @pl.when(n - self.cta.first >= kernel.query_stages)
        def _():
            self.store_result(n - kernel.query_stages)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        for source, into in ((self.operands.q, memory.q), (self.operands.qr, memory.qr)):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[request], into.at[stage], self.barriers.q_full.at[stage])

    def store_result(self, n) -> None:
        """Starts the stores of the n-th work tile's result, once it is in place of the queries."""
        tile = load_work_tile(self.operands.work_tiles, n)
        stage, results = self.cta.query_stage_of(n), self.results
        plgpu.barrier_wait(self.barriers.done.at[stage])

        def store_to(values_to, *per_row_to):
            plgpu.copy_smem_to_gmem(self.memory.q.at[stage], values_to)
            for i, to in enumerate(per_row_to):
                plgpu.copy_smem_to_gmem(self.memory.stats.at[stage, i], to)

        @pl.when(self.cta.stores & (tile.split < 0))
        def _():
            store_to(results.out.at[tile.request], results.lse.at[tile.request])

        @pl.when(self.cta.stores & (tile.split >= 0))
        def _():
            at = tile.split
            store_to(results.split_out.at[at], results.split_lse.at[at], results.split_scale.at[at, 0])


class Walk(NamedTuple):
    """What the steps of a work tile have in common."""

    tile: WorkTile
    query_stage: Any
    ends: Ends
    unmasked: Any
    """The steps that need no mask; see `masks.seen_tokens`."""


class Consumer:
    """The warpgroup that computes scores and results."""

    def __init__(self, cta: CTA, exchange: Exchange | None):
        self.cta, self.kernel, self.operands, self.exchange = cta, cta.kernel, cta.operands, exchange
        self.memory, self.barriers, self.softmax = cta.memory, cta.barriers, cta.kernel.softmax
        self.scale: Any  # set by `run`, which loads it

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        cta = self.cta
        self.scale = self.operands.scale[0] * LOG2E
        lax.fori_loop(cta.first, cta.end, self.work_tile, (jnp.int32(0), cta.first_tile))
        if self.exchange is not None:  # every completion of a barrier must be waited for
            pl.when((cta.rank == 1) & (cta.end > cta.first))(self.exchange.wait)

    def work_tile(self, n, carry):
        """Attends to the keys of a work tile, and stages the result for the producer."""
        used, tile = carry
        kernel, cta, rows = self.kernel, self.cta, self.kernel.rows
        next_tile = cta.load_tile(n + 1)  # the loads proceed while this one is computed
        ends, unmasked = seen_tokens(tile, cta.in_cache, TILE, kernel.call.window)
        walk = Walk(tile, cta.query_stage_of(n), ends, unmasked)
        plgpu.barrier_wait(self.barriers.q_full.at[walk.query_stage])
        carry = used, zeros(kernel.latent, rows), self.softmax.empty_max(rows), zeros(TILE, rows)
        used, acc, running_max, row_sum = lax.fori_loop(tile.begin, tile.end, partial(self.step, walk), carry)
        inverse, lse = self.softmax.finalize(row_sum.sum(axis=0), running_max)
        acc = acc * over_rows(inverse, kernel.latent)
        if self.exchange is not None:
            acc, lse = self.merge(self.exchange, n, acc, lse)

        @pl.when(cta.stores & (tile.split < 0))
        def _():
            self.stage_result(walk.query_stage, acc.astype(kernel.dtype), lse * (1 / LOG2E))

        @pl.when(cta.stores & (tile.split >= 0))
        def _():
            values, magnitude = self.as_split(acc)
            self.stage_result(walk.query_stage, values, lse, magnitude)

        plgpu.barrier_arrive(self.barriers.done.at[walk.query_stage])
        return used, next_tile

    def step(self, walk: Walk, i, carry):
        """Attends to a tile of keys: the column of the timeline."""
        used, acc, running_max, row_sum = carry
        stage, masked = self.cta.stage_of(used), is_masked(walk.unmasked, i)
        s = self.scores(walk, i, stage, masked)
        running_max, acc, row_sum = self.softmax.update(s, running_max, acc, row_sum)
        w = self.softmax.weights(s, running_max)
        self.memory.p.transpose((1, 0))[...] = w.astype(self.kernel.dtype)
        plgpu.commit_smem()
        pl.when(masked)(partial(self.clear_values, walk, i, stage))
        acc = self.add_values(stage, acc)
        plgpu.barrier_arrive(self.barriers.k_free.at[stage])
        return used + 1, acc, running_max, row_sum + w

    def scores(self, walk: Walk, i, stage, masked):
        """S' of a tile of keys, scaled, capped and masked."""
        kernel, call, tile = self.kernel, self.kernel.call, walk.tile
        product = partial(self.multiply_queries, stage, walk.query_stage)
        s = pl.run_scoped(product, plgpu.ACC((TILE, kernel.rows), jnp.float32)) * self.scale
        if call.logit_cap is not None:
            s = cap_scores(s, call.logit_cap)
        mask = partial(
            apply_mask, table=self.cta.table, request=tile.request, first_token=self.cta.first_token(tile, i),
            first_row=0, ends=walk.ends, tokens=kernel.tokens, heads=kernel.heads, keys=0,
            window=call.window, ahead=call.ahead,
        )  # fmt: skip
        return lax.cond(masked, mask, lambda s: s, s)

    def multiply_queries(self, stage, query_stage, acc):
        """K Q' of a tile of keys, once it has landed; `acc` is an accumulator."""
        memory, latent, rope = self.memory, self.kernel.latent, self.kernel.rope
        plgpu.barrier_wait(self.barriers.k_full.at[stage])
        plgpu.wgmma(acc, memory.k.at[stage, :, pl.ds(0, latent)], memory.q.at[query_stage].transpose((1, 0)))
        if rope:
            keys = memory.k.at[stage, :, pl.ds(latent, rope)] if memory.kr is None else memory.kr.at[stage]
            plgpu.wgmma(acc, keys, memory.qr.at[query_stage].transpose((1, 0)))
        return acc[...]

    def clear_values(self, walk: Walk, i, stage) -> None:
        """Zeroes the values of unseen tokens."""
        kernel, tile, ends = self.kernel, walk.tile, walk.ends
        clear_values(
            self.memory.k, (stage,), 0, kernel.latent, self.cta.table, tile.request, self.cta.first_token(tile, i),
            ends.seen, first_seen=first_seen(ends, kernel.tokens, kernel.call.window), interpret=kernel.interpret,
        )  # fmt: skip

    def add_values(self, stage, acc):
        """O' + V' P'."""
        values = self.memory.k.at[stage, :, pl.ds(0, self.kernel.latent)].transpose((1, 0))
        p = self.memory.p
        acc, _ = multiply_add(acc, values, p.transpose((1, 0)), scratch=p if self.kernel.interpret else None)
        return acc

    def stage_result(self, query_stage, values, *per_row) -> None:
        """Stages a result for the producer: values in place of the queries, and `per_row` in `stats`."""
        self.memory.q.at[query_stage].transpose((1, 0))[...] = values
        for i, x in enumerate(per_row):
            self.memory.stats[query_stage, i] = x
        plgpu.commit_smem()

    def as_split(self, values):
        """Values of a split, and their scales."""
        latent = self.kernel.latent
        parts = [values[at : at + TILE] for at in range(0, latent, TILE)]
        # Reduces over the parts first, which needs no exchange between lanes.
        magnitude = split_scale(reduce(jnp.maximum, [jnp.maximum(x, -x) for x in parts]).max(axis=0))
        values = (values * over_rows(1 / magnitude, latent)).astype(SPLIT_DTYPE)
        return lax.bitcast_convert_type(values, self.kernel.dtype), magnitude

    def merge(self, exchange: Exchange, n, values, lse):
        """Merges the results of both CTAs in the first one."""
        place, staged = lax.rem(n - self.cta.first, jnp.int32(PLACES)), self.memory.q.at[self.cta.query_stage_of(n)]
        receive = partial(self.receive, exchange, place, staged, values, lse)
        send = partial(self.send, exchange, n, place, staged, values, lse)
        return lax.cond(self.cta.rank == 0, receive, send)

    def send(self, exchange: Exchange, n, place, staged, values, lse):
        """Sends this CTA's result as a split, by way of `staged`."""
        # The other CTA has read what is in this place.
        pl.when(n > self.cta.first)(exchange.wait)
        staged.transpose((1, 0))[...], exchange.rows[0, 1] = self.as_split(values)
        exchange.rows[0, 0] = lse
        exchange.send(staged, place)
        return values, lse

    def receive(self, exchange: Exchange, place, staged, values, lse):
        """Adds the result of the other CTA to this one's."""
        latent, rows = self.kernel.latent, self.kernel.rows
        exchange.arrive()
        exchange.receive(staged, place)
        others = plgpu.load(staged.transpose((1, 0)), layout=WGMMA)
        others = lax.bitcast_convert_type(others, SPLIT_DTYPE).astype(jnp.float32)
        of_other = (plgpu.load(exchange.rows.at[1, i], layout=COLUMN) for i in range(2))
        own, other, merged = merge_factors(self.softmax, lse, filled(COLUMN, 1, rows), *of_other)
        plgpu.commit_smem()  # all lanes have read `staged`
        return values * over_rows(own, latent) + others * over_rows(other, latent), merged
