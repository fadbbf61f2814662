"""Dense MLA decode in tiles of 64 rows.

Work.  A tile is 64 rows (query tokens x heads of a request) by 64 keys.  A CTA owns 64 rows and walks its part of the
plan: items, each a range of pairs of key tiles of a request.  With more than 64 rows per request, two CTAs form a
cluster, and each key tile is fetched once for both by TMA multicast.

Who does what: two computing warpgroups and one that copies.  With K0 and K1 the two key tiles of a pair:

    copier       Q of the request; for each pair the halves of K0, then of K1, and their rotary parts; in a cluster, has
                 the next pair brought to the L2 cache once K0 has come
    warpgroup 0  S0 = Q K0'; softmax, P0; O[:, :256] += P0 K0[:, :256], then P1 K1[:, :256]
    warpgroup 1  S1 = Q K1'; O[:, 256:] += P0 K0[:, 256:], beside it softmax, P1; then P1 K1[:, 256:]

Each holds half of O (64 x 256 float32, 128 registers a lane).  Both take the tiles in order, so that K0 is free, and on
its way again, while K1 is used: from S0 to P0, to K0's release and its return is the longest way round, which sets the
time of a pair.  So S1 leaves the tensor cores to S0 until all of its products have been issued.  A warpgroup hands its
P to the other through shared memory.

O nearly never shrinks: P is exp2(S - m) for a reference m that is raised, to the maximum so far, only once a score is
more than SLACK above it.  That is checked warp by warp, on what each lane holds, so that in most pairs no lane queries
another for maxima or sums, and O stays where wgmma left it.  The reference passes from one warpgroup to the other in
`stats`, where only a raised one is written.

The values of a piece of a cut request leave as float16: each warpgroup divides its half of a row by the largest of its
own values, so neither waits for the other before its values are on their way.

Barriers.  q_full, qr_full: Q has landed, its rotary part has (in p[0]).  q_free: both warpgroups have multiplied with Q
for the last time; p_free: p[0] has been used for the last time; so the next item's Q arrives while this one ends.
k_full[tile, half], r_full[tile]: keys have landed.  k_free[tile, half]: the warpgroup that multiplies that half last
has done, in every CTA of the cluster; K1's halves stage the result of an item, and are free after it has left.
s_begun: S0's products have been issued.  p_ready[tile]: P and the reference after the tile are in `p` and stats[0].
met: both warpgroups have read Q's rotary part, which P0 overwrites; the sums of both are in stats[1:3].  Between them
they order every reuse: warpgroup 0 overwrites P0 and stats[0] only after p_ready[1], and after K0 has come anew, which
warpgroup 1 freed when it was done with P0; warpgroup 1 overwrites P1 and stats[0] only after the next p_ready[0].  No
other barriers: within a warpgroup, what one thread writes another reads only through TMA or wgmma after commit_smem, or
after `met`.

Budget.  Shared memory: Q 64 KiB + K 128 KiB + rotary keys 16 KiB + P 16 KiB + stats 1 KiB = 225 KiB of 227.  Registers:
240 a lane to compute, 24 to copy: the 504 that a kernel of three warpgroups starts with (were they more, it would wait
for ever).  The slot index of shared-memory operands comes from the loop variable so that the compiler cannot know it:
constant ones have their 64-bit wgmma descriptors hoisted out of the loop and spilled, which costs half the speed.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.attending import (
    PIECES,
    SLACK,
    clear_values,
    ended,
    results,
    scale_of,
    tokens_of,
    without_hidden,
)
from jaxkv_kernels.mosaic_gpu.attention.page_table import TILE, PageTable, copies_of
from jaxkv_kernels.mosaic_gpu.attention.plan_decode import PAIR, Plan, begun, described
from jaxkv_kernels.mosaic_gpu.attention.token_rows import divided, token_rows
from jaxkv_kernels.mosaic_gpu.runtime.build import (
    EMPTY,
    FOLDED,
    LOG2E,
    ROW,
    WGMMA,
    across,
    any_positive,
    capped,
    folded,
    kernel,
    launch_next,
    multiply_add,
    prefetch,
    row_of,
    store,
    swizzled,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT, ROPE

HALF = 256


def attend_rows(
    q_latent, q_pe, buffer, block_tables, layer, scale, plan: Plan, *, tokens, heads, pages, logit_cap, interpret
):
    """Results of whole requests, and of the pieces of those that were cut."""
    batch, rows, _ = q_latent.shape
    tiles = -(-rows // TILE)
    cluster = 2 if tiles % 2 == 0 else 1
    groups = tiles // cluster
    view = token_rows(pages)
    dtype = q_latent.dtype
    copies = copies_of(pages)
    stored = min(rows, TILE)  # of a tile, of what is one value a row: a copy that nothing clips
    padded = (groups * cluster - 1) * TILE + stored
    shared: Any = {"collective_axes": "cta"} if cluster > 1 else {}
    # Where memory is the limit, requests for it are too: without a cluster this costs 10 %.
    prefetching = cluster > 1 and pages.token_stride == pages.width

    def body(
        q_ref, qr_ref, kv_ref, table_ref, layer_ref, scale_ref, start_ref, item_ref, cut_ref,
        out_ref, lse_ref, part_out_ref, part_lse_ref, part_scale_ref,
        q, k, r, p, stats,
        q_full, qr_full, q_free, p_free, k_full, r_full, k_free, s_begun, p_ready, met, operands: Any = None
    ):  # fmt: skip
        launch_next(cut_ref, interpret=interpret)
        part, group, cta, wg = (lax.axis_index(axis) for axis in ("part", "group", "cta", "wg"))
        tile = group * cluster + cta
        row0 = tile * TILE
        table = PageTable(table_ref, pages)
        about = partial(described, item_ref)

        def started():
            """What a part begins with, and the layer: loads that do not wait for one another."""
            first, end, told = begun(start_ref, part)
            layer = layer_ref[0]
            return first, end, told, layer, (layer >= 0) & (layer < pages.num_layers)

        def copier():
            plgpu.set_max_registers(24, action="decrease")
            first, end, told, layer, in_cache = started()
            safe_layer = jnp.where(in_cache, layer, 0)

            def blocks_of(b, pair):
                """The blocks of a pair's tiles."""
                return tuple(table.blocks(b, pair * PAIR + slot * TILE) for slot in range(2))

            source_of = partial(tokens_of, kv_ref, view, table, safe_layer)

            def fetch(blocks, pair, slot, half, with_rope, used):
                @pl.when(used > 0)
                def _():
                    plgpu.barrier_wait(k_free.at[2 * slot + half])

                for c, block in enumerate(blocks[slot]):
                    source = source_of(block, (2 * pair + slot) * TILE + c * table.copy_rows)
                    into = pl.ds(c * table.copy_rows, table.copy_rows)
                    column = view.column(safe_layer) + half * HALF
                    plgpu.copy_gmem_to_smem(
                        source.at[:, pl.ds(column, HALF)], k.at[slot, half, into], k_full.at[2 * slot + half], **shared
                    )
                    if with_rope:
                        column = view.column(safe_layer) + LATENT
                        plgpu.copy_gmem_to_smem(
                            source.at[:, pl.ds(column, ROPE)], r.at[slot, into], r_full.at[slot], **shared
                        )

            def prefetch_tile(blocks, pair):
                """Brings this CTA's tile of a pair to the L2 cache: one of the two that the cluster will fetch."""
                for c, both in enumerate(zip(*blocks, strict=True)):
                    first_token = (2 * pair + cta) * TILE + c * table.copy_rows
                    prefetch(source_of(jnp.where(cta == 0, *both), first_token), interpret=interpret)

            def fetch_queries(b, again):
                """The queries of a request; `again`, once the last one's are no longer needed."""
                if again:
                    plgpu.barrier_wait(q_free)
                for half in range(2):
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[b, pl.ds(row0, TILE), pl.ds(half * HALF, HALF)], q.at[half], q_full
                    )

                if again:
                    plgpu.barrier_wait(p_free)
                plgpu.copy_gmem_to_smem(qr_ref.at[b, pl.ds(row0, TILE)], p.at[0], qr_full)

            def run(item, carry):
                used, (b, begin, stop) = carry

                def pair(i, carry):
                    used, blocks, next_item = carry
                    ahead = blocks_of(b, i + 1)  # on its way while this pair's memory comes free
                    fetch(blocks, i, 0, 0, True, used)
                    fetch(blocks, i, 0, 1, False, used)

                    @pl.when((i == begin) & (item > first))
                    def _():
                        fetch_queries(b, again=True)

                    fetch(blocks, i, 1, 1, True, used)
                    fetch(blocks, i, 1, 0, False, used)
                    if prefetching:
                        for half in range(2):  # all CTAs begin at once: sooner, it delays the first keys of others
                            plgpu.barrier_wait(k_full.at[half])
                        pl.when(i + 1 < stop)(partial(prefetch_tile, ahead, i + 1))
                    # After the copies: what is kept in local memory is waited for at once.
                    next_item = lax.cond(i == begin, lambda: about(item + 1)[:3], lambda: next_item)
                    return used + 1, ahead, next_item

                used, _, next_item = lax.fori_loop(begin, stop, pair, (used, blocks_of(b, begin), (b, begin, stop)))
                return used, next_item

            @pl.when(end > first)
            def _():
                fetch_queries(told[0], again=False)  # first: behind the keys of all CTAs they would come last

            lax.fori_loop(first, end, run, (jnp.int32(0), told[:3]))

            # Wait for the last use of everything: a peer may still arrive on these barriers.
            @pl.when(end > first)
            def _():
                plgpu.barrier_wait(q_free)
                plgpu.barrier_wait(p_free)
                for slot in range(4):
                    plgpu.barrier_wait(k_free.at[slot])

        def consumer(side):
            scratch = operands.at[side] if interpret else None

            def meet():
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

            plgpu.set_max_registers(240, action="increase")
            first, end, told, _, in_cache = started()
            scale = scale_ref[0] * LOG2E

            def scores(q_rope, i, b, length, masked, last):
                z = divided(i, 1 << 20)  # 0, but the compiler does not know
                slot = z + side
                near, far = (0, 1) if side == 0 else (1, 0)

                def product(acc):
                    if side == 1:
                        plgpu.barrier_wait(s_begun)
                    for half in (near, far):
                        plgpu.barrier_wait(k_full.at[2 * side + half])
                        plgpu.wgmma(acc, q.at[z + half], k.at[slot, half].transpose((1, 0)))
                    plgpu.barrier_wait(r_full.at[side])
                    rope = q_rope if scratch is None else operands.at[2 + side]
                    plgpu.wgmma(acc, rope, r.at[slot].transpose((1, 0)))
                    if side == 0:
                        plgpu.barrier_arrive(s_begun)
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * scale

                @pl.when(i == last)
                def _():
                    plgpu.barrier_arrive(q_free)  # the next request's queries may come

                if logit_cap is not None:
                    s = capped(s, logit_cap)

                hide = partial(
                    without_hidden, table=table, b=b, first_token=(2 * i + side) * TILE, row0=row0, length=length,
                    tokens=tokens, heads=heads, keys=1,
                )  # fmt: skip
                return lax.cond(masked, hide, lambda s: s, s)

            def clear(i, tile_in_pair, b, length):
                half = k.at[divided(i, 1 << 20) + tile_in_pair, side]
                clear_values(half, HALF, table, b, (2 * i + tile_in_pair) * TILE, length)

            def times_values(weights, i, tile, b, length, masked, acc, meanwhile=None):
                """acc + weights @ (this side's half of a tile's values), and what `meanwhile` returned."""
                z = divided(i, 1 << 20)
                pl.when(masked)(partial(clear, i, tile, b, length))
                return multiply_add(acc, weights, k.at[z + tile, z + side], meanwhile, scratch=scratch)

            def grown(s, m):
                """The reference of the exponents for scores `s`; a raised one is left in stats[0]."""

                def raised():
                    new = jnp.maximum(m, s.max(axis=1))
                    stats[0] = new
                    return new

                above = folded(jnp.maximum, s) - across(m + SLACK, FOLDED)
                return lax.cond(any_positive(above, interpret=interpret), raised, lambda: m)

            def shrunk(acc, total, m, new):
                """Both for the reference `new` instead of `m`: nearly always the same."""

                def times():
                    shrink = jnp.exp2(m - new)
                    return acc * across(shrink, HALF), total * across(shrink, FOLDED)

                return lax.cond(any_positive(new - m, interpret=interpret), times, lambda: (acc, total))

            def weights(s, m, tile):
                """Hands the weights of a tile of scores to the other warpgroup."""
                w = jnp.exp2(s - across(m, TILE))
                w16 = w.astype(dtype)
                p[tile] = w16
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[tile])
                return w16, folded(jnp.add, w)

            def pair0(q_rope, b, length, clear, last, i, carry):
                acc, m, total = carry
                masked = i >= clear
                s = scores(q_rope, i, b, length, masked, last)
                m0 = grown(s, m)
                w16, added = weights(s, m0, 0)
                acc, total = shrunk(acc, total, m, m0)
                acc, _ = times_values(w16, i, 0, b, length, masked, acc)
                plgpu.barrier_arrive(k_free.at[0])
                plgpu.barrier_wait(p_ready.at[1])
                m1 = plgpu.load(stats.at[0], layout=ROW)
                z = divided(i, 1 << 20)
                acc, total = shrunk(acc, total + added, m0, m1)
                acc, _ = times_values(p.at[z + 1], i, 1, b, length, masked, acc)

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free.at[2])

                return acc, m1, total

            def pair1(q_rope, b, length, clear, last, i, carry):
                acc, m, total = carry
                masked = i >= clear
                s = scores(q_rope, i, b, length, masked, last)
                plgpu.barrier_wait(p_ready.at[0])
                m0 = plgpu.load(stats.at[0], layout=ROW)
                acc, total = shrunk(acc, total, m, m0)

                def softmax():
                    m1 = grown(s, m0)
                    return m1, *weights(s, m1, 1)

                z = divided(i, 1 << 20)
                acc, (m1, w16, added) = times_values(p.at[z], i, 0, b, length, masked, acc, softmax)
                plgpu.barrier_arrive(k_free.at[1])

                @pl.when(i == last)
                def _():
                    plgpu.barrier_arrive(p_free)

                acc, total = shrunk(acc, total, m0, m1)
                acc, _ = times_values(w16, i, 1, b, length, masked, acc)

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free.at[3])

                return acc, m1, total + added

            step = (pair0, pair1)[side]

            def run(item, told):
                ahead = about(item + 1)  # on its way while this item is computed
                b, begin, stop, length, clear, piece, _ = told
                length, clear = (jnp.where(in_cache, x, 0) for x in (length, clear))
                plgpu.barrier_wait(qr_full)
                q_rope = plgpu.load(p.at[0], layout=WGMMA)
                if scratch is not None:
                    operands[2 + side] = q_rope
                    plgpu.commit_smem()
                meet()  # both have read p[0], which P0 overwrites
                plgpu.barrier_wait(q_full)
                last = stop - 1
                if side == 0:
                    stats[0] = row_of(TILE, EMPTY)
                carry = zeros(TILE, HALF), row_of(TILE, EMPTY), zeros(TILE, FOLDED)
                acc, m, total = lax.fori_loop(begin, stop, partial(step, q_rope, b, length, clear, last), carry)

                def leave(values, to, place):
                    """Has this half of the values copied to where they belong, in place of this half of K1."""
                    stage = k.at[divided(last, 1 << 20) + 1, side]
                    stage[...] = values
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, to.at[place, pl.ds(row0, TILE), pl.ds(side * HALF, HALF)])

                def of_both():
                    """What sums are to be multiplied by, and log-sum-exps: the weights of both warpgroups together."""
                    stats[1 + side] = total.sum(axis=1)
                    meet()
                    return ended(plgpu.load(stats.at[1], layout=ROW) + plgpu.load(stats.at[2], layout=ROW), m)

                @pl.when(piece < 0)
                def _():
                    inverse, lse = of_both()
                    leave((acc * across(inverse, HALF)).astype(dtype), out_ref, b)
                    if side == 0:
                        stats[0] = lse * (1 / LOG2E)
                        plgpu.commit_smem()
                        into = lse_ref.at[b, pl.ds(row0, stored)]
                        plgpu.copy_smem_to_gmem(stats.at[0, pl.ds(0, stored)], into)

                @pl.when(piece >= 0)
                def _():
                    most = scale_of(jnp.abs(acc).max(axis=1))
                    values = (acc * across(1 / most, HALF)).astype(PIECES)
                    leave(lax.bitcast_convert_type(values, dtype), part_out_ref, piece)
                    inverse, lse = of_both()  # neither waits for the other before its values are on their way
                    store(part_scale_ref.at[piece, side, pl.ds(row0, TILE)], most * inverse)
                    if side == 0:
                        store(part_lse_ref.at[piece, pl.ds(row0, TILE)], lse)

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(k_free.at[2 + side])
                return ahead

            lax.fori_loop(first, end, run, told)

        # One branch in another: were they three in a row, what the last needs would live, and be spilled, in the first.
        lax.cond(wg == 2, copier, lambda: lax.cond(wg == 0, partial(consumer, 0), partial(consumer, 1)))

    free = (
        plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=4) if cluster > 1 else plgpu.Barrier(num_barriers=4)
    )
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=results(batch, rows, plan, dtype, lse=padded, pieces=tiles * TILE, scales=2),
        grid=(groups, plan.parts),
        grid_names=("group", "part"),
        cluster=(cluster,),
        cluster_names=("cta",),
        num_threads=3,
        thread_name="wg",
        kernel_name="decode_mla",
        scratch_types={
            "q": swizzled(2, TILE, HALF, dtype=dtype),
            "k": swizzled(2, 2, TILE, HALF, dtype=dtype),
            "r": swizzled(2, TILE, ROPE, dtype=dtype),
            "p": swizzled(2, TILE, TILE, dtype=dtype),
            "stats": plgpu.SMEM((3, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "qr_full": plgpu.Barrier(),
            "q_free": plgpu.Barrier(num_arrivals=2),
            "p_free": plgpu.Barrier(),
            "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=4),
            "r_full": plgpu.Barrier(num_arrivals=copies, num_barriers=2),
            "k_free": free,
            "s_begun": plgpu.Barrier(),
            "p_ready": plgpu.Barrier(num_barriers=2),
            "met": plgpu.Barrier(num_arrivals=2),
            # Register operands of wgmma where the interpreter wants them: in shared memory.
            **({"operands": swizzled(4, TILE, TILE, dtype=dtype)} if interpret else {}),
        },
    )(
        q_latent, q_pe, view.of(buffer), block_tables, jnp.reshape(layer, (1,)), jnp.reshape(scale, (1,)),
        plan.starts, plan.items, plan.cuts,
    )  # fmt: skip
