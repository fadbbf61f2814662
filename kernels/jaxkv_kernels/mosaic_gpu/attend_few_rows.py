"""Dense MLA decode for few rows (query tokens x heads of a request), with the operands of the products swapped."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.build import (
    COLUMN,
    EMPTY,
    LOG2E,
    MASKED,
    SHARED_MEMORY,
    WGMMA,
    any_positive,
    capped,
    kernel,
    multiply_add,
    swizzled,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.limits import LATENT, ROPE
from jaxkv_kernels.mosaic_gpu.page_table import TILE, PageTable, copies_of
from jaxkv_kernels.mosaic_gpu.plan_decode import Plan, begun, described
from jaxkv_kernels.mosaic_gpu.token_rows import divided, token_rows

PIECES, FINITE = jnp.float16, 1e37
SLACK = 8
PART = 192
PARTS = (LATENT + ROPE) // PART
WIDTHS = [min(PART, LATENT - n * PART) for n in range(PARTS)]
"""Columns of a part of a tile, parts of a tile, and how many columns of each are values."""


def attend_few_rows(
    q_latent, q_pe, buffer, block_tables, layer, scale, plan: Plan, *, tokens, heads, pages, logit_cap, interpret
):
    """Results of whole requests, and of the pieces of those that were cut."""
    batch, rows, _ = q_latent.shape
    view = token_rows(pages)
    dtype = q_latent.dtype
    copies = copies_of(pages)
    reduction = rows // 8 * 1024
    fixed = 2 * rows * (LATENT + ROPE) * 2 + rows * TILE * 2 + reduction + 2048
    slots = (SHARED_MEMORY - fixed) // (TILE * PART * 2)

    def body(
        q_ref, qr_ref, kv_ref, table_ref, layer_ref, scale_ref, start_ref, item_ref,
        out_ref, lse_ref, part_out_ref, part_lse_ref, part_scale_ref,
        q, qr, k, p, stats, q_full, q_free, k_full, k_free
    ):  # fmt: skip
        part, wg = (lax.axis_index(axis) for axis in ("part", "wg"))
        in_cache = (layer_ref[0] >= 0) & (layer_ref[0] < pages.num_layers)
        table = PageTable(table_ref, pages)
        about = partial(described, item_ref)
        first, end, told = begun(start_ref, part)

        def slot_of(used):
            return lax.rem(used, jnp.int32(slots))

        @pl.when(wg == 1)
        def _copier():
            safe_layer = jnp.where(in_cache, layer_ref[0], 0)

            def tokens_of(block, first_token):
                """Where the entries of a copy's tokens lie."""
                in_block = lax.rem(first_token, jnp.int32(pages.block_size))
                block = jnp.where(table.known(block), block, 0)
                index, row = view.index(safe_layer, block, in_block)
                return kv_ref.at[index, pl.ds(row, table.copy_rows)]

            def fetch(blocks, i, n, used):
                slot = slot_of(used)

                @pl.when(used >= slots)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                column = view.column(safe_layer) + n * PART
                for c, block in enumerate(blocks):
                    source = tokens_of(block, i * TILE + c * table.copy_rows)
                    into = pl.ds(c * table.copy_rows, table.copy_rows)
                    plgpu.copy_gmem_to_smem(
                        source.at[:, pl.ds(column, PART)], k.at[slot, into], k_full.at[slot]
                    )

            def first_blocks(told):
                """The blocks of an item's first tile."""
                return table.blocks(told[0], told[1] * TILE)

            def run(item, carry):
                used, told, blocks = carry
                ahead = about(item + 1)
                b, tile, stop, *_ = told
                turn = lax.rem(item - first, jnp.int32(2))

                @pl.when(item - first >= 2)
                def _():
                    plgpu.barrier_wait(q_free.at[turn])

                plgpu.copy_gmem_to_smem(q_ref.at[b], q.at[turn], q_full.at[turn])
                plgpu.copy_gmem_to_smem(qr_ref.at[b], qr.at[turn], q_full.at[turn])

                def fetch_tile(i, carry):
                    used, blocks = carry
                    ahead = table.blocks(b, (i + 1) * TILE)  # on its way while this tile's memory comes free
                    for n in range(PARTS):
                        fetch(blocks, i, n, used + n)
                    return used + PARTS, ahead

                carry = fetch_tile(tile, (used, blocks))
                next_blocks = first_blocks(ahead)
                used, _ = lax.fori_loop(tile + 1, stop, fetch_tile, carry)
                return used, ahead, next_blocks

            used, *_ = lax.fori_loop(first, end, run, (jnp.int32(0), told, first_blocks(told)))

            # A barrier is to be waited on as often as it completes.
            def drain(used, carry):
                plgpu.barrier_wait(k_free.at[slot_of(used)])
                return carry

            lax.fori_loop(jnp.maximum(used - slots, 0), used, drain, 0)
            lax.fori_loop(
                jnp.maximum(end - 2, first), end,
                lambda item, c: (plgpu.barrier_wait(q_free.at[lax.rem(item - first, jnp.int32(2))]), c)[1], 0,
            )

        @pl.when(wg == 0)
        def _computer():
            scratch = p if interpret else None
            scale = scale_ref[0] * LOG2E

            def down(row, shape):
                return lax.broadcast_in_dim(row, shape, [1])

            def column_of(value):
                return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), COLUMN)

            def run(item, carry):
                used, told = carry
                ahead = about(item + 1)
                b, tile, stop, length, clear, piece, _ = told
                length, clear = (jnp.where(in_cache, x, 0) for x in (length, clear))
                turn = lax.rem(item - first, jnp.int32(2))
                plgpu.barrier_wait(q_full.at[turn])

                def scores(i, used, masked):
                    def product(acc):
                        for n in range(PARTS):
                            slot = slot_of(used + n)
                            plgpu.barrier_wait(k_full.at[slot])
                            width = WIDTHS[n]
                            plgpu.wgmma(
                                acc, k.at[slot, :, pl.ds(0, width)],
                                q.at[turn, :, pl.ds(n * PART, width)].transpose((1, 0)),
                            )
                        plgpu.wgmma(acc, k.at[slot, :, pl.ds(width, ROPE)], qr.at[turn].transpose((1, 0)))
                        return acc[...]

                    s = pl.run_scoped(product, plgpu.ACC((TILE, rows), jnp.float32)) * scale
                    if logit_cap is not None:
                        s = capped(s, logit_cap)

                    def mask(s):
                        token = plgpu.broadcasted_iota(jnp.int32, (TILE, rows), 0, layout=WGMMA) + i * TILE
                        row = plgpu.broadcasted_iota(jnp.int32, (TILE, rows), 1, layout=WGMMA)
                        s = jnp.where(token <= length - tokens + row // heads, s, MASKED)
                        return table.without_unknown(b, i * TILE, token, s, MASKED)

                    return lax.cond(masked, mask, lambda s: s, s)

                def clear_values(i, used):
                    token = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + i * TILE

                    def clear(c, carry):
                        slot = slot_of(used + divided(c, PART // TILE))
                        column = lax.rem(c, jnp.int32(PART // TILE)) * TILE
                        piece = k.at[slot, :, pl.ds(pl.multiple_of(column, TILE), TILE)]
                        values = jnp.where(token < length, plgpu.load(piece, layout=WGMMA), jnp.zeros((), dtype))
                        piece[...] = table.without_unknown(b, i * TILE, token, values, 0)
                        return carry

                    lax.fori_loop(0, LATENT // TILE, clear, 0)

                def step(i, carry):
                    used, acc, m, total = carry
                    masked = i >= clear
                    s = scores(i, used, masked)

                    def raised():
                        new = jnp.maximum(m, s.max(axis=0))
                        shrink = jnp.exp2(m - new)
                        return (
                            tuple(a * down(shrink, a.shape) for a in acc), new, total * down(shrink, total.shape)
                        )

                    above = s - down(m + SLACK, s.shape)
                    acc, m, total = lax.cond(
                        any_positive(above, interpret=interpret, warpgroup=True), raised, lambda: (acc, m, total)
                    )
                    w = jnp.exp2(s - down(m, s.shape))
                    total = total + w
                    p.transpose((1, 0))[...] = w.astype(dtype)
                    pl.when(masked)(partial(clear_values, i, used))
                    plgpu.commit_smem()
                    done = []
                    for n, width in enumerate(WIDTHS):
                        slot = slot_of(used + n)
                        values = k.at[slot, :, pl.ds(0, width)].transpose((1, 0))
                        done.append(multiply_add(acc[n], values, p.transpose((1, 0)), scratch=scratch)[0])
                        plgpu.barrier_arrive(k_free.at[slot])
                    return used + PARTS, tuple(done), m, total

                acc = tuple(zeros(width, rows) for width in WIDTHS)
                carry = used, acc, column_of(EMPTY), zeros(TILE, rows)
                used, acc, m, total = lax.fori_loop(tile, stop, step, carry)

                total = total.sum(axis=0)
                empty = total == 0
                inverse = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, total))
                acc = tuple(a * down(inverse, a.shape) for a in acc)
                lse = jnp.where(empty, -jnp.inf, m + jnp.log2(jnp.where(empty, 1.0, total)))

                def store(values, to, told, place):
                    for n, (width, part) in enumerate(zip(WIDTHS, values, strict=True)):
                        q.at[turn, :, pl.ds(n * PART, width)].transpose((1, 0))[...] = part
                    for slot, (row, _) in enumerate(told):
                        stats[slot] = row
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(q.at[turn], to.at[place])
                    for slot, (_, row_to) in enumerate(told):
                        plgpu.copy_smem_to_gmem(stats.at[slot], row_to.at[place])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(piece < 0)
                def _():
                    store([a.astype(dtype) for a in acc], out_ref, [(lse * (1 / LOG2E), lse_ref)], b)

                @pl.when(piece >= 0)
                def _():
                    blocks = [a[i : i + TILE] for a in acc for i in range(0, a.shape[0], TILE)]
                    most = reduce(jnp.maximum, [jnp.maximum(a, -a) for a in blocks]).max(axis=0)
                    # Rows with infinities or NaN stay as they are.
                    most = jnp.where(most < FINITE, jnp.maximum(most, 1 / FINITE), 1.0)
                    values = [(a * down(1 / most, a.shape)).astype(PIECES) for a in acc]
                    values = [lax.bitcast_convert_type(v, dtype) for v in values]
                    store(values, part_out_ref, [(lse, part_lse_ref), (most, part_scale_ref)], piece)

                plgpu.barrier_arrive(q_free.at[turn])
                return used, ahead

            lax.fori_loop(first, end, run, (jnp.int32(0), told))

    float32 = jnp.float32
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        reduction_bytes=reduction,
        out_type=(
            jax.ShapeDtypeStruct((batch, rows, LATENT), dtype),
            jax.ShapeDtypeStruct((batch, rows), float32),
            jax.ShapeDtypeStruct((plan.pieces, rows, LATENT), dtype),
            jax.ShapeDtypeStruct((plan.pieces, rows), float32),
            jax.ShapeDtypeStruct((plan.pieces, rows), float32),
        ),
        grid=(plan.parts,),
        grid_names=("part",),
        num_threads=2,
        thread_name="wg",
        kernel_name="decode_mla",
        scratch_types={
            "q": swizzled(2, rows, LATENT, dtype=dtype),
            "qr": swizzled(2, rows, ROPE, dtype=dtype),
            "k": swizzled(slots, TILE, PART, dtype=dtype),
            "p": swizzled(rows, TILE, dtype=dtype),
            "stats": plgpu.SMEM((2, rows), float32),
            "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "q_free": plgpu.Barrier(num_barriers=2),
            "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            "k_free": plgpu.Barrier(num_barriers=slots),
        },
    )(
        q_latent, q_pe, view.of(buffer), block_tables, jnp.reshape(layer, (1,)), jnp.reshape(scale, (1,)),
        plan.starts, plan.items,
    )  # fmt: skip
