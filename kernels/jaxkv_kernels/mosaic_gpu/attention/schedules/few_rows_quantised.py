"""MLA decode of few rows (query tokens x heads of a request) from quantised entries.

As in `few_rows`, the operands of the products are swapped: keys provide the 64 rows of wgmma, queries its columns.

    S' = K Q'     [64 keys, 16]
    O' += V' P'   [512, 16]       V is K's first 512 columns, transposed

K and V' are register operands, converted from the bytes of the cache on their way from shared memory
(`quantised/tiles.py`): shared memory holds those bytes only, and each is read twice.

Work.  A CTA of a producer and two consumer warpgroups walks its partition of the plan: work tiles, each a range of key
tiles of a request.  The consumers take alternate tiles, so that one converts while the other multiplies or waits.

Timeline, downwards; `->` names the barrier that a line waits for.

    producer                                  consumer w
    tile of entries: one copy per page        every other tile: S' = K Q'      -> q_full[stage] once, k_full[stage]
      -> k_free[stage]                          mask; vote: does any score exceed the running max by more than the
    queries of the next work tile to              threshold?  If so: new maximum over keys, rescale O' and the row sums
      registers, then, scaled and             P = exp2(S' - running max) to shared memory
      reordered, to shared memory             in a masked tile, first of all: zeros to entries of unseen tokens
      -> q_free[stage], two work tiles ago    O' += V' P', arrives k_free[stage] once the last values are in registers
                                              after the last tile: arrives q_free[stage];
                                                1: running max and row sums, and quarters of O' to shared memory
                                                   -> taken; arrives given
                                                0: -> given; adds them to its own, arrives taken; stores the result

Numbers.  Queries become float16, each row divided by a power of two that makes it fit; scores are multiplied by it.  An
`fp8` cache has one scale, which multiplies scores and results.  Tokens of `fp8_ds_mla` have four: S' is the sum of four
products times their scales (and of that of the rotary parts, which are bf16), and each group of 128 latents has weights
of its own, P times its scale.  So that these fit float16 whatever the scales are, the token's largest scale, rounded
down to a power of two, is part of the running max: weights are exp2(score + log2(largest) - running max), multiplied
by scale / largest for each group.  Row sums are of weights divided by `largest`.  P is stored times a power of two
(`lift`), as large as float16 allows: many small weights add up, and float16 has few exponents below 1.

Barriers, and how many arrivals complete them.
    q_full[stage]    the queries are stored (1: the producer)
    q_free[stage]    both consumers have multiplied with the queries for the last time (2)
    k_full[stage]    a tile of entries has landed (1 per page)
    k_free[stage]    the tile is in registers (1: its consumer; even stages are consumer 0's, odd ones consumer 1's)
    given, taken     a quarter of consumer 1's result is in `other` (1), has been read (1)
Automatic barriers are off.  Within a consumer warpgroup, the vote is also a barrier: after it, all warps have finished
with the previous tile's P.

Budget.  Shared memory: entries 4 x 36 KiB (fp8_ds_mla 41) + queries 2 x 18 KiB + P 4 KiB (16) + `other` 8 KiB + stats
2 KiB = 194 KiB (226) of 227.  Registers: 208 per lane for consumers (O' takes 64, operands on their way some 80), 88
for the producer, which holds the queries of a work tile.
"""

from functools import partial, reduce

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import TILE, FewRowsQuantisedConfig, consumer_registers
from jaxkv_kernels.mosaic_gpu.attention.epilogue import SPLIT_DTYPE, result_types, split_scale
from jaxkv_kernels.mosaic_gpu.attention.gather.scaling import EXPONENT, INVERSE, LEAST_FACTOR, MOST_FACTOR
from jaxkv_kernels.mosaic_gpu.attention.masks import apply_mask
from jaxkv_kernels.mosaic_gpu.attention.page_table import PageTable, copies_per_tile
from jaxkv_kernels.mosaic_gpu.attention.plan import Plan
from jaxkv_kernels.mosaic_gpu.attention.quantised.pages import EntryPages
from jaxkv_kernels.mosaic_gpu.attention.quantised.tiles import (
    GROUP,
    GROUPS,
    INVERSES,
    STATS,
    STEPS,
    InterpretedTiles,
    N,
    QuantisedTiles,
)
from jaxkv_kernels.mosaic_gpu.attention.softmax import OnlineSoftmax
from jaxkv_kernels.mosaic_gpu.attention.work import load_work_range, load_work_tile
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores
from jaxkv_kernels.mosaic_gpu.runtime.integers import opaque_zero
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, WGMMA, over_columns, over_rows, store, zeros
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT, ROPE

