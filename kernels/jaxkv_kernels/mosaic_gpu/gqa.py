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

The consumers exchange nothing until the end of a work tile: each has its own running max, row sums and output.  A
result stays in shared memory until the queries of a later work tile need its stage, or until the end of the kernel.
Then the producer stores it.

Barriers, and how many arrivals complete them: TMA copies for `full`, consumers for the others.
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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

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
from jaxkv_kernels.mosaic_gpu.masks import apply_mask, clear_values, ends_of, first_seen, first_unmasked
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, PageTable, copies_per_tile, token_rows
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, floordiv, multiply_add, opaque_zero
from jaxkv_kernels.mosaic_gpu.runtime.device import SHARED_MEMORY, consumer_registers
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
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
    batch, heads, padded, head_dim = q.shape
    tokens, group = call.q.shape[1], call.q.shape[2] // heads
    plan, window, ahead, logit_cap = call.plan, call.window, call.ahead, call.logit_cap
    buffer, pages = in_entries_dtype(call.buffer, call.pages, call.entry.dtype)
    value_dim, dtype = call.entry.value_dim, q.dtype
    columns = value_dim + -value_dim % 128  # `combine` loads rows of whole chunks
    row_tiles = -(-tokens * group // TILE)
    stored = min(padded + -padded % 8, TILE)  # rows of a tile that are stored, including those that TMA clips
    per_tile = min(padded, TILE)  # the same for arrays with one value per row: TMA does not clip copies to them
    views = [token_rows(part, second=bool(i)) for i, part in enumerate(pages.parts)]
    apart = len(views) > 1  # keys and values, each in a tile of its own; otherwise side by side in one tile
    first_value = 0 if apart else head_dim
    stages, query_stages = _stages(config, head_dim, value_dim, dtype.itemsize)
    softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret)

    def body(
        q_ref, *refs, q, kv, other, stats, q_full, done, kv_full, kv_free, both, taken,
        v: Any = None, operands: Any = None
    ):  # fmt: skip
        kv_refs, refs = refs[: len(views)], refs[len(views) :]
        table_ref, layer_ref, scale_ref, partitions_ref, work_tiles_ref, split_requests_ref, *refs = refs
        out_ref, lse_ref, split_out_ref, split_lse_ref, split_scale_ref = refs
        values_in = v if apart else kv
        pdl_launch_dependents(split_requests_ref, interpret=interpret)
        partition, head_and_tile, wg = (lax.axis_index(axis) for axis in ("partition", "tile", "wg"))
        head = floordiv(head_and_tile, row_tiles)
        first_row = pl.multiple_of(lax.rem(head_and_tile, jnp.int32(row_tiles)) * TILE, 8)
        table = PageTable(table_ref, pages)
        in_cache = (layer_ref[0] >= 0) & (layer_ref[0] < pages.num_layers)
        first, work_end, first_tile = load_work_range(partitions_ref, partition)

        def query_stage_of(n):
            return lax.rem(n - first, jnp.int32(query_stages))

        def end_of(side, tile: WorkTile):
            """The end of this side's tiles: the last pair of a request may lack its second tile."""
            return tile.end if side == 0 else jnp.minimum(tile.end, floordiv(tile.keys + (PAIR - 1 - TILE), PAIR))

        def first_token_of(tile: WorkTile, i, side):
            return tile.origin + i * PAIR + side * TILE

        def producer():
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            layer = jnp.where(in_cache, layer_ref[0], 0)
            paged = [PagedKeys(ref, view, table, layer, head) for ref, view in zip(kv_refs, views, strict=True)]

            def look_up(tile: WorkTile, i):
                return tuple(paged[0].look_up(tile.request, first_token_of(tile, i, side)) for side in range(2))

            def fetch(found, first_token, side, used):
                stage = 2 * lax.rem(used, jnp.int32(stages)) + side

                @pl.when(used >= stages)
                def _():
                    plgpu.barrier_wait(kv_free.at[stage])

                for each, into in zip(paged, (kv, v), strict=False):
                    each.fetch(found, first_token, Columns(0, into.shape[-1], into.at[stage], kv_full.at[stage]))

            def store_result(n):
                tile = load_work_tile(work_tiles_ref, n)
                stage = query_stage_of(n)
                plgpu.barrier_wait(done.at[stage])

                def store_to(place, values_to, *per_row_to):
                    into = values_to.at[place, head, pl.ds(first_row, stored)]
                    for c, columns in enumerate(chunks_of(value_dim)):
                        plgpu.copy_smem_to_gmem(q.at[stage, c, pl.ds(0, stored)], into.at[:, columns])
                    for i, to in enumerate(per_row_to):
                        if padded % 4:  # TMA copies 16 bytes or more
                            for row in range(padded):
                                to[row] = stats[2 + 2 * stage + i, row]
                        else:
                            per_row = stats.at[2 + 2 * stage + i, pl.ds(0, per_tile)]
                            plgpu.copy_smem_to_gmem(per_row, to.at[pl.ds(first_row, per_tile)])

                @pl.when(tile.split < 0)
                def _():
                    store_to(tile.request, out_ref, lse_ref.at[tile.request, head])

                @pl.when(tile.split >= 0)
                def _():
                    lse_to, scale_to = split_lse_ref.at[tile.split, head], split_scale_ref.at[tile.split, 0, head]
                    store_to(tile.split, split_out_ref, lse_to, scale_to)

            def fetch_queries(request, n):
                stage = query_stage_of(n)

                @pl.when(n - first >= query_stages)
                def _():
                    store_result(n - query_stages)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                source = q_ref.at[request, head, pl.ds(first_row, TILE)]
                for c, columns in enumerate(chunks_of(head_dim)):
                    plgpu.copy_gmem_to_smem(source.at[:, columns], q.at[stage, c], q_full.at[stage])

            def run(n, carry):
                used, tile = carry
                next_tile = load_work_tile(work_tiles_ref, n + 1)  # the loads proceed while this one is fetched
                second_end = end_of(1, tile)

                def pair(i, carry):
                    used, found = carry
                    ahead = look_up(tile, i + 1)  # the loads proceed while the producer waits for kv_free
                    fetch(found[0], first_token_of(tile, i, 0), 0, used[0])

                    @pl.when(i < second_end)
                    def _():
                        fetch(found[1], first_token_of(tile, i, 1), 1, used[1])

                    @pl.when((i == tile.begin) & (n > first))
                    def _():
                        fetch_queries(tile.request, n)

                    return (used[0] + 1, used[1] + (i < second_end).astype(jnp.int32)), ahead

                used, _ = lax.fori_loop(tile.begin, tile.end, pair, (used, look_up(tile, tile.begin)))
                return used, next_tile

            @pl.when(work_end > first)
            def _():
                fetch_queries(first_tile.request, first)  # first: after the keys of all CTAs, they would arrive last

            used, _ = lax.fori_loop(first, work_end, run, ((jnp.int32(0), jnp.int32(0)), first_tile))
            pl.loop(jnp.maximum(work_end - query_stages, first), work_end)(store_result)
            for side in range(2):  # every completion of a barrier must be waited for

                @pl.loop(jnp.maximum(used[side] - stages, 0), used[side])
                def _(use, side=side):
                    plgpu.barrier_wait(kv_free.at[2 * lax.rem(use, jnp.int32(stages)) + side])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def consumer(side):
            scratch = operands.at[side] if interpret else None
            plgpu.set_max_registers(consumer_registers(config.producer_registers), action="increase")
            scale = scale_ref[0] * LOG2E

            def run(n, carry):
                used, tile = carry
                next_tile = load_work_tile(work_tiles_ref, n + 1)  # the loads proceed while this one is computed
                request, begin, split = tile.request, tile.begin, tile.split
                end = end_of(side, tile)
                ends = ends_of(tile, jnp.where(in_cache, tile.origin + tile.keys, 0))
                unmasked_end = jnp.clip(jnp.where(in_cache, tile.unmasked_end, 0), begin, jnp.maximum(end, begin))
                unmasked_begin = begin
                if window is not None:
                    unmasked_begin = jnp.clip(first_unmasked(tile, PAIR, window), begin, unmasked_end)
                first_seen_token = first_seen(ends, tokens, window)
                query_stage = query_stage_of(n)

                def mask(i, s):
                    return apply_mask(
                        s, table, request, first_token_of(tile, i, side), first_row, ends,
                        tokens=tokens, heads=group, keys=1, window=window, ahead=ahead,
                    )  # fmt: skip

                def scores(i, stage, z, masked):
                    def product(acc):
                        plgpu.barrier_wait(kv_full.at[stage])
                        for c, columns in enumerate(chunks_of(head_dim)):
                            keys = kv.at[stage, :, columns]
                            plgpu.wgmma(acc, q.at[query_stage + z, c], keys.transpose((1, 0)))
                        return acc[...]

                    s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * scale
                    if logit_cap is not None:
                        s = cap_scores(s, logit_cap)
                    # The branch also keeps the compiler from fusing the scaling of scores with the subtraction of their
                    # maximum: the largest score minus itself would not be 0, but far from it if scores are huge.
                    return lax.cond(masked, partial(mask, i), lambda s: s, s)

                def step(i, carry):
                    acc, running_max, row_sum = carry
                    masked = (i < unmasked_begin) | (i >= unmasked_end)
                    z = opaque_zero(i)
                    stage = 2 * (lax.rem(used + i - begin, jnp.int32(stages)) + z) + side
                    s = scores(i, stage, z, masked)
                    running_max, acc, row_sum = softmax.update(s, running_max, acc, row_sum)
                    w = softmax.weights(s, running_max)

                    @pl.when(masked)
                    def _():
                        first_token = first_token_of(tile, i, side)
                        clear_values(
                            values_in, (stage,), first_value, value_dim, table, request, first_token, ends.seen,
                            first_seen=first_seen_token, interpret=interpret,
                        )  # fmt: skip

                    values = values_in.at[stage, :, pl.ds(first_value, value_dim)]
                    acc, _ = multiply_add(acc, w.astype(dtype), values, scratch=scratch)
                    plgpu.barrier_arrive(kv_free.at[stage])
                    return acc, running_max, row_sum + fold_columns(jnp.add, w)

                plgpu.barrier_wait(q_full.at[query_stage])
                carry = zeros(TILE, value_dim), softmax.empty_max(TILE), zeros(TILE, LANE_COLUMNS)
                acc, running_max, row_sum = lax.fori_loop(begin, end, step, carry)
                row_sum = row_sum.sum(axis=1)

                if side == 1:

                    @pl.when(n > first)
                    def _():
                        plgpu.barrier_wait(taken)

                    stats[0], stats[1] = running_max, row_sum
                    other[...] = acc
                    plgpu.barrier_arrive(both)
                else:
                    plgpu.barrier_arrive(both)
                    plgpu.barrier_wait(both)
                    theirs = [plgpu.load(stats.at[i], layout=ROW) for i in range(2)]
                    (own, others), inverse, lse = softmax.merge((running_max, row_sum), theirs)
                    acc = acc * over_columns(own * inverse, value_dim)
                    acc = acc + plgpu.load(other, layout=WGMMA) * over_columns(others * inverse, value_dim)

                    @pl.when(n < work_end - 1)
                    def _():
                        plgpu.barrier_arrive(taken)

                    def stage_result(values, *per_row):
                        """Writes a result to the shared memory from which the producer stores it."""
                        for c, columns in enumerate(chunks_of(value_dim)):
                            q[query_stage, c] = values[:, columns.start : columns.start + columns.size]
                        for i, x in enumerate(per_row):
                            stats[2 + 2 * query_stage + i] = x
                        plgpu.commit_smem()

                    @pl.when(split < 0)
                    def _():
                        stage_result(acc.astype(dtype), lse * (1 / LOG2E))

                    @pl.when(split >= 0)
                    def _():
                        magnitude = split_scale(jnp.abs(acc).max(axis=1))
                        values = (acc * over_columns(1 / magnitude, value_dim)).astype(SPLIT_DTYPE)
                        stage_result(lax.bitcast_convert_type(values, dtype), lse, magnitude)

                    plgpu.barrier_arrive(done.at[query_stage])
                return used + jnp.maximum(end - begin, 0), next_tile

            lax.fori_loop(first, work_end, run, (jnp.int32(0), first_tile))

        # Nested branches: with three in a row, values that the last one needs would be live, and spilled, in the first.
        lax.cond(wg == 2, producer, lambda: lax.cond(wg == 0, partial(consumer, 0), partial(consumer, 1)))

    results = kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=result_types(
            (batch, heads), plan.max_splits, dtype, rows=padded, width=columns, lse=padded, split_lse=padded, scales=1
        ),
        grid=(plan.num_partitions, heads * row_tiles),
        grid_names=("partition", "tile"),
        num_threads=3,
        thread_name="wg",
        kernel_name="decode_kv",
        scratch_types={
            # In chunks of columns, so that it holds both queries, as wide as keys, and results, as wide as values.
            "q": swizzled(query_stages, max(head_dim, value_dim) // CHUNK, TILE, CHUNK, dtype=dtype),
            "kv": swizzled(2 * stages, TILE, head_dim if apart else head_dim + value_dim, dtype=dtype),
            **({"v": swizzled(2 * stages, TILE, value_dim, dtype=dtype)} if apart else {}),
            "other": swizzled(TILE, value_dim, dtype=jnp.float32),
            "stats": plgpu.SMEM((2 + 2 * query_stages, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=head_dim // CHUNK, num_barriers=query_stages),
            "done": plgpu.Barrier(num_barriers=query_stages),
            "kv_full": plgpu.Barrier(num_arrivals=len(views) * copies_per_tile(pages), num_barriers=2 * stages),
            "kv_free": plgpu.Barrier(num_barriers=2 * stages),
            "both": plgpu.Barrier(num_arrivals=2),
            "taken": plgpu.Barrier(),
            # The interpreter needs register operands of wgmma in shared memory.
            **({"operands": swizzled(2, TILE, TILE, dtype=dtype)} if interpret else {}),
        },
    )(
        q, *(view.of(array) for view, array in zip(views, arrays_of(buffer, len(views)), strict=True)),
        call.block_tables, jnp.reshape(call.layer, (1,)), jnp.reshape(call.scale, (1,)), plan.partitions,
        plan.work_tiles, plan.split_requests,
    )  # fmt: skip
    return KernelResults(*results)
