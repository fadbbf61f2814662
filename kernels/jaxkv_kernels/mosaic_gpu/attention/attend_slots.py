"""Sparse MLA decode in tiles of 64 rows: every query token attends to slots of its own.

Work.  A tile of rows is 64 heads of a query token.  A CTA owns one and walks its part of the plan: work tiles, each a
range of pairs of key tiles (64 slots) of a query token.  The CTAs of one query token gather for themselves: a tile's
conversion takes less time than its products.

Who does what: two consumer warpgroups and one producer.  With K0 and K1 the two key tiles of a pair:

    producer     Q of the query token (TMA); for each pair the halves of K0, then of K1, gathered by plain loads, which
                 are RING units ahead of what is stored; rows of the tile after next are brought to the L2 cache
    consumer 0   S0 = Q K0'; softmax, P0; O[:, :256] += P0 K0[:, :256], then P1 K1[:, :256]
    consumer 1   S1 = Q K1'; O[:, 256:] += P0 K0[:, 256:], beside it softmax; then P1 K1[:, 256:], beside it P1 for
                 consumer 0

This is the schedule of `attend_rows.py`, with another producer.  Here P0 and P1 share a place, since the rotary part of
Q keeps its own: the producer needs the registers that it would take.

Numbers.  The running max M is that of score + log2(factor), where the factor of a key is what its values are to be
multiplied by (`gathered_rows.py`); it is 1 nearly always, and tiles in which it always is skip what deals with it.  So
P = exp2(score - M) * factor is at most 2**RESCALE_THRESHOLD whatever the scales are, while the row sum takes
exp2(score - M).  Queries of quantised entries become float16 in place, each row divided by a power of two that makes
it fit; the rotary part stays bf16.

Barriers.  q_full: Q has landed.  q_free: both consumers have multiplied with Q for the last time.  k_full[tile, half]:
keys are stored; with the second half to be stored (`far`) also rotary keys.  k_free[tile, half]: the consumer that
multiplies that half last has done; K1's halves stage the result of a work tile, and are free after it has been copied.
s_issued: the products of S0 have been issued.  p_ready[tile]: P and the running max after the tile are in `p` and
stats[0].  met: named barrier of both consumers.  P0 is overwritten by P1 once consumer 1, its only reader, has
multiplied it, and P1 by the next P0 once consumer 0 has.  Factors and rotary keys of a tile are read by one consumer,
before it frees the near half.

Budget.  Shared memory: Q 72 KiB + K 128 KiB + rotary keys 16 KiB + P 8 KiB + stats 2 KiB = 226 KiB of 227.  Registers
per lane: see CONSUMER and PRODUCER; 504 in all.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.attending import PIECES, SLACK, results, scale_of
from jaxkv_kernels.mosaic_gpu.attention.gather_tiles import FACTOR, FLAG, STATS, GatherTiles
from jaxkv_kernels.mosaic_gpu.attention.gathered_rows import HALF, GatheredRows, async_fence
from jaxkv_kernels.mosaic_gpu.attention.page_table import TILE
from jaxkv_kernels.mosaic_gpu.attention.plan_decode import Plan, begun, described
from jaxkv_kernels.mosaic_gpu.attention.token_rows import divided
from jaxkv_kernels.mosaic_gpu.runtime.build import (
    COLUMN,
    EMPTY,
    FOLDED,
    LOG2E,
    MASKED,
    ROW,
    WGMMA,
    across,
    any_positive,
    capped,
    down,
    folded,
    kernel,
    launch_next,
    multiply_add,
    row_of,
    store,
    swizzled,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.unsupported import ROPE

RESCALE_THRESHOLD = SLACK
CONSUMER, PRODUCER = 200, 104
"""Registers per lane."""
MAX, SUM, Q_MAX = 0, 1, 3
"""Rows of `stats`, beside those of the producer: running max; row sums and largest queries, one per consumer."""
EXPONENT, SMALLEST_EXPONENT, UNIT = 0x7F800000, 20 << 23, 268 << 23
"""Bits of float32: its exponent, the least that queries are scaled by; those of a power of two p and 2**14 / p add up
to UNIT."""


def attend_slots(
    q_latent, q_pe, buffer, slots, sinks, layer, scale, plan: Plan, *, rows: GatheredRows, logit_cap, interpret
):
    """Results of whole query tokens, and of the splits of those that were split.

    q_latent [N, >= heads, R], slots [N, K], sinks [>= heads rounded up to 64] or None.
    """
    batch, height, _ = q_latent.shape
    groups = -(-height // TILE)
    stored = min(height, TILE)  # rows of a tile that results of one value per row have
    padded = (groups - 1) * TILE + stored
    dtype, k_dtype = q_latent.dtype, rows.latent_dtype

    def body(*refs, **scratch):
        (
            q_ref, qr_ref, kv_ref, zero_ref, slot_ref, layer_ref, scale_ref, start_ref, item_ref, cut_ref,
            *sink_refs, out_ref, lse_ref, part_out_ref, part_lse_ref, part_scale_ref,
        ) = refs  # fmt: skip
        r, p, stats, qr = (scratch[name] for name in ("r", "p", "stats", "qr"))
        q_full = scratch["q_full"]
        # Barriers of equal arrivals in one array each: their addresses and phases take fewer registers.
        one, both = scratch["one_arrives"], scratch["both_arrive"]
        k_full, k_free = [one.at[n] for n in range(4)], [one.at[4 + n] for n in range(4)]
        s_issued, *p_ready = (one.at[8 + n] for n in range(3))
        q_free, met = (both.at[n] for n in range(2))
        # Two views of the same memory: as computed with, and as it comes from and goes to device memory.
        (q, q_in), (k, stage_out) = (
            (scratch[name], scratch[name]) if dtype == k_dtype else tuple(scratch[name]) for name in ("q", "k")
        )
        launch_next(cut_ref, interpret=interpret)
        part, group, wg = (lax.axis_index(axis) for axis in ("part", "group", "wg"))
        row0 = group * TILE
        about = partial(described, item_ref)

        def fetch_queries(b):
            for half in range(2):
                columns = pl.ds(half * HALF, HALF)
                plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(row0, TILE), columns], q_in.at[half], q_full)
            plgpu.copy_gmem_to_smem(qr_ref.at[b, pl.ds(row0, TILE)], qr, q_full)

        def producer():
            plgpu.set_max_registers(PRODUCER, action="decrease")
            first, end, _ = begun(start_ref, part)
            gather = GatherTiles(rows, kv_ref, zero_ref, slot_ref, k, r, stats, k_full, k_free, interpret)
            gather.run(layer_ref[0], first, end, about, q_free, fetch_queries)

        def consumer(side):
            operand = scratch["operands"].at[side] if interpret else None

            def meet():
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

            plgpu.set_max_registers(CONSUMER, action="increase")
            first, end, work_tile = begun(start_ref, part)
            scale = scale_ref[0] * LOG2E

            def scaled_queries():
                """Makes the queries float16; returns what scores of each row are to be multiplied by."""
                if dtype == k_dtype:
                    return row_of(TILE, 1.0) * scale
                latent, rope = (plgpu.load(ref, layout=WGMMA).astype(jnp.float32) for ref in (q_in.at[side], qr))
                stats[Q_MAX + side] = jnp.maximum(jnp.abs(latent).max(axis=1), jnp.abs(rope).max(axis=1))
                meet()
                most = jnp.maximum(*(plgpu.load(stats.at[Q_MAX + n], layout=ROW) for n in range(2)))
                bits = lax.bitcast_convert_type(most, jnp.int32) & EXPONENT
                bits = jnp.clip(bits, SMALLEST_EXPONENT, 254 << 23)
                unit = lax.bitcast_convert_type(_wrapped(UNIT) - bits, jnp.float32)
                q[side] = (latent * across(unit, HALF)).astype(k_dtype)
                if side == 0:
                    qr[...] = (rope * across(unit, ROPE)).astype(dtype)
                plgpu.commit_smem()
                meet()
                return lax.bitcast_convert_type(bits - (14 << 23), jnp.float32) * scale

            def scores(row_scale, i, last):
                z = divided(i, 1 << 20)  # 0, but the compiler does not know: see `attend_rows.py`
                tile = z + side
                near, far = side, 1 - side

                def product(acc):
                    if side == 1:
                        plgpu.barrier_wait(s_issued)
                    for half in (near, far):
                        plgpu.barrier_wait(k_full[2 * side + half])
                        async_fence(interpret=interpret)
                        plgpu.wgmma(acc, q.at[z + half], k.at[tile, half].transpose((1, 0)))
                    plgpu.wgmma(acc, qr, r.at[tile].transpose((1, 0)))
                    if side == 0:
                        plgpu.barrier_arrive(s_issued)
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * across(row_scale, TILE)

                @pl.when(i == last)
                def _():
                    plgpu.barrier_arrive(q_free)  # the next queries may come

                flags = [stats[FLAG, 4 * side + warp] for warp in range(4)]
                special = flags[0] + flags[1] + flags[2] + flags[3] > 0

                def factor():
                    return plgpu.load(stats.at[FACTOR + side], layout=COLUMN)

                def with_factors(s):
                    return s * down(jnp.abs(factor()), TILE)

                def in_values(s):
                    f = factor()
                    return jnp.where(down(f, TILE) < 0, MASKED, s + down(jnp.log2(jnp.abs(f)), TILE))

                if logit_cap is None:
                    s = lax.cond(special, lambda s: in_values(with_factors(s)), lambda s: s, s)
                else:
                    s = capped(lax.cond(special, with_factors, lambda s: s, s), logit_cap)
                    s = lax.cond(special, in_values, lambda s: s, s)

                def row_sums(w):
                    """Of the weights without their factors, folded."""
                    return lax.cond(
                        special,
                        lambda w: folded(jnp.add, w * down(1 / jnp.abs(factor()), TILE)),
                        partial(folded, jnp.add),
                        w,
                    )

                return s, row_sums

            def update_max(s, m):
                """The running max after scores `s`; a raised one is left in `stats`."""

                def raised():
                    new = jnp.maximum(m, s.max(axis=1))
                    stats[MAX] = new
                    return new

                above = folded(jnp.maximum, s) - across(m + RESCALE_THRESHOLD, FOLDED)
                return lax.cond(any_positive(above, interpret=interpret), raised, lambda: m)

            def rescale(acc, row_sum, m, new):
                """Both for the running max `new` instead of `m`: nearly always the same."""

                def times():
                    ratio = jnp.exp2(m - new)
                    return acc * across(ratio, HALF), row_sum * across(ratio, FOLDED)

                return lax.cond(any_positive(new - m, interpret=interpret), times, lambda: (acc, row_sum))

            def weights(s, m, row_sums):
                w = jnp.exp2(s - across(m, TILE))
                return w.astype(k_dtype), row_sums(w)

            def hand_over(w16, tile):
                """Leaves the weights of a tile to the other consumer."""
                p[...] = w16
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready[tile])

            def times_values(w16, i, tile, acc, meanwhile=None):
                """acc + w16 @ (this side's half of a tile's values), and what `meanwhile` returned."""
                z = divided(i, 1 << 20)
                return multiply_add(acc, w16, k.at[z + tile, z + side], meanwhile, scratch=operand)

            def pair0(row_scale, last, i, carry):
                acc, m, row_sum = carry
                s, row_sums = scores(row_scale, i, last)
                m0 = update_max(s, m)
                w16, added = weights(s, m0, row_sums)
                hand_over(w16, 0)
                acc, row_sum = rescale(acc, row_sum, m, m0)
                acc, _ = times_values(w16, i, 0, acc)
                plgpu.barrier_arrive(k_free[0])
                plgpu.barrier_wait(p_ready[1])
                m1 = plgpu.load(stats.at[MAX], layout=ROW)
                acc, row_sum = rescale(acc, row_sum + added, m0, m1)
                acc, _ = times_values(p, i, 1, acc)

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free[2])

                return acc, m1, row_sum

            def pair1(row_scale, last, i, carry):
                acc, m, row_sum = carry
                s, row_sums = scores(row_scale, i, last)
                plgpu.barrier_wait(p_ready[0])
                m0 = plgpu.load(stats.at[MAX], layout=ROW)
                acc, row_sum = rescale(acc, row_sum, m, m0)

                def softmax():
                    m1 = update_max(s, m0)
                    return m1, *weights(s, m1, row_sums)

                acc, (m1, w16, added) = times_values(p, i, 0, acc, softmax)
                plgpu.barrier_arrive(k_free[1])
                acc, row_sum = rescale(acc, row_sum, m0, m1)
                acc, _ = times_values(w16, i, 1, acc, partial(hand_over, w16, 1))

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free[3])

                return acc, m1, row_sum + added

            step = (pair0, pair1)[side]

            def run(item, work_tile):
                ahead = about(item + 1)  # on its way while this work tile is computed
                b, begin, stop, _, _, split, _ = work_tile
                plgpu.barrier_wait(q_full)
                row_scale = scaled_queries()
                last = stop - 1
                if side == 0:
                    stats[MAX] = row_of(TILE, EMPTY)
                carry = zeros(TILE, HALF), row_of(TILE, EMPTY), zeros(TILE, FOLDED)
                acc, m, row_sum = lax.fori_loop(begin, stop, partial(step, row_scale, last), carry)

                def copy_out(values, stage, to, place):
                    """Has this half of the values copied to where they belong, by way of this half of K1."""
                    stage = stage.at[divided(last, 1 << 20) + 1, side]
                    stage[...] = values
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, to.at[place, pl.ds(row0, TILE), pl.ds(side * HALF, HALF)])

                def of_both():
                    """The row sums of both consumers, and log-sum-exps (base 2)."""
                    stats[SUM + side] = row_sum.sum(axis=1)
                    meet()
                    total = plgpu.load(stats.at[SUM], layout=ROW) + plgpu.load(stats.at[SUM + 1], layout=ROW)
                    lse = jnp.where(total == 0, -jnp.inf, m + jnp.log2(jnp.where(total == 0, 1.0, total)))
                    return total, lse

                def inverse_of(total):
                    return jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))

                @pl.when(split < 0)
                def _():
                    total, lse = of_both()
                    for ref in sink_refs:
                        sink = plgpu.load(ref.at[pl.ds(row0, TILE)], layout=ROW, optimized=False)
                        total = total + jnp.exp2(sink * LOG2E - m)
                    copy_out((acc * across(inverse_of(total), HALF)).astype(dtype), stage_out, out_ref, b)
                    if side == 0:
                        stats[MAX] = lse * (1 / LOG2E)
                        plgpu.commit_smem()
                        into = lse_ref.at[b, pl.ds(row0, stored)]
                        plgpu.copy_smem_to_gmem(stats.at[MAX, pl.ds(0, stored)], into)

                @pl.when(split >= 0)
                def _():
                    most = scale_of(jnp.abs(acc).max(axis=1))
                    values = (acc * across(1 / most, HALF)).astype(PIECES)
                    if k_dtype != PIECES:
                        values = lax.bitcast_convert_type(values, k_dtype)
                    copy_out(values, k, part_out_ref, split)
                    total, lse = of_both()  # neither waits for the other before its values are on their way
                    store(part_scale_ref.at[split, side, pl.ds(row0, TILE)], most * inverse_of(total))
                    if side == 0:
                        store(part_lse_ref.at[split, pl.ds(row0, TILE)], lse)

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(k_free[2 + side])
                return ahead

            lax.fori_loop(first, end, run, work_tile)

        # One branch in another: were they three in a row, what the last needs would live, and be spilled, in the first.
        lax.cond(wg == 2, producer, lambda: lax.cond(wg == 0, partial(consumer, 0), partial(consumer, 1)))

    def viewed(*shape):
        """Shared memory of the dtype that is computed with, and of that of queries and results."""
        own = swizzled(*shape, dtype=k_dtype)
        return own if dtype == k_dtype else plgpu.RefUnion(own, swizzled(*shape, dtype=dtype))

    out, lse, part_out, *part_rows = results(batch, height, plan, dtype, lse=padded, pieces=groups * TILE, scales=2)
    part_out = jax.ShapeDtypeStruct(part_out.shape, k_dtype)
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=(out, lse, part_out, *part_rows),
        grid=(groups, plan.parts),
        grid_names=("group", "part"),
        num_threads=3,
        thread_name="wg",
        kernel_name="decode_mla_sparse",
        scratch_types={
            "q": viewed(2, TILE, HALF),
            "qr": swizzled(TILE, ROPE, dtype=dtype),
            "k": viewed(2, 2, TILE, HALF),
            "r": swizzled(2, TILE, ROPE, dtype=rows.rope_dtype),
            "p": swizzled(TILE, TILE, dtype=k_dtype),
            "stats": plgpu.SMEM((STATS, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=3),
            "one_arrives": plgpu.Barrier(num_barriers=11),
            "both_arrive": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            # Register operands of wgmma where the interpreter wants them: in shared memory.
            **({"operands": swizzled(2, TILE, TILE, dtype=k_dtype)} if interpret else {}),
        },
    )(
        q_latent, q_pe, rows.buffer(buffer), rows.zeros(), slots, jnp.reshape(layer, (1,)), jnp.reshape(scale, (1,)),
        plan.starts, plan.items, plan.cuts, *([] if sinks is None else [sinks]),
    )  # fmt: skip


def _wrapped(bits: int):
    """An int32 of these 32 bits."""
    return jnp.int32(bits - (1 << 32) if bits >= 1 << 31 else bits)