KEY_GROUPS = LATENT // 64 + 1
"""Of 64 columns each; the last is the rotary part."""


def attend_few_rows_quantised(
    q_latent, q_pe, buffer, block_tables, layer, scale, kv_scale, plan: Plan,
    *, tokens, heads, pages, entry, logit_cap, config: FewRowsQuantisedConfig, interpret,
):  # fmt: skip
    """Results of whole requests and splits (`result_types`), for bf16 queries [B, rows, ...] of 8 or 16 rows.

    `kv_scale` is None for entries with scales of their own.
    """
    batch, rows, _ = q_latent.shape
    dtype = q_latent.dtype
    stages, query_stages = config.stages, config.query_stages
    tiles = (InterpretedTiles if interpret else QuantisedTiles)(entry)
    scaled = tiles.scaled
    lift = 2.0 ** (14 - config.rescale_threshold)

    def body(*refs, **scratch):
        (
            q_ref, qr_ref, kv_ref, table_ref, layer_ref, scale_ref, *kv_scale_ref, partitions_ref, work_tiles_ref,
            split_requests_ref, out_ref, lse_ref, split_out_ref, split_lse_ref, split_scale_ref,
        ) = refs  # fmt: skip
        q, qr, k, p, other, stats = (scratch[name] for name in ("q", "qr", "k", "p", "other", "stats"))
        q_full, q_free, k_full, k_free, given, taken = (
            scratch[name] for name in ("q_full", "q_free", "k_full", "k_free", "given", "taken")
        )
        pdl_launch_dependents(split_requests_ref, interpret=interpret)
        partition, wg = (lax.axis_index(axis) for axis in ("partition", "wg"))
        in_cache = (layer_ref[0] >= 0) & (layer_ref[0] < pages.num_layers)
        table = PageTable(table_ref, pages)
        first, work_end, first_tile = load_work_range(partitions_ref, partition)

        def query_stage_of(n):
            return lax.rem(n - first, jnp.int32(query_stages))

        def stage_of(used):
            return lax.rem(used, jnp.int32(stages))

        def producer():
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            paged = EntryPages(kv_ref, table, jnp.where(in_cache, layer_ref[0], 0))

            def look_up_first(tile):
                return paged.look_up(tile.request, tile.begin * TILE)

            def fetch(request, step, carry):
                used, found = carry
                stage = stage_of(used)
                ahead = paged.look_up(request, (step + 1) * TILE)  # the loads proceed while the stage comes free

                @pl.when(used >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[stage])

                paged.fetch(found, step * TILE, k.at[stage], k_full.at[stage])
                return used + 1, ahead

            def fetch_queries(request, n):
                stage = query_stage_of(n)
                raw = tiles.load_queries(q_ref, qr_ref, request)

                @pl.when(n - first >= query_stages)
                def _():
                    plgpu.barrier_wait(q_free.at[stage])

                tiles.store_queries(q, qr, stats, stage, raw)
                plgpu.commit_smem()
                plgpu.barrier_arrive(q_full.at[stage])

            def run(n, carry):
                used, found, (request, begin, end, *_) = carry
                ahead = load_work_tile(work_tiles_ref, n + 1)
                carry = fetch(request, begin, (used, found))
                fetch_queries(request, n)
                next_found = look_up_first(ahead)  # early, while entries of this work tile are still to be fetched
                used, _ = lax.fori_loop(begin + 1, end, partial(fetch, request), carry)
                return used, next_found, ahead

            used, *_ = lax.fori_loop(first, work_end, run, (jnp.int32(0), look_up_first(first_tile), first_tile))

            @pl.loop(jnp.maximum(used - stages, 0), used)
            def _(use):
                plgpu.barrier_wait(k_free.at[stage_of(use)])  # every completion of a barrier must be waited for

            @pl.loop(jnp.maximum(work_end - query_stages, first), work_end)
            def _(n):
                plgpu.barrier_wait(q_free.at[query_stage_of(n)])

        def consumer(side):
            plgpu.set_max_registers(consumer_registers(config.producer_registers), action="increase")
            softmax = OnlineSoftmax(
                keys=0, threshold=config.rescale_threshold, interpret=interpret,
                max_over_keys=lambda s: tiles.over_warps("max", s, stats, side),
            )  # fmt: skip
            scale = scale_ref[0] * LOG2E
            for ref in kv_scale_ref:
                scale = scale * ref[0]

            def multiply(acc, a, b):
                """Starts acc += a @ b, `a` in registers; the interpreter wants it in shared memory."""
                if interpret:
                    name = "operand_keys" if a.shape[0] == TILE else "operand_values"
                    operand = scratch[f"{name}_{a.dtype}"].at[side]
                    operand[...] = a
                    plgpu.commit_smem()
                    a = operand
                plgpu.wgmma(acc, a, b)

            def wait_for_products():
                if not interpret:
                    plgpu.wgmma_wait(0)

            def scores(stage, z, query_stage, row_scale):
                """Scores of a tile, in base 2, and the scales of its keys, if they have any."""

                def product(*accs):
                    raw = [tiles.load_keys(k, stage, group) for group in batches[0]]
                    for batch, following in zip(batches, [*batches[1:], []], strict=True):
                        operands = [tiles.convert_keys(x, group) for x, group in zip(raw, batch, strict=True)]
                        raw = [tiles.load_keys(k, stage, group) for group in following]
                        wait_for_products()  # of the previous batch, which went on during the conversion
                        for operand, group in zip(operands, batch, strict=True):
                            rope = group == KEY_GROUPS - 1
                            columns = pl.ds(64 * group, 64)
                            queries = qr.at[query_stage + z] if rope else q.at[query_stage + z, :, columns]
                            acc = accs[group * 64 // GROUP if scaled else 0]
                            multiply(acc, operand, queries.transpose((1, 0)))
                    return [acc[...] for acc in accs]

                size = config.keys_at_once
                batches = [range(at, min(at + size, KEY_GROUPS)) for at in range(0, KEY_GROUPS, size)]

                count = GROUPS + 1 if scaled else 1
                scales = tiles.load_scales(k, stage) if scaled else []
                *parts, s = pl.run_scoped(product, *[plgpu.ACC((TILE, N), jnp.float32)] * count)
                for part, key_scale in zip(parts, scales, strict=True):
                    s = s + part * over_columns(key_scale, N)
                return s * over_rows(row_scale, TILE), scales

            def add_values(acc, stage, z):
                """acc + V' P', where P is stored."""

                def product(*refs):
                    for ref, x in zip(refs, acc, strict=True):
                        if not interpret:
                            ref[...] = x
                    raw = tiles.load_values(k, stage, 0)
                    for step in range(STEPS):
                        ahead = tiles.load_values(k, stage, step + 1) if step + 1 < STEPS else None
                        if ahead is None:
                            plgpu.barrier_arrive(k_free.at[stage])
                        operands = [tiles.convert_values(raw, group) for group in range(GROUPS)]
                        wait_for_products()
                        for group, (ref, operand) in enumerate(zip(refs, operands, strict=True)):
                            weights = p.at[z + side, group if scaled else 0, pl.ds(N * step, N)]
                            multiply(ref, operand, weights)
                        raw = ahead
                    return [ref[...] for ref in refs]

                found = pl.run_scoped(product, *[plgpu.ACC((GROUP, N), jnp.float32)] * GROUPS)
                return [a + b for a, b in zip(acc, found, strict=True)] if interpret else found

            def clear_unseen(stage, request, first_token, length):
                tiles.clear(k, stage, jnp.clip(length - first_token, 0, TILE), TILE)
                for c, block in enumerate(table.blocks(request, first_token)):
                    begin = c * table.copy_rows
                    unknown = jnp.where(table.known(block), 0, table.copy_rows)
                    tiles.clear(k, stage, begin, begin + unknown)
                plgpu.commit_smem()

            def step(request, length, unmasked_end, query_stage, row_scale, begin, used, i, carry):
                acc, running_max, row_sum = carry
                stage = stage_of(used + i - begin)
                z = opaque_zero(i)
                masked = i >= unmasked_end
                plgpu.barrier_wait(k_full.at[stage])

                @pl.when(masked)
                def _():
                    clear_unseen(stage, request, i * TILE, length)

                s, scales = scores(stage, z, query_stage, row_scale)
                if logit_cap is not None:
                    s = cap_scores(s, logit_cap)
                mask = partial(
                    apply_mask, table=table, request=request, first_token=i * TILE, first_row=0, length=length,
                    tokens=tokens, heads=heads, keys=0,
                )  # fmt: skip
                s = lax.cond(masked, mask, lambda s: s, s)
                factor, logarithm = inverse_of_largest(scales) if scaled else (None, None)
                if logarithm is not None:
                    s = s + over_columns(logarithm, N)
                running_max, *acc, row_sum = softmax.update(s, running_max, *acc, row_sum)
                w = softmax.weights(s, running_max)
                if factor is None:
                    p.at[z + side, 0][...] = (w * lift).astype(p.dtype)
                else:
                    for group, key_scale in enumerate(scales):
                        p.at[z + side, group][...] = (w * over_columns(key_scale * factor * lift, N)).astype(p.dtype)
                    w = w * over_columns(factor, N)
                plgpu.commit_smem()
                acc = add_values(acc, stage, z)
                return acc, running_max, row_sum + w

            def inverse_of_largest(scales):
                """Of each key, the inverse and the logarithm of its largest scale, rounded to a power of two."""
                bits = lax.bitcast_convert_type(reduce(jnp.maximum, [jnp.abs(x) for x in scales]), jnp.int32)
                largest = jnp.clip(bits & EXPONENT, LEAST_FACTOR, MOST_FACTOR)
                inverse = lax.bitcast_convert_type(INVERSE - largest, jnp.float32)
                return inverse, ((largest >> 23) - 127).astype(jnp.float32)

            def every_other(begin, end, used, step, carry):
                """Runs `step` for the tiles of this side."""
                mine = begin + lax.rem(used + side, jnp.int32(2))
                count = lax.div(jnp.maximum(end - mine, 0) + 1, jnp.int32(2))
                return lax.fori_loop(0, count, lambda n, carry: step(mine + 2 * n, carry), carry)

            def give(n, acc, running_max, row_sum):
                for part in range(GROUPS):

                    @pl.when((n > first) | (part > 0))
                    def _():
                        plgpu.barrier_wait(taken)

                    if part == 0:
                        stats[0], stats[1] = running_max, row_sum
                    other[...] = acc[part]
                    plgpu.barrier_arrive(given)

            def take(n, acc, running_max, row_sum):
                """The result of both consumers, normalized, and its log-sum-exps."""
                plgpu.barrier_wait(given)
                other_max = plgpu.load(stats.at[0], layout=COLUMN)
                merged_max = jnp.maximum(running_max, other_max)
                own, others = jnp.exp2(running_max - merged_max), jnp.exp2(other_max - merged_max)
                row_sum = row_sum * own + plgpu.load(stats.at[1], layout=COLUMN) * others
                inverse, lse = softmax.finalize(row_sum, merged_max)
                inverse = inverse * (1 / lift)
                for ref in kv_scale_ref:
                    inverse = inverse * ref[0]
                own, others = own * inverse, others * inverse
                merged = []
                for part in range(GROUPS):
                    if part > 0:
                        plgpu.barrier_wait(given)
                    theirs = plgpu.load(other, layout=WGMMA)
                    merged.append(acc[part] * over_rows(own, GROUP) + theirs * over_rows(others, GROUP))

                    @pl.when((n < work_end - 1) | (part < GROUPS - 1))
                    def _():
                        plgpu.barrier_arrive(taken)

                return merged, lse

            def store_result(request, split, acc, lse):
                @pl.when(split < 0)
                def _():
                    tiles.store_rows(out_ref, request, [x.astype(dtype) for x in acc])
                    store(lse_ref.at[request], lse[:rows] * (1 / LOG2E))

                @pl.when(split >= 0)
                def _():
                    halves = [jnp.abs(x[at : at + TILE]) for x in acc for at in (0, TILE)]
                    magnitude = split_scale(tiles.over_warps("max", reduce(jnp.maximum, halves), stats, side))
                    factor = over_rows(1 / magnitude, GROUP)
                    values = [lax.bitcast_convert_type((x * factor).astype(SPLIT_DTYPE), dtype) for x in acc]
                    tiles.store_rows(split_out_ref, split, values)
                    store(split_lse_ref.at[split], lse[:rows])
                    store(split_scale_ref.at[split, 0], magnitude[:rows])

            def run(n, carry):
                used, (request, begin, end, length, unmasked_end, split, _) = carry
                ahead = load_work_tile(work_tiles_ref, n + 1)  # the loads proceed while this one is computed
                length, unmasked_end = (jnp.where(in_cache, x, 0) for x in (length, unmasked_end))
                query_stage = query_stage_of(n)
                plgpu.barrier_wait(q_full.at[query_stage])
                row_scale = plgpu.load(stats.at[INVERSES + query_stage], layout=COLUMN) * scale
                carry = [zeros(GROUP, N)] * GROUPS, softmax.empty_max(N), zeros(TILE, N)
                one = partial(step, request, length, unmasked_end, query_stage, row_scale, begin, used)
                acc, running_max, row_sum = every_other(begin, end, used, one, carry)
                plgpu.barrier_arrive(q_free.at[query_stage])
                row_sum = tiles.over_warps("add", row_sum, stats, side)
                if side == 1:
                    give(n, acc, running_max, row_sum)
                else:
                    store_result(request, split, *take(n, acc, running_max, row_sum))
                return used + end - begin, ahead

            lax.fori_loop(first, work_end, run, (jnp.int32(0), first_tile))

        # Nested: of three branches in a row, the first would keep live, and spill, values that the last one needs.
        lax.cond(wg == 2, producer, lambda: lax.cond(wg == 0, partial(consumer, 0), partial(consumer, 1)))

    def narrow(*shape, dtype, swizzle):
        """Shared memory in swizzled tiles of 8 by 16."""
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, N)), plgpu.SwizzleTransform(swizzle)))

    # The interpreter wants register operands of wgmma in shared memory.
    operands = {}
    if interpret:
        operands = {f"operand_keys_{d}": swizzled(2, TILE, 64, dtype=d) for d in ("float16", "bfloat16")}
        operands["operand_values_float16"] = narrow(2, GROUP, N, dtype=jnp.float16, swizzle=32)
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=result_types(
            (batch,), plan.max_splits, dtype, rows=rows, width=LATENT, lse=rows, split_lse=rows, scales=1
        ),
        grid=(plan.num_partitions,),
        grid_names=("partition",),
        num_threads=3,
        thread_name="wg",
        kernel_name="decode_mla",
        scratch_types={
            "q": swizzled(query_stages, N, LATENT, dtype=jnp.float16),
            "qr": swizzled(query_stages, N, ROPE, dtype=tiles.rope_dtype),
            "k": plgpu.SMEM((stages, TILE * pages.width), buffer.dtype),
            "p": narrow(2, GROUPS if scaled else 1, TILE, N, dtype=jnp.float16, swizzle=32),
            "other": narrow(GROUP, N, dtype=jnp.float32, swizzle=64),
            "stats": plgpu.SMEM((STATS, N), jnp.float32),
            "q_full": plgpu.Barrier(num_barriers=query_stages),
            "q_free": plgpu.Barrier(num_arrivals=2, num_barriers=query_stages),
            "k_full": plgpu.Barrier(num_arrivals=copies_per_tile(pages), num_barriers=stages),
            "k_free": plgpu.Barrier(num_barriers=stages),
            "given": plgpu.Barrier(),
            "taken": plgpu.Barrier(),
            **operands,
        },
    )(
        q_latent, q_pe, EntryPages.of(buffer, pages), block_tables, jnp.reshape(layer, (1,)), jnp.reshape(scale, (1,)),
        *([] if kv_scale is None else [jnp.reshape(kv_scale, (1,))]),
        plan.partitions, plan.work_tiles, plan.split_requests,
    )  # fmt: skip
