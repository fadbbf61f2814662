"""Dense MLA decode of few rows (query tokens x heads of a request): the products' operands are swapped.

A tile of 64 rows, as in `attend_rows`, would be padding mostly.  Here keys and values are what wgmma has 64 rows of,
and the queries its columns, as few as there are:

    S' = K Q'     [64 keys, rows]      K as it is stored, Q likewise
    O' += V' P'   [512, rows]          V is K's first 512 columns, read across; P is stored as [rows, 64 keys]

What is left is reading memory: the tensor cores are busy for half of the time that a tile takes to come.

Who does what.  A CTA of two warpgroups walks its part of the plan: items, each a range of tiles of a request.  One
copies: a tile of keys by one TMA copy for each page it lies in, whole rows, since device memory answers whole pages
fastest; the queries of an item after its first tile, while the item before is still being computed.  The other computes
a tile at a time, all of it.  O' stays in its registers, where wgmma left it: P is exp2(S - m) for a reference m that is
raised, to the maximum so far, only once a score is more than SLACK above it.  The keys of a row are in all lanes and
warps, which all must have the same m: that is one vote of the warpgroup a tile, with maxima only where it says so.  The
sums of weights stay with the lanes until the item ends.  The result takes the place of the item's queries, and stays
there: the copier takes it away when another item's queries need the place, or at last.  Most CTAs have fewer items than
places, and so write nothing while they read: 4 MB of pieces written between 853 MB of reads cost 3 % of the time.

Barriers.  q_full[turn], k_full[slot]: queries, a tile of keys have landed.  k_free[slot]: the tile has been multiplied.
done[turn]: the result stands in place of the queries.  Within the computing warpgroup, the vote stands between the last
use of P, and of the tile by the first product, and what overwrites P or clears values.

Budget, for 16 rows.  Shared memory: K 144 KiB + queries or results 72 KiB + P 2 KiB + maxima across warps 2 KiB + stats
1 KiB = 221 KiB of 227.  Registers: O' 64 a lane, S' and the sums of weights 8 each; two warpgroups leave 255 to each.
32 rows would fit with two places instead of four, but took 6 % longer than in `attend_rows`.
"""

