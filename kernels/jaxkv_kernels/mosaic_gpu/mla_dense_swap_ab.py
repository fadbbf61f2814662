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

Keys are copied in whole rows, since reads of whole pages have the highest bandwidth.  O' stays in registers.  Each
warp has the scores of all rows against 16 of the 64 keys, and all warps must use the same running max, so the warpgroup
votes once per tile.  A lane keeps row sums over its own keys until the work tile ends.  A result stays in shared memory
until the queries of a later work tile need its stage, or until the end of the kernel.  Most CTAs have no more work
tiles than query stages, and so store nothing while they read.  This matters: 4 MB of writes of splits among 853 MB of
reads cost 3 % of the time.

Barriers, and how many arrivals complete them: TMA copies for `full`, the consumer for the others.
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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import DecodeCall, DecodeMLA, PlanDecode
from jaxkv_kernels.mosaic_gpu.attention_reasons import plain_latents
from jaxkv_kernels.mosaic_gpu.cluster_sharing import PLACES, Exchange, exchange_types, merge_factors, own_steps
from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, KernelResults, result_types, split_scale
from jaxkv_kernels.mosaic_gpu.masks import apply_mask, clear_values, first_seen, is_masked, seen_tokens
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, PageTable, copies_per_tile, token_rows
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, multiply_add
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
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
    batch, rows, latent = queries[0].shape
    rope = queries[1].shape[-1] if len(queries) > 1 else 0
    _, tokens, heads, _ = call.q_latent.shape
    plan, window, ahead, logit_cap = call.plan, call.window, call.ahead, call.logit_cap
    buffer, pages = in_entries_dtype(call.buffer, call.pages, call.entry.dtype)
    beside = rope if rope == ROPE else 0  # columns of rotary keys in the same tiles as latents
    parts = 1 if rope == beside else 2  # tiles per stage of keys
    view = token_rows(pages)
    dtype = queries[0].dtype
    stages, query_stages = config.stages * (LATENT + ROPE) // (latent + rope), config.query_stages
    softmax = OnlineSoftmax(keys=0, threshold=config.rescale_threshold, interpret=interpret)

    def body(*refs, q, k, p, stats, q_full, done, k_full, k_free, qr: Any = None, kr: Any = None, **exchange_memory):
        q_refs, refs = refs[: len(queries)], refs[len(queries) :]
        (
            kv_ref, table_ref, layer_ref, scale_ref, partitions_ref, work_tiles_ref, split_requests_ref,
            out_ref, lse_ref, split_out_ref, split_lse_ref, split_scale_ref, *exchange_refs,
        ) = refs  # fmt: skip
        pdl_launch_dependents(split_requests_ref, interpret=interpret)
        partition, cta, wg = (lax.axis_index(axis) for axis in ("partition", "cta", "wg"))
        in_cache = (layer_ref[0] >= 0) & (layer_ref[0] < pages.num_layers)
        table = PageTable(table_ref, pages)

        stores = cta == 0 if plan.shared else True

        def own_part(tile):
            return own_steps(tile, cta, TILE) if plan.shared else tile

        first, end, first_tile = load_work_range(partitions_ref, partition)
        first_tile = own_part(first_tile)

        def from_origin(origin, token):
            return token if window is None else origin + token

        def query_stage_of(n):
            return lax.rem(n - first, jnp.int32(query_stages))

        def stage_of(used):
            return lax.rem(used, jnp.int32(stages))

        def producer():
            paged = PagedKeys(kv_ref, view, table, jnp.where(in_cache, layer_ref[0], 0))

            def look_up_first(tile: WorkTile):
                return paged.look_up(tile.request, from_origin(tile.origin, tile.begin * TILE))

            def fetch(request, origin, step, carry):
                used, found = carry
                stage = stage_of(used)
                next_found = paged.look_up(
                    request, from_origin(origin, (step + 1) * TILE)
                )  # the loads proceed while the producer waits

                @pl.when(used >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[stage])

                columns = [Columns(0, latent + beside, k.at[stage], k_full.at[stage])]
                if kr is not None:
                    columns.append(Columns(latent, rope, kr.at[stage], k_full.at[stage]))
                paged.fetch(found, from_origin(origin, step * TILE), *columns)
                return used + 1, next_found

            def store_result(n):
                tile = load_work_tile(work_tiles_ref, n)
                stage = query_stage_of(n)
                plgpu.barrier_wait(done.at[stage])

                def store_to(values_to, *per_row_to):
                    plgpu.copy_smem_to_gmem(q.at[stage], values_to)
                    for i, to in enumerate(per_row_to):
                        plgpu.copy_smem_to_gmem(stats.at[stage, i], to)

                @pl.when(stores & (tile.split < 0))
                def _():
                    store_to(out_ref.at[tile.request], lse_ref.at[tile.request])

                @pl.when(stores & (tile.split >= 0))
                def _():
                    store_to(
                        split_out_ref.at[tile.split], split_lse_ref.at[tile.split], split_scale_ref.at[tile.split, 0]
                    )

            def fetch_queries(request, n):
                stage = query_stage_of(n)

                @pl.when(n - first >= query_stages)
                def _():
                    store_result(n - query_stages)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                for source, into in zip(q_refs, (q, qr), strict=False):
                    plgpu.copy_gmem_to_smem(source.at[request], into.at[stage], q_full.at[stage])

            def run(n, carry):
                used, found, tile = carry
                next_tile = own_part(load_work_tile(work_tiles_ref, n + 1))
                one = partial(fetch, tile.request, tile.origin)
                carry = one(tile.begin, (used, found))
                fetch_queries(tile.request, n)
                next_found = look_up_first(next_tile)  # early, while keys of this work tile are still to be fetched
                used, _ = lax.fori_loop(tile.begin + 1, tile.end, one, carry)
                return used, next_found, next_tile

            used, *_ = lax.fori_loop(first, end, run, (jnp.int32(0), look_up_first(first_tile), first_tile))

            @pl.loop(jnp.maximum(used - stages, 0), used)
            def _(use):
                plgpu.barrier_wait(k_free.at[stage_of(use)])  # every completion of a barrier must be waited for

            pl.loop(jnp.maximum(end - query_stages, first), end)(store_result)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def consumer():
            scale = scale_ref[0] * LOG2E

            def scores(stage, query_stage):
                def product(acc):
                    plgpu.barrier_wait(k_full.at[stage])
                    plgpu.wgmma(acc, k.at[stage, :, pl.ds(0, latent)], q.at[query_stage].transpose((1, 0)))
                    if qr is not None:
                        keys = kr.at[stage] if kr is not None else k.at[stage, :, pl.ds(latent, rope)]
                        plgpu.wgmma(acc, keys, qr.at[query_stage].transpose((1, 0)))
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((TILE, rows), jnp.float32)) * scale
                return s if logit_cap is None else cap_scores(s, logit_cap)

            def step(query_stage, request, origin, ends, unmasked, i, carry):
                used, acc, running_max, row_sum = carry
                stage = stage_of(used)
                masked = is_masked(unmasked, i)
                s = scores(stage, query_stage)
                mask = partial(
                    apply_mask, table=table, request=request, first_token=from_origin(origin, i * TILE),
                    first_row=0, ends=ends, tokens=tokens, heads=heads, keys=0, window=window, ahead=ahead,
                )  # fmt: skip
                s = lax.cond(masked, mask, lambda s: s, s)
                running_max, acc, row_sum = softmax.update(s, running_max, acc, row_sum)
                w = softmax.weights(s, running_max)
                p.transpose((1, 0))[...] = w.astype(dtype)
                plgpu.commit_smem()

                @pl.when(masked)
                def _():
                    clear_values(
                        k, (stage,), 0, latent, table, request, from_origin(origin, i * TILE), ends.seen,
                        first_seen=first_seen(ends, tokens, window), interpret=interpret,
                    )  # fmt: skip

                values = k.at[stage, :, pl.ds(0, latent)].transpose((1, 0))
                acc, _ = multiply_add(acc, values, p.transpose((1, 0)), scratch=p if interpret else None)
                plgpu.barrier_arrive(k_free.at[stage])
                return used + 1, acc, running_max, row_sum + w

            def stage_result(query_stage, values, *per_row):
                """Stages a result for the producer: values in place of the queries, and `per_row` in `stats`."""
                q.at[query_stage].transpose((1, 0))[...] = values
                for i, x in enumerate(per_row):
                    stats[query_stage, i] = x
                plgpu.commit_smem()

            def as_split(values):
                """Values of a split, and their scales."""
                parts = [values[at : at + TILE] for at in range(0, latent, TILE)]
                # Reduces over the parts first, which needs no exchange between lanes.
                magnitude = split_scale(reduce(jnp.maximum, [jnp.maximum(x, -x) for x in parts]).max(axis=0))
                values = (values * over_rows(1 / magnitude, latent)).astype(SPLIT_DTYPE)
                return lax.bitcast_convert_type(values, dtype), magnitude

            def merge(n, values, lse):
                """Merges the results of both CTAs in the first one."""
                exchange = Exchange.of(exchange_refs, partition, exchange_memory, cta)
                place, staged = lax.rem(n - first, jnp.int32(PLACES)), q.at[query_stage_of(n)]

                def send():
                    @pl.when(n > first)
                    def _():
                        plgpu.barrier_wait(exchange.sent)  # the other CTA has read what is in this place

                    staged.transpose((1, 0))[...], exchange.rows[0, 1] = as_split(values)
                    exchange.rows[0, 0] = lse
                    exchange.send(staged, place)
                    return values, lse

                def receive():
                    plgpu.barrier_arrive(exchange.sent)
                    exchange.receive(staged, place)
                    others = plgpu.load(staged.transpose((1, 0)), layout=WGMMA)
                    others = lax.bitcast_convert_type(others, SPLIT_DTYPE).astype(jnp.float32)
                    of_other = (plgpu.load(exchange.rows.at[1, i], layout=COLUMN) for i in range(2))
                    own, other, merged = merge_factors(softmax, lse, filled(COLUMN, 1, rows), *of_other)
                    plgpu.commit_smem()  # all lanes have read `staged`
                    return values * over_rows(own, latent) + others * over_rows(other, latent), merged

                return lax.cond(cta == 0, receive, send)

            def run(n, carry):
                used, tile = carry
                next_tile = own_part(
                    load_work_tile(work_tiles_ref, n + 1)
                )  # the loads proceed while this one is computed
                ends, unmasked = seen_tokens(tile, in_cache, TILE, window)
                query_stage = query_stage_of(n)
                plgpu.barrier_wait(q_full.at[query_stage])
                carry = used, zeros(latent, rows), softmax.empty_max(rows), zeros(TILE, rows)
                one = partial(step, query_stage, tile.request, tile.origin, ends, unmasked)
                used, acc, running_max, row_sum = lax.fori_loop(tile.begin, tile.end, one, carry)
                inverse, lse = softmax.finalize(row_sum.sum(axis=0), running_max)
                acc = acc * over_rows(inverse, latent)
                if plan.shared:
                    acc, lse = merge(n, acc, lse)

                @pl.when(stores & (tile.split < 0))
                def _():
                    stage_result(query_stage, acc.astype(dtype), lse * (1 / LOG2E))

                @pl.when(stores & (tile.split >= 0))
                def _():
                    values, magnitude = as_split(acc)
                    stage_result(query_stage, values, lse, magnitude)

                plgpu.barrier_arrive(done.at[query_stage])
                return used, next_tile

            lax.fori_loop(first, end, run, (jnp.int32(0), first_tile))
            if plan.shared:  # every completion of a barrier must be waited for
                pl.when((cta == 1) & (end > first))(lambda: plgpu.barrier_wait(exchange_memory["sent"]))

        lax.cond(wg == 0, consumer, producer)

    rotary = partial(rotary_type, rope=rope, dtype=dtype)
    outputs = result_types(
        (batch,), plan.max_splits, dtype, rows=rows, width=latent, lse=rows, split_lse=rows, scales=1
    )
    exchanged, exchange_scratch = exchange_types(plan.num_partitions, rows, latent, dtype) if plan.shared else ((), {})
    found = kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        reduction_bytes=128 * rows,    # for maxima across warps: a place for each lane of each warp
        out_type=(*outputs, *exchanged),
        grid=(plan.num_partitions,),
        grid_names=("partition",),
        cluster=(CTAS if plan.shared else 1,),
        cluster_names=("cta",),
        num_threads=2,
        thread_name="wg",
        kernel_name="decode_mla",
        scratch_types={
            "q": swizzled(query_stages, rows, latent, dtype=dtype),
            **({"qr": rotary(query_stages, rows)} if rope else {}),
            "k": swizzled(stages, TILE, latent + beside, dtype=dtype),
            **({"kr": rotary(stages, TILE)} if parts > 1 else {}),
            "p": swizzled(rows, TILE, dtype=dtype),
            "stats": plgpu.SMEM((query_stages, 2, rows), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=len(queries), num_barriers=query_stages),
            "done": plgpu.Barrier(num_barriers=query_stages),
            "k_full": plgpu.Barrier(num_arrivals=copies_per_tile(pages) * parts, num_barriers=stages),
            "k_free": plgpu.Barrier(num_barriers=stages),
            **exchange_scratch,
        },
    )(
        *queries, view.of(buffer), call.block_tables, jnp.reshape(call.layer, (1,)), jnp.reshape(call.scale, (1,)),
        plan.partitions, plan.work_tiles, plan.split_requests,
    )  # fmt: skip
    return KernelResults(*found[:5])
