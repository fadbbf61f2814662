"""Grouped-query and multi-head decode: two consumer warpgroups take alternate key tiles.

Work.  A tile is 64 rows by 64 keys with their values.  The rows of one KV head of a request are query tokens x query
heads of the KV head.  A CTA owns one KV head and 64 rows, and walks its partition of the plan: work tiles, each a range
of pairs of key tiles of a request.  With fewer rows the tile is partly empty, which costs nothing: reading keys and
values takes three times as long as multiplying full tiles.  CTAs of neighbouring heads are neighbours in the grid, so
that they read neighbouring memory if the heads of a token are contiguous.  With a window, the tiles of a request begin
at the one with the first key that some row sees.

Timeline, downwards; `->` names the barrier that a line waits for.

    producer                                     consumer w
    pair of tiles, one copy per page, keys and
      values together (two if they lie apart)    tile w of each pair: S = Q K'  -> q_full[stage] once, kv_full[stage]
      -> kv_free[stage]                          mask; vote: does any score exceed the running max by more than the
    queries of the next work tile,                 threshold?  If so: rescale O and the row sums
      while this one is computed                 P = exp2(S - running max), in registers
      -> done[stage], of two work tiles ago      in a masked tile: zeroes the values of unseen tokens
    stores that work tile's result first         O += P V, arrives kv_free[stage]
                                                 after the last tile
                                                   consumer 1: stores its O, running max and row sums to shared
                                                     memory -> taken; arrives both
                                                   consumer 0: arrives both, -> both; adds them to its own, arrives
                                                     taken; stores the result in place of the queries, arrives
                                                     done[stage]

The producer's lines are `fetch`, `fetch_queries` and `store_result` of `Producer`, in the order of `Producer.pair`.
The consumers' are `Consumer.step` and, after the last tile, `share_part` of consumer 1, and `add_other_part` and
`stage_result` of consumer 0.

The consumers exchange nothing until the end of a work tile: each has its own running max, row sums and output.  A
result stays in shared memory until the queries of a later work tile need its stage, or until the end of the kernel.
Then the producer stores it.

Barriers (the fields of `Barriers`), and how many arrivals complete them: TMA copies for `full`, consumers for the
others.  `GQA.types` has their counts.
    q_full[stage]    the queries have landed (1 per 64 columns)
    kv_full[stage], kv_free[stage]
                     a tile has landed (1 per copy); it has been multiplied (1).  Even stages are consumer 0's, odd
                     stages consumer 1's
    both             both consumers have finished a work tile, and consumer 1's part of it is in `other` and `stats`
                     (2).  Only consumer 0 waits for it
    taken            consumer 0 has read that part, so that consumer 1 may write the part of its next work tile (1)
    done[stage]      the result is in place of the queries (1)
Automatic barriers are off: within a warpgroup, what one thread writes, others read only through TMA or wgmma after
commit_smem.

Budget, for heads of 128 + 128 values.  Shared memory: K and V 128 KiB (2 x 2 stages) + Q 32 KiB (2 stages) + `other`
32 KiB + stats and barriers 2 KiB = 194 KiB of 227.  `_stages` fits the number of stages to the heads: for 256 + 256
values, there is one per consumer and one of queries.  Registers: O 64 + S 32 + P 16 of 232 per lane for consumers, 40
for the producer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import arrays_of
from jaxkv_kernels.calls import DecodeCall, DecodeKV, PlanDecode
from jaxkv_kernels.mosaic_gpu.attention_reasons import values_of
from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, KernelResults, result_types, split_scale
from jaxkv_kernels.mosaic_gpu.layout_reasons import block_sizes, origins
from jaxkv_kernels.mosaic_gpu.masks import Ends, apply_mask, clear_values, ends_of, first_seen, first_unmasked
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, PageTable, copies_per_tile, token_rows
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, floordiv, multiply_add, opaque_zero
from jaxkv_kernels.mosaic_gpu.runtime.device import SHARED_MEMORY, consumer_registers
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, named, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import (
    LANE_COLUMNS,
    ROW,
    WGMMA,
    fold_columns,
    over_columns,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.mosaic_gpu.softmax import THRESHOLDS, OnlineSoftmax, check_threshold
from jaxkv_kernels.mosaic_gpu.tile_scheduler import (
    PAIR_COSTS,
    SplitCosts,
    WorkTile,
    load_work_range,
    load_work_tile,
)
from jaxkv_kernels.mosaic_gpu.token_rows import in_entries_dtype
from jaxkv_kernels.tuning import require

STATS_AND_BARRIERS = 3 * 1024
"""An upper bound of the bytes of shared memory other than tiles, for up to 4 query stages."""
CHUNK = 64
"""Columns of queries, or of a result, that are contiguous in shared memory."""


@dataclass(frozen=True, kw_only=True)
class GQAConfig:
    """`decode_kv`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "stages": (1, 2, 3, 4),
        "query_stages": (1, 2, 3),
        "rescale_threshold": THRESHOLDS,
        "producer_registers": (24, 40),
        "split_costs": tuple(replace(PAIR_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    stages: int = 4
    """The most tiles of keys and values per consumer warpgroup; large heads leave room for fewer."""
    query_stages: int = 2
    """The most work tiles whose queries, or results, are in shared memory; large heads leave room for fewer."""
    producer_registers: int = 40
    """As in MLADenseConfig.  With pages of 16 tokens, the producer holds the blocks of 16 copies."""
    rescale_threshold: int = 8
    """As in MLADenseConfig."""
    split_costs: SplitCosts = PAIR_COSTS
    """In steps of two tiles, as in MLADenseConfig."""

    def __post_init__(self):
        require(self.stages >= 1, self, "stages", "1 or more")
        require(1 <= self.query_stages <= 4, self, "query_stages", "1 to 4")
        require(self.producer_registers in (24, 40, 56), self, "producer_registers", "24, 40 or 56")
        check_threshold(self)


def chunks_of(columns: int):
    """Slices of CHUNK columns that cover `columns` columns."""
    return [pl.ds(first, CHUNK) for first in range(0, columns, CHUNK)]


def _stages(config: GQAConfig, head_dim: int, value_dim: int, itemsize: int) -> tuple[int, int]:
    """Stages of keys and values per consumer, and of queries: those of `config`, or as many as shared memory holds."""
    room = SHARED_MEMORY - TILE * value_dim * 4 - STATS_AND_BARRIERS  # beside `other`
    queries, tiles = TILE * max(head_dim, value_dim) * itemsize, 2 * TILE * (head_dim + value_dim) * itemsize
    stages = min((room - queries) // tiles, config.stages)
    return stages, min((room - stages * tiles) // queries, config.query_stages)


def unsupported_reasons(call: DecodeCall | PlanDecode) -> Iterator[str]:
    """Reasons against attending to the entries of this call."""
    if not {*call.entry.sizes} <= {64, 128, 192, 256}:
        yield f"{values_of(call.entry)}: supports 64, 128, 192 and 256 of each"
    yield from block_sizes(call.pages)
    yield from origins(call.pages, call.buffer)


def attend(call: DecodeKV, q: jax.Array, config: GQAConfig, *, interpret: bool) -> KernelResults:
    """Results of whole requests and splits, by the plan of `call`.

    `q` are its queries as [B, heads, rows, head dim].  A KV head's rows are query tokens x its query heads, padded to a
    multiple of 8 if there are more than 8.
    """
    return GQA(call, q, config, interpret=interpret).run()


class Operands(NamedTuple):
    """The arrays that the kernel reads; in the kernel, references to them."""

    q: Any
    """Queries [B, heads, rows, head dim]."""
    kv: Any
    """Keys and their values, or keys, in the view of `token_rows`."""
    v: Any
    """Values that lie apart from their keys, in a view of their own; None otherwise."""
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
    """Queries, or results in their place [query stages, chunks, 64, CHUNK]: as many chunks of columns as the wider of
    the two has."""
    kv: Any
    """Tiles of keys and values side by side, or of keys [2 * stages, 64, columns]."""
    v: Any
    """Tiles of values [2 * stages, 64, value dim], if these lie apart; None otherwise."""
    other: Any
    """Consumer 1's O, float32 [64, value dim]."""
    stats: Any
    """float32 [2 + 2 * query stages, 64]: running max and row sums of consumer 1; of each result, log-sum-exps and, if
    it is a split, scales."""
    register_operands: Any
    """Register operands of wgmma [2, 64, 64], which the interpreter needs in shared memory; None on a GPU."""


class Barriers(NamedTuple):
    """The barriers of the table at the head of this file; `q_full`, `done`, `kv_full` and `kv_free` one per stage."""

    q_full: Any
    done: Any
    kv_full: Any
    kv_free: Any
    both: Any
    taken: Any


class GQAKernel(ABC):
    """A kernel of `decode_kv` for calls of these shapes: what those of Hopper and of Blackwell share."""

    row_tiles: int
    """Tiles of rows of a KV head."""

    def __init__(self, call: DecodeKV, q: jax.Array, *, interpret: bool):
        self.call, self.q, self.plan, self.interpret = call, q, call.plan, interpret
        self.batch, self.heads, self.rows, self.head_dim = q.shape
        self.tokens, self.rows_per_token = call.q.shape[1], call.q.shape[2] // self.heads
        self.buffer, self.pages = in_entries_dtype(call.buffer, call.pages, call.entry.dtype)
        self.value_dim, self.dtype = call.entry.value_dim, q.dtype
        # Keys and values in a view of their own each, or side by side in a single one.
        self.views = [token_rows(part, second=bool(i)) for i, part in enumerate(self.pages.parts)]

    @abstractmethod
    def scratch_types(self) -> dict[str, Any]:
        """Types of the scratch memory, and of the barriers."""

    @abstractmethod
    def cta(self, operands: Operands, results: KernelResults, **scratch) -> None:
        """What a CTA runs."""

    def run(self) -> KernelResults:
        """Launches a CTA per partition of the plan, KV head and tile of rows."""
        call, plan = self.call, self.plan
        arrays = arrays_of(self.buffer, len(self.views))
        kv, *v = (view.of(array) for view, array in zip(self.views, arrays, strict=True))
        (results,) = kernel(
            self.cta,
            interpret=self.interpret,
            auto_barriers=False,
            out_type=(self.result_types(),),
            grid=(plan.num_partitions, self.heads * self.row_tiles),
            grid_names=("partition", "tile"),
            num_threads=3,
            thread_name="wg",
            kernel_name="decode_kv",
            scratch_types=self.scratch_types(),
        )(
            Operands(
                q=self.q,
                kv=kv,
                v=v[0] if v else None,
                block_tables=call.block_tables,
                layer=jnp.reshape(call.layer, (1,)),
                scale=jnp.reshape(call.scale, (1,)),
                partitions=plan.partitions,
                work_tiles=plan.work_tiles,
                split_requests=plan.split_requests,
            )
        )
        return results

    def result_types(self) -> KernelResults:
        """Shapes and dtypes of the results."""
        columns = self.value_dim + -self.value_dim % 128  # `combine` loads rows of whole chunks
        return result_types(
            (self.batch, self.heads), self.plan.max_splits, self.dtype,
            rows=self.rows, width=columns, lse=self.rows, split_lse=self.rows, scales=1,
        )  # fmt: skip


class GQA(GQAKernel):
    """The kernel for Hopper."""

    def __init__(self, call: DecodeKV, q: jax.Array, config: GQAConfig, *, interpret: bool):
        super().__init__(call, q, interpret=interpret)
        self.config = config
        self.row_tiles = -(-self.tokens * self.rows_per_token // TILE)
        self.apart = len(self.views) > 1
        """Whether keys and values are in tiles of their own, instead of side by side in one tile."""
        self.stages, self.query_stages = _stages(config, self.head_dim, self.value_dim, self.dtype.itemsize)
        self.softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret)

    @override
    def scratch_types(self):
        head_dim, value_dim, dtype = self.head_dim, self.value_dim, self.dtype
        stages, query_stages, copies = self.stages, self.query_stages, len(self.views) * copies_per_tile(self.pages)
        return {
            "q": swizzled(query_stages, max(head_dim, value_dim) // CHUNK, TILE, CHUNK, dtype=dtype),
            "kv": swizzled(2 * stages, TILE, head_dim if self.apart else head_dim + value_dim, dtype=dtype),
            **({"v": swizzled(2 * stages, TILE, value_dim, dtype=dtype)} if self.apart else {}),
            "other": swizzled(TILE, value_dim, dtype=jnp.float32),
            "stats": plgpu.SMEM((2 + 2 * query_stages, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=head_dim // CHUNK, num_barriers=query_stages),
            "done": plgpu.Barrier(num_barriers=query_stages),
            "kv_full": plgpu.Barrier(num_arrivals=copies, num_barriers=2 * stages),
            "kv_free": plgpu.Barrier(num_barriers=2 * stages),
            "both": plgpu.Barrier(num_arrivals=2),
            "taken": plgpu.Barrier(),
            **({"register_operands": swizzled(2, TILE, TILE, dtype=dtype)} if self.interpret else {}),
        }

    @override
    def cta(self, operands: Operands, results: KernelResults, **scratch) -> None:
        pdl_launch_dependents(operands.split_requests, interpret=self.interpret)
        partition, head_and_tile, wg = (lax.axis_index(axis) for axis in ("partition", "tile", "wg"))
        memory, barriers = named(Memory, scratch), named(Barriers, scratch)
        cta = CTA(self, operands, memory, barriers, partition, head_and_tile)
        # Nested branches: with three in a row, values that the last one needs would be live, and spilled, in the first.
        lax.cond(
            wg == 2,
            Producer(cta, results).run,
            lambda: lax.cond(wg == 0, Consumer(cta, 0).run, Consumer(cta, 1).run),
        )


class CTA:
    """What producer and consumers of a CTA share."""

    def __init__(self, kernel: GQA, operands: Operands, memory: Memory, barriers: Barriers, partition, head_and_tile):
        self.kernel, self.operands, self.memory, self.barriers = kernel, operands, memory, barriers
        self.head = floordiv(head_and_tile, kernel.row_tiles)
        self.first_row = pl.multiple_of(lax.rem(head_and_tile, jnp.int32(kernel.row_tiles)) * TILE, 8)
        self.table = PageTable(operands.block_tables, kernel.pages)
        layer = operands.layer
        self.in_cache = (layer[0] >= 0) & (layer[0] < kernel.pages.num_layers)
        self.first, self.end, self.first_tile = load_work_range(operands.partitions, partition)
        """The indices of the first work tile, and of the one after the last."""

    def load_tile(self, n) -> WorkTile:
        """The n-th work tile."""
        return load_work_tile(self.operands.work_tiles, n)

    def query_stage_of(self, n):
        """The stage of the queries of the n-th work tile."""
        return lax.rem(n - self.first, jnp.int32(self.kernel.query_stages))

    def stage_of(self, side: int, used, z: Any = 0):
        """The stage of a tile of consumer `side`, which follows `used` others of it; `z`: an opaque zero."""
        return 2 * (lax.rem(used, jnp.int32(self.kernel.stages)) + z) + side

    def end_of(self, side: int, tile: WorkTile):
        """The end of this side's tiles: the last pair of a request may lack its second tile."""
        return tile.end if side == 0 else jnp.minimum(tile.end, floordiv(tile.keys + (PAIR - 1 - TILE), PAIR))

    def first_token(self, tile: WorkTile, i, side: int):
        """The position, in the request, of the first token of tile `side` of pair `i`."""
        return tile.origin + i * PAIR + side * TILE


class Producer:
    """The warpgroup that copies queries, keys and values to shared memory, and results from there."""

    def __init__(self, cta: CTA, results: KernelResults):
        self.cta, self.kernel, self.operands, self.results = cta, cta.kernel, cta.operands, results
        self.memory, self.barriers = cta.memory, cta.barriers
        self.paged: list[PagedKeys]  # set by `run`: to make them emits instructions

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(self.kernel.config.producer_registers, action="decrease")
        cta, kernel, first, end = self.cta, self.kernel, self.cta.first, self.cta.end
        layer = jnp.where(cta.in_cache, self.operands.layer[0], 0)
        sources = zip((self.operands.kv, self.operands.v), kernel.views, strict=False)
        self.paged = [PagedKeys(source, view, cta.table, layer, cta.head) for source, view in sources]
        # First: after the keys of all CTAs, they would arrive last.
        pl.when(end > first)(lambda: self.fetch_queries(cta.first_tile.request, first))
        used, _ = lax.fori_loop(first, end, self.work_tile, ((jnp.int32(0), jnp.int32(0)), cta.first_tile))
        pl.loop(jnp.maximum(end - kernel.query_stages, first), end)(self.store_result)
        for side in range(2):
            pl.loop(jnp.maximum(used[side] - kernel.stages, 0), used[side])(partial(self.wait_until_free, side))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def wait_until_free(self, side: int, use) -> None:
        """Waits for a tile to be multiplied: every completion of a barrier must be waited for."""
        plgpu.barrier_wait(self.barriers.kv_free.at[self.cta.stage_of(side, use)])

    def work_tile(self, n, carry):
        """Fetches the keys, values and queries of a work tile; `used` counts the tiles of each consumer."""
        used, tile = carry
        next_tile = self.cta.load_tile(n + 1)  # the loads proceed while this one is fetched
        pair = partial(self.pair, n, tile, self.cta.end_of(1, tile))
        used, _ = lax.fori_loop(tile.begin, tile.end, pair, (used, self.look_up(tile, tile.begin)))
        return used, next_tile

    def pair(self, n, tile: WorkTile, second_end, i, carry):
        """Fetches a pair of tiles, or the first one of a pair without a second."""
        used, found = carry
        ahead = self.look_up(tile, i + 1)  # the loads proceed while the producer waits for kv_free
        self.fetch(found, tile, i, 0, used)
        pl.when(i < second_end)(lambda: self.fetch(found, tile, i, 1, used))
        pl.when((i == tile.begin) & (n > self.cta.first))(lambda: self.fetch_queries(tile.request, n))
        return (used[0] + 1, used[1] + (i < second_end).astype(jnp.int32)), ahead

    def look_up(self, tile: WorkTile, i):
        """The blocks of both tiles of pair `i`."""
        tokens = (self.cta.first_token(tile, i, side) for side in range(2))
        return tuple(self.paged[0].look_up(tile.request, token) for token in tokens)

    def fetch(self, found, tile: WorkTile, i, side: int, used) -> None:
        """Fetches a tile of keys and values, once its stage is free."""
        first_token = self.cta.first_token(tile, i, side)
        stage = self.cta.stage_of(side, used[side])
        pl.when(used[side] >= self.kernel.stages)(lambda: plgpu.barrier_wait(self.barriers.kv_free.at[stage]))
        full = self.barriers.kv_full.at[stage]
        for paged, into in zip(self.paged, (self.memory.kv, self.memory.v), strict=False):
            paged.fetch(found[side], first_token, Columns(0, into.shape[-1], into.at[stage], full))

    def fetch_queries(self, request, n) -> None:
        """Fetches the queries of the n-th work tile, once the result in their stage is stored."""
        cta, kernel, stage = self.cta, self.kernel, self.cta.query_stage_of(n)

        @pl.when(n - cta.first >= kernel.query_stages)
        def _():
            self.store_result(n - kernel.query_stages)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        source = self.operands.q.at[request, cta.head, pl.ds(cta.first_row, TILE)]
        for c, columns in enumerate(chunks_of(kernel.head_dim)):
            plgpu.copy_gmem_to_smem(source.at[:, columns], self.memory.q.at[stage, c], self.barriers.q_full.at[stage])

    def store_result(self, n) -> None:
        """Starts the stores of the n-th work tile's result, once it is in place of the queries."""
        tile, stage = self.cta.load_tile(n), self.cta.query_stage_of(n)
        head, results = self.cta.head, self.results
        plgpu.barrier_wait(self.barriers.done.at[stage])

        @pl.when(tile.split < 0)
        def _():
            self.store_values(stage, results.out.at[tile.request, head])
            self.store_per_row(stage, results.lse.at[tile.request, head])

        @pl.when(tile.split >= 0)
        def _():
            self.store_values(stage, results.split_out.at[tile.split, head])
            self.store_per_row(
                stage, results.split_lse.at[tile.split, head], results.split_scale.at[tile.split, 0, head]
            )

    def store_values(self, stage, to) -> None:
        """Starts the stores of a result's values."""
        rows = self.kernel.rows
        stored = min(rows + -rows % 8, TILE)  # including rows that TMA clips
        into = to.at[pl.ds(self.cta.first_row, stored)]
        for c, columns in enumerate(chunks_of(self.kernel.value_dim)):
            plgpu.copy_smem_to_gmem(self.memory.q.at[stage, c, pl.ds(0, stored)], into.at[:, columns])

    def store_per_row(self, stage, *to) -> None:
        """Stores a result's values per row: log-sum-exps and, of a split, scales."""
        rows, stats = self.kernel.rows, self.memory.stats
        stored = min(rows, TILE)  # TMA does not clip copies of one value per row
        for i, into in enumerate(to):
            if rows % 4:  # TMA copies 16 bytes or more
                for row in range(rows):
                    into[row] = stats[2 + 2 * stage + i, row]
            else:
                per_row = stats.at[2 + 2 * stage + i, pl.ds(0, stored)]
                plgpu.copy_smem_to_gmem(per_row, into.at[pl.ds(self.cta.first_row, stored)])


class Walk(NamedTuple):
    """What the steps of a consumer in a work tile have in common."""

    tile: WorkTile
    ends: Ends
    unmasked: Any
    """The first step that needs no mask, and the one after the last."""
    first_seen: Any
    """The first token that some row sees; None without a window."""
    query_stage: Any
    used: Any
    """The number of this consumer's tiles in earlier work tiles."""


class Consumer:
    """Consumer `side` of two: it attends to tile `side` of each pair."""

    def __init__(self, cta: CTA, side: int):
        self.cta, self.side, self.kernel, self.memory, self.barriers = cta, side, cta.kernel, cta.memory, cta.barriers
        self.softmax = cta.kernel.softmax
        self.scratch = self.memory.register_operands.at[side] if self.kernel.interpret else None
        self.scale: Any  # set by `run`, which loads it

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(consumer_registers(self.kernel.config.producer_registers), action="increase")
        self.scale = self.cta.operands.scale[0] * LOG2E
        lax.fori_loop(self.cta.first, self.cta.end, self.work_tile, (jnp.int32(0), self.cta.first_tile))

    def work_tile(self, n, carry):
        """Attends to this consumer's tiles of a work tile; then the consumers merge their parts of the result."""
        used, tile = carry
        cta, kernel = self.cta, self.kernel
        next_tile = cta.load_tile(n + 1)  # the loads proceed while this one is computed
        end = cta.end_of(self.side, tile)
        walk = self.walk(n, tile, end, used)
        plgpu.barrier_wait(self.barriers.q_full.at[walk.query_stage])
        carry = zeros(TILE, kernel.value_dim), self.softmax.empty_max(TILE), zeros(TILE, LANE_COLUMNS)
        acc, running_max, row_sum = lax.fori_loop(tile.begin, end, partial(self.step, walk), carry)
        part = acc, running_max, row_sum.sum(axis=1)
        if self.side == 1:
            self.share_part(n, *part)
        else:
            acc, lse = self.add_other_part(n, *part)
            self.stage_result(walk, acc, lse)
            plgpu.barrier_arrive(self.barriers.done.at[walk.query_stage])
        return used + jnp.maximum(end - tile.begin, 0), next_tile

    def walk(self, n, tile: WorkTile, end, used) -> Walk:
        """What the steps in a work tile have in common."""
        in_cache, window, begin = self.cta.in_cache, self.kernel.call.window, tile.begin
        ends = ends_of(tile, jnp.where(in_cache, tile.origin + tile.keys, 0))
        unmasked_end = jnp.clip(jnp.where(in_cache, tile.unmasked_end, 0), begin, jnp.maximum(end, begin))
        unmasked_begin = begin
        if window is not None:
            unmasked_begin = jnp.clip(first_unmasked(tile, PAIR, window), begin, unmasked_end)
        seen = first_seen(ends, self.kernel.tokens, window)
        return Walk(tile, ends, (unmasked_begin, unmasked_end), seen, self.cta.query_stage_of(n), used)

    def step(self, walk: Walk, i, carry):
        """Attends to a tile: the steps of the timeline."""
        acc, running_max, row_sum = carry
        unmasked_begin, unmasked_end = walk.unmasked
        masked = (i < unmasked_begin) | (i >= unmasked_end)
        z = opaque_zero(i)
        stage = self.cta.stage_of(self.side, walk.used + i - walk.tile.begin, z)
        s = self.scores(walk, i, stage, z, masked)
        running_max, acc, row_sum = self.softmax.update(s, running_max, acc, row_sum)
        w = self.softmax.weights(s, running_max)
        pl.when(masked)(lambda: self.clear_values(walk, i, stage))
        acc = self.add_values(w, stage, acc)
        plgpu.barrier_arrive(self.barriers.kv_free.at[stage])
        return acc, running_max, row_sum + fold_columns(jnp.add, w)

    def scores(self, walk: Walk, i, stage, z, masked):
        """S of a tile, scaled, capped and masked; `z` is an opaque zero."""
        call = self.kernel.call
        product = partial(self.multiply_queries, walk.query_stage, stage, z)
        s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * self.scale
        if call.logit_cap is not None:
            s = cap_scores(s, call.logit_cap)
        # The branch also keeps the compiler from fusing the scaling of scores with the subtraction of their maximum:
        # the largest score minus itself would not be 0, but far from it if scores are huge.
        return lax.cond(masked, partial(self.mask, walk, i), lambda s: s, s)

    def multiply_queries(self, query_stage, stage, z, acc):
        """Q K' of a tile, once it has landed; `acc` is an accumulator."""
        plgpu.barrier_wait(self.barriers.kv_full.at[stage])
        for c, columns in enumerate(chunks_of(self.kernel.head_dim)):
            keys = self.memory.kv.at[stage, :, columns]
            plgpu.wgmma(acc, self.memory.q.at[query_stage + z, c], keys.transpose((1, 0)))
        return acc[...]

    def mask(self, walk: Walk, i, s):
        """`s` with keys masked that a row does not see."""
        cta, kernel, call = self.cta, self.kernel, self.kernel.call
        return apply_mask(
            s, cta.table, walk.tile.request, cta.first_token(walk.tile, i, self.side), cta.first_row, walk.ends,
            tokens=kernel.tokens, heads=kernel.rows_per_token, keys=1, window=call.window, ahead=call.ahead,
        )  # fmt: skip

    @property
    def values(self):
        """Where values are in shared memory, and the first of their columns."""
        return (self.memory.v, 0) if self.kernel.apart else (self.memory.kv, self.kernel.head_dim)

    def clear_values(self, walk: Walk, i, stage) -> None:
        """Zeroes the values of unseen tokens."""
        kernel, tile, (values, first) = self.kernel, walk.tile, self.values
        clear_values(
            values, (stage,), first, kernel.value_dim, self.cta.table, tile.request,
            self.cta.first_token(tile, i, self.side), walk.ends.seen,
            first_seen=walk.first_seen, interpret=kernel.interpret,
        )  # fmt: skip

    def add_values(self, w, stage, acc):
        """O + P V."""
        values, first = self.values
        values = values.at[stage, :, pl.ds(first, self.kernel.value_dim)]
        acc, _ = multiply_add(acc, w.astype(self.kernel.dtype), values, scratch=self.scratch)
        return acc

    def share_part(self, n, acc, running_max, row_sum) -> None:
        """Consumer 1: passes its part of a result to consumer 0, once that has taken the previous one."""
        memory, barriers = self.memory, self.barriers
        pl.when(n > self.cta.first)(lambda: plgpu.barrier_wait(barriers.taken))
        memory.stats[0], memory.stats[1] = running_max, row_sum
        memory.other[...] = acc
        plgpu.barrier_arrive(barriers.both)

    def add_other_part(self, n, acc, running_max, row_sum):
        """Consumer 0: the result of both parts, and its log-sum-exps."""
        memory, barriers, columns = self.memory, self.barriers, self.kernel.value_dim
        plgpu.barrier_arrive(barriers.both)
        plgpu.barrier_wait(barriers.both)
        theirs = [plgpu.load(memory.stats.at[i], layout=ROW) for i in range(2)]
        (own, others), inverse, lse = self.softmax.merge((running_max, row_sum), theirs)
        acc = acc * over_columns(own * inverse, columns)
        acc = acc + plgpu.load(memory.other, layout=WGMMA) * over_columns(others * inverse, columns)
        pl.when(n < self.cta.end - 1)(lambda: plgpu.barrier_arrive(barriers.taken))
        return acc, lse

    def stage_result(self, walk: Walk, acc, lse) -> None:
        """Stages a result for the producer, in place of the queries."""
        dtype, value_dim, split = self.kernel.dtype, self.kernel.value_dim, walk.tile.split

        @pl.when(split < 0)
        def _():
            self.stage(walk.query_stage, acc.astype(dtype), lse * (1 / LOG2E))

        @pl.when(split >= 0)
        def _():
            magnitude = split_scale(jnp.abs(acc).max(axis=1))
            values = (acc * over_columns(1 / magnitude, value_dim)).astype(SPLIT_DTYPE)
            self.stage(walk.query_stage, lax.bitcast_convert_type(values, dtype), lse, magnitude)

    def stage(self, query_stage, values, *per_row) -> None:
        """Writes a result to the shared memory from which the producer stores it."""
        for c, columns in enumerate(chunks_of(self.kernel.value_dim)):
            self.memory.q[query_stage, c] = values[:, columns.start : columns.start + columns.size]
        for i, x in enumerate(per_row):
            self.memory.stats[2 + 2 * query_stage + i] = x
        plgpu.commit_smem()