from functools import partial, reduce

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
from jaxkv_kernels.mosaic_gpu.attention.plan_decode import Plan, begun, described
from jaxkv_kernels.mosaic_gpu.attention.token_rows import token_rows
from jaxkv_kernels.mosaic_gpu.runtime.build import (
    COLUMN,
    EMPTY,
    LOG2E,
    any_positive,
    capped,
    down,
    filled,
    kernel,
    launch_next,
    multiply_add,
    swizzled,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT, ROPE

SLOTS, TURNS = 2, 4
"""Tiles of keys, and items with their queries or results, that shared memory holds."""


def attend_few_rows(
    q_latent, q_pe, buffer, block_tables, layer, scale, plan: Plan, *, tokens, heads, pages, logit_cap, interpret
):
    """Results of whole requests, and of the pieces of those that were cut, for a plan in tiles."""
    batch, rows, _ = q_latent.shape
    view = token_rows(pages)
    dtype = q_latent.dtype

    def body(
        q_ref, qr_ref, kv_ref, table_ref, layer_ref, scale_ref, start_ref, item_ref, cut_ref,
        out_ref, lse_ref, part_out_ref, part_lse_ref, part_scale_ref,
        q, qr, k, p, stats, q_full, done, k_full, k_free
    ):  # fmt: skip
        launch_next(cut_ref, interpret=interpret)
        part, wg = (lax.axis_index(axis) for axis in ("part", "wg"))
        in_cache = (layer_ref[0] >= 0) & (layer_ref[0] < pages.num_layers)
        table = PageTable(table_ref, pages)
        about = partial(described, item_ref)
        first, end, told = begun(start_ref, part)

        def turn_of(item):
            return lax.rem(item - first, jnp.int32(TURNS))

        def slot_of(used):
            return lax.rem(used, jnp.int32(SLOTS))

        def first_blocks(told):
            """The blocks of an item's first tile."""
            b, tile, *_ = told
            return table.blocks(b, tile * TILE)

        def copier():
            safe_layer = jnp.where(in_cache, layer_ref[0], 0)
            source = partial(tokens_of, kv_ref, view, table, safe_layer)
            column = view.column(safe_layer)

            def fetch_tile(b, tile, carry):
                used, blocks = carry
                slot = slot_of(used)
                ahead = table.blocks(b, (tile + 1) * TILE)  # on its way while this tile's memory comes free

                @pl.when(used >= SLOTS)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                for c, block in enumerate(blocks):
                    entries = source(block, tile * TILE + c * table.copy_rows).at[:, pl.ds(column, LATENT + ROPE)]
                    into = k.at[slot, pl.ds(c * table.copy_rows, table.copy_rows)]
                    plgpu.copy_gmem_to_smem(entries, into, k_full.at[slot])
                return used + 1, ahead

            def leave(item):
                """Has the result of an item copied to where it belongs."""
                b, *_, piece, _ = about(item)
                turn = turn_of(item)
                plgpu.barrier_wait(done.at[turn])

                def leave_to(values_to, *rows_to):
                    plgpu.copy_smem_to_gmem(q.at[turn], values_to)
                    for n, row_to in enumerate(rows_to):
                        plgpu.copy_smem_to_gmem(stats.at[turn, n], row_to)

                @pl.when(piece < 0)
                def _():
                    leave_to(out_ref.at[b], lse_ref.at[b])

                @pl.when(piece >= 0)
                def _():
                    leave_to(part_out_ref.at[piece], part_lse_ref.at[piece], part_scale_ref.at[piece, 0])

            def fetch_queries(b, item):
                turn = turn_of(item)

                @pl.when(item - first >= TURNS)
                def _():
                    leave(item - TURNS)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                for source, into in (q_ref, q), (qr_ref, qr):
                    plgpu.copy_gmem_to_smem(source.at[b], into.at[turn], q_full.at[turn])

            def run(item, carry):
                used, blocks, (b, tile, stop, *_) = carry
                ahead = about(item + 1)
                fetch = partial(fetch_tile, b)
                carry = fetch(tile, (used, blocks))
                fetch_queries(b, item)
                next_blocks = first_blocks(ahead)  # looked up before the last item's tiles are all on their way
                used, _ = lax.fori_loop(tile + 1, stop, fetch, carry)
                return used, next_blocks, ahead

            used, *_ = lax.fori_loop(first, end, run, (jnp.int32(0), first_blocks(told), told))

            @pl.loop(jnp.maximum(used - SLOTS, 0), used)
            def _(use):
                plgpu.barrier_wait(k_free.at[slot_of(use)])  # a barrier is waited on as often as it completes

            pl.loop(jnp.maximum(end - TURNS, first), end)(leave)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def computer():
            scale = scale_ref[0] * LOG2E

            def scores(slot, turn):
                def product(acc):
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.wgmma(acc, k.at[slot, :, pl.ds(0, LATENT)], q.at[turn].transpose((1, 0)))
                    plgpu.wgmma(acc, k.at[slot, :, pl.ds(LATENT, ROPE)], qr.at[turn].transpose((1, 0)))
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((TILE, rows), jnp.float32)) * scale
                return s if logit_cap is None else capped(s, logit_cap)

            def raised(s, acc, m, total):
                """`m` above all scores `s`, and the sums for it."""
                new = jnp.maximum(m, s.max(axis=0))
                shrink = jnp.exp2(m - new)
                return acc * down(shrink, LATENT), new, total * down(shrink, TILE)

            def step(turn, b, length, clear, tile, carry):
                used, *sums = carry
                slot = slot_of(used)
                masked = tile >= clear
                s = scores(slot, turn)
                hide = partial(
                    without_hidden, table=table, b=b, first_token=tile * TILE, row0=0, length=length,
                    tokens=tokens, heads=heads, keys=0,
                )  # fmt: skip
                s = lax.cond(masked, hide, lambda s: s, s)
                above = any_positive(s - down(sums[1] + SLACK, TILE), interpret=interpret, warpgroup=True)
                acc, m, total = lax.cond(above, partial(raised, s), lambda *sums: sums, *sums)
                w = jnp.exp2(s - down(m, TILE))
                p.transpose((1, 0))[...] = w.astype(dtype)
                plgpu.commit_smem()

                @pl.when(masked)
                def _():
                    clear_values(k.at[slot], LATENT, table, b, tile * TILE, length)

                values = k.at[slot, :, pl.ds(0, LATENT)].transpose((1, 0))
                acc, _ = multiply_add(acc, values, p.transpose((1, 0)), scratch=p if interpret else None)
                plgpu.barrier_arrive(k_free.at[slot])
                return used + 1, acc, m, total + w

            def ready(turn, values, *rows_told):
                """The values, and what is one value a row, are for the copier to take away."""
                q.at[turn].transpose((1, 0))[...] = values
                for n, row in enumerate(rows_told):
                    stats[turn, n] = row
                plgpu.commit_smem()

            def run(item, carry):
                used, (b, tile, stop, length, clear, piece, _) = carry
                ahead = about(item + 1)  # on its way while this item is computed
                length, clear = (jnp.where(in_cache, x, 0) for x in (length, clear))
                turn = turn_of(item)
                plgpu.barrier_wait(q_full.at[turn])
                m = filled(COLUMN, EMPTY, rows)
                carry = used, zeros(LATENT, rows), m, zeros(TILE, rows)
                used, acc, m, total = lax.fori_loop(tile, stop, partial(step, turn, b, length, clear), carry)
                inverse, lse = ended(total.sum(axis=0), m)
                acc = acc * down(inverse, LATENT)

                @pl.when(piece < 0)
                def _():
                    ready(turn, acc.astype(dtype), lse * (1 / LOG2E))

                @pl.when(piece >= 0)
                def _():
                    tiles = [acc[at : at + TILE] for at in range(0, LATENT, TILE)]
                    # Tile by tile first, which every lane does for itself.
                    most = scale_of(reduce(jnp.maximum, [jnp.maximum(x, -x) for x in tiles]).max(axis=0))
                    values = lax.bitcast_convert_type((acc * down(1 / most, LATENT)).astype(PIECES), dtype)
                    ready(turn, values, lse, most)

                plgpu.barrier_arrive(done.at[turn])
                return used, ahead

            lax.fori_loop(first, end, run, (jnp.int32(0), told))

        lax.cond(wg == 0, computer, copier)

    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        reduction_bytes=128 * rows,  # a row in each lane of each warp, of which no two read each other's
        out_type=results(batch, rows, plan, dtype, lse=rows, pieces=rows, scales=1),
        grid=(plan.parts,),
        grid_names=("part",),
        num_threads=2,
        thread_name="wg",
        kernel_name="decode_mla",
        scratch_types={
            "q": swizzled(TURNS, rows, LATENT, dtype=dtype),
            "qr": swizzled(TURNS, rows, ROPE, dtype=dtype),
            "k": swizzled(SLOTS, TILE, LATENT + ROPE, dtype=dtype),
            "p": swizzled(rows, TILE, dtype=dtype),
            "stats": plgpu.SMEM((TURNS, 2, rows), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=TURNS),
            "done": plgpu.Barrier(num_barriers=TURNS),
            "k_full": plgpu.Barrier(num_arrivals=copies_of(pages), num_barriers=SLOTS),
            "k_free": plgpu.Barrier(num_barriers=SLOTS),
        },
    )(
        q_latent, q_pe, view.of(buffer), block_tables, jnp.reshape(layer, (1,)), jnp.reshape(scale, (1,)),
        plan.starts, plan.items, plan.cuts,
    )  # fmt: skip
