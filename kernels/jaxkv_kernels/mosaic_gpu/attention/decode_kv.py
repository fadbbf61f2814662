"""Grouped-query and multi-head decode in bf16 or f16, on sm_90.

Work.  A tile is 64 rows by 64 keys; the rows of one KV head of a request are its query tokens x query heads.  A CTA
owns one KV head and 64 rows, and walks its part of the plan: requests, and of each the pairs of key tiles from its
begin to its end.  Where there are fewer rows the tile stays partly empty: reading keys and values takes three times as
long as multiplying full tiles.  CTAs of neighbouring heads are neighbours: where the heads of a token lie side by side,
so do their reads.

Who does what: two computing warpgroups and one that copies.

    copier       Q of the request; for each pair its two tiles of keys and values, one copy for both and for each page
    warpgroup w  tile w of each pair: S = Q K'; softmax; O += P V, with a running maximum, sum and O of its own

At the end of a request, warpgroup 1 hands its maximum, sum and O over through shared memory; warpgroup 0 merges them
with its own and stores the result.  Between tiles the two exchange nothing.  With a window, requests begin at the tile
that holds the first key in sight.

Barriers.  q_full/q_free[slot]: Q has landed / both warpgroups have multiplied with it for the last time.
kv_full/kv_free[slot]: a tile has landed / was used; each warpgroup has a ring of slots of its own.  handed/taken:
warpgroup 1's share is in `merged` and `stats` / what was made of the one before has left them.

Budget, for heads of 128 + 128 values.  Shared memory: rings 128 KiB (2 x 2 slots) + Q 32 KiB (2 slots) + `merged`
32 KiB + stats 1 KiB = 193 KiB of 227.  Registers: O 64 + S 32 + P 16 of 232 a lane to compute, 40 to copy (16 of them
blocks, where pages are of 16 tokens): the 504 that a kernel of three warpgroups starts with (were they more, it would
wait for ever).  The slot index of shared-memory operands comes from the loop variable so that the compiler cannot know
it: constant ones have their wgmma descriptors hoisted out of the loop and spilled.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.attending import tokens_of, without_hidden
from jaxkv_kernels.mosaic_gpu.attention.combine import combine
from jaxkv_kernels.mosaic_gpu.attention.page_table import TILE, PageTable, copies_of
from jaxkv_kernels.mosaic_gpu.attention.plan_decode import PAIR, Plan, begun, described, plan_decode
from jaxkv_kernels.mosaic_gpu.attention.token_rows import divided, token_rows
from jaxkv_kernels.mosaic_gpu.runtime.build import (
    EMPTY,
    LOG2E,
    ROW,
    SHARED_MEMORY,
    WGMMA,
    across,
    capped,
    kernel,
    launch_next,
    multiply_add,
    row_of,
    swizzled,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting


def decode_kv(
    q, buffer, block_tables, seq_lens, layer, scale, k_scale, v_scale, plan, *, pages, entry, logit_cap, window
):
    """Q [B, Q, Hq, D] to out [B, Q, Hq, Dv] and float32 lse [B, Q, Hq]; query head i reads KV head i // (Hq / H)."""
    del k_scale, v_scale
    if plan is None:
        _, tokens, heads, _ = q.shape
        plan = plan_decode(
            buffer, block_tables, seq_lens,
            pages=pages, entry=entry, heads=heads, tokens=tokens, window=window, batch_invariant=False,
        )  # fmt: skip
    return _decode(
        q, buffer, block_tables, layer, scale, plan,
        pages=pages, entry=entry, logit_cap=logit_cap, window=window, interpret=bool(interpreting.value),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window", "interpret"))
def _decode(q, buffer, block_tables, layer, scale, plan, *, pages, entry, logit_cap, window, interpret):
    batch, tokens, query_heads, _ = q.shape
    heads, group = pages.num_heads, query_heads // pages.num_heads
    rows = tokens * group
    tiles = -(-rows // TILE)
    # TMA copies tiles of 8 rows, and clips them where an axis is shorter than one.
    padded = rows if rows <= 8 else rows + -rows % (8 if tiles == 1 else TILE)
    q = q.reshape(batch, tokens, heads, group, -1).swapaxes(1, 2).reshape(batch, heads, rows, -1)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    out, lse, part_out, part_lse = _attend(
        q, buffer, block_tables, layer, scale, plan,
        tokens=tokens, group=group, tiles=tiles, pages=pages, entry=entry, logit_cap=logit_cap, window=window,
        interpret=interpret,
    )  # fmt: skip
    out, part_out = (x.reshape(x.shape[0], heads * padded, -1) for x in (out, part_out))
    lse, part_lse = (x.reshape(x.shape[0], heads * padded) for x in (lse, part_lse))
    out, lse = combine(out, lse, part_out, part_lse, None, plan, rows=heads * padded, interpret=interpret)

    def by_token(x):
        x = x.reshape(batch, heads, padded, -1)[:, :, :rows].reshape(batch, heads, tokens, group, -1)
        return x.swapaxes(1, 2).reshape(batch, tokens, query_heads, -1)

    return by_token(out)[..., : entry.value_dim].astype(q.dtype), by_token(lse)[..., 0]


def _slots(head_dim: int, value_dim: int, itemsize: int) -> tuple[int, int]:
    """How many tiles of each warpgroup's keys and values, and how many of Q, shared memory holds beside the rest."""
    room = SHARED_MEMORY - TILE * value_dim * 4 - 2 * 1024  # `merged`; stats and barriers
    queries, tiles = TILE * head_dim * itemsize, 2 * TILE * (head_dim + value_dim) * itemsize
    ring = min((room - queries) // tiles, 4)
    return ring, min((room - ring * tiles) // queries, 2)


def _attend(
    q, buffer, block_tables, layer, scale, plan: Plan,
    *, tokens, group, tiles, pages, entry, logit_cap, window, interpret
):  # fmt: skip
    """Results of whole requests, and of the pieces of those that were cut: float32 [..., KV head and row, ...]."""
    batch, heads, padded, head_dim = q.shape
    value_dim, dtype = entry.value_dim, q.dtype
    columns = value_dim + -value_dim % 128  # the combining kernel's lanes take a row in whole
    stored = min(padded + -padded % 8, TILE)  # rows of a tile that are stored, those that are clipped included
    view = token_rows(pages)
    ring, q_slots = _slots(head_dim, value_dim, dtype.itemsize)

    def body(
        q_ref, kv_ref, table_ref, layer_ref, scale_ref, start_ref, item_ref, cut_ref,
        out_ref, lse_ref, part_out_ref, part_lse_ref,
        q, kv, merged, stats, q_full, q_free, kv_full, kv_free, handed, taken, operands: Any = None
    ):  # fmt: skip
        launch_next(cut_ref, interpret=interpret)
        part, group_tile, wg = (lax.axis_index(axis) for axis in ("part", "tile", "wg"))
        head, row0 = divided(group_tile, tiles), lax.rem(group_tile, jnp.int32(tiles)) * TILE
        table = PageTable(table_ref, pages)
        in_cache = (layer_ref[0] >= 0) & (layer_ref[0] < pages.num_layers)
        rows = pl.ds(pl.multiple_of(row0, 8), TILE)
        about = partial(described, item_ref)

        def stop_of(side, stop, seen):
            """Where this side's tiles stop: the last pair of a request may lack its second."""
            return stop if side == 0 else jnp.minimum(stop, divided(seen + (PAIR - 1 - TILE), PAIR))

        @pl.when(wg == 2)
        def _copier():
            plgpu.set_max_registers(40, action="decrease")
            first_item, end, told = begun(start_ref, part)
            safe_layer = jnp.where(in_cache, layer_ref[0], 0)
            column = view.column(safe_layer, head)
            source = partial(tokens_of, kv_ref, view, table, safe_layer, head=head)

            def fetch(blocks, first_token, side, n):
                """Keys and values of a tile, this side's n-th."""
                slot = 2 * lax.rem(n, jnp.int32(ring)) + side

                @pl.when(n >= ring)
                def _():
                    plgpu.barrier_wait(kv_free.at[slot])

                for c, block in enumerate(blocks):
                    entries = source(block, first_token + c * table.copy_rows).at[:, pl.ds(column, pages.width)]
                    into = kv.at[slot, pl.ds(c * table.copy_rows, table.copy_rows)]
                    plgpu.copy_gmem_to_smem(entries, into, kv_full.at[slot])

            def run(item, carry):
                counts, (b, begin, stop, seen, _, _, origin) = carry
                upcoming = about(item + 1)  # on its way
                n = item - first_item
                slot = lax.rem(n, jnp.int32(q_slots))

                @pl.when(n >= q_slots)
                def _():
                    plgpu.barrier_wait(q_free.at[slot])

                plgpu.copy_gmem_to_smem(q_ref.at[b, head, rows], q.at[slot], q_full.at[slot])
                stops = [stop_of(side, stop, seen) for side in range(2)]

                def token_of(i, side):
                    return origin + i * PAIR + side * TILE

                def pair(i, carry):
                    counts, blocks = carry
                    ahead = tuple(table.blocks(b, token_of(i + 1, side)) for side in range(2))  # on their way
                    fetch(blocks[0], token_of(i, 0), 0, counts[0])

                    @pl.when(i < stops[1])
                    def _():
                        fetch(blocks[1], token_of(i, 1), 1, counts[1])

                    return (counts[0] + 1, counts[1] + (i < stops[1]).astype(jnp.int32)), ahead

                blocks = tuple(table.blocks(b, token_of(begin, side)) for side in range(2))
                return lax.fori_loop(begin, stop, pair, (counts, blocks))[0], upcoming

            start = (jnp.int32(0), jnp.int32(0)), told
            counts, _ = lax.fori_loop(first_item, end, run, start)
            # Wait for the last use of everything.
            for slot in range(q_slots):

                @pl.when(end - first_item > slot)
                def _(slot=slot):
                    plgpu.barrier_wait(q_free.at[slot])

            for side in range(2):
                for slot in range(ring):

                    @pl.when(counts[side] > slot)
                    def _(slot=2 * slot + side):
                        plgpu.barrier_wait(kv_free.at[slot])

        def consumer(side):
            scratch = operands.at[side] if interpret else None
            plgpu.set_max_registers(232, action="increase")
            first_item, end, told = begun(start_ref, part)
            scale = scale_ref[0] * LOG2E

            def run(item, carry):
                used, (b, begin, stop, seen, clear, piece, origin) = carry
                upcoming = about(item + 1)
                stop = stop_of(side, stop, seen)
                length, clear = jnp.where(in_cache, origin + seen, 0), jnp.where(in_cache, clear, 0)
                n = item - first_item
                q_slot = lax.rem(n, jnp.int32(q_slots))

                def hide(i, s):
                    first_token = origin + i * PAIR + side * TILE
                    return without_hidden(
                        s, table, b, first_token, row0, length, tokens=tokens, heads=group, keys=1, window=window
                    )

                def scores(i, slot, z, masked):
                    def product(acc):
                        plgpu.barrier_wait(kv_full.at[slot])
                        plgpu.wgmma(acc, q.at[q_slot + z], kv.at[slot, :, pl.ds(0, head_dim)].transpose((1, 0)))
                        return acc[...]

                    s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * scale
                    if logit_cap is not None:
                        s = capped(s, logit_cap)
                    # Also keeps the product with the scale from being fused with the subtraction of the maximum: the
                    # largest score less itself would not be 0, and far from it where scores are huge.
                    return lax.cond(masked, partial(hide, i), lambda s: s, s)

                def clear_values(i, slot):
                    """Zeroes the values of tokens that no row sees: 0 x NaN is NaN."""
                    first_token = origin + i * PAIR + side * TILE
                    token = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + first_token
                    for c in range(value_dim // TILE):
                        piece = kv.at[slot, :, pl.ds(head_dim + c * TILE, TILE)]
                        values = jnp.where(token < length, plgpu.load(piece, layout=WGMMA), jnp.zeros((), dtype))
                        if window is not None:
                            values = jnp.where(token > length - tokens - window, values, jnp.zeros((), dtype))
                        piece[...] = table.without_unknown(b, first_token, token, values, 0)
                    plgpu.commit_smem()

                def tile(i, carry):
                    acc, m, total = carry
                    masked = (i < low) | (i >= clear)
                    z = divided(i, 1 << 20)  # 0, but the compiler does not know
                    slot = 2 * (lax.rem(used + i - begin, jnp.int32(ring)) + z) + side
                    s = scores(i, slot, z, masked)
                    new = jnp.maximum(m, s.max(axis=1))
                    shrink = jnp.exp2(m - new)
                    w = jnp.exp2(s - across(new, TILE))
                    total = total * shrink + w.sum(axis=1)
                    acc = acc * across(shrink, value_dim)
                    pl.when(masked)(partial(clear_values, i, slot))
                    values = kv.at[slot, :, pl.ds(head_dim, value_dim)]
                    acc, _ = multiply_add(acc, w.astype(dtype), values, scratch=scratch)
                    plgpu.barrier_arrive(kv_free.at[slot])
                    return acc, new, total

                clear = jnp.clip(clear, begin, jnp.maximum(stop, begin))
                low = begin
                if window is not None:  # up to `low` some row's window begins after the pair does
                    low = jnp.clip(divided(jnp.maximum(seen - window, 0) + (PAIR - 1), PAIR), begin, clear)
                carry = zeros(TILE, value_dim), row_of(TILE, EMPTY), row_of(TILE, 0.0)
                plgpu.barrier_wait(q_full.at[q_slot])
                acc, m, total = lax.fori_loop(begin, stop, tile, carry)
                plgpu.barrier_arrive(q_free.at[q_slot])

                if side == 1:

                    @pl.when(n > 0)
                    def _():
                        plgpu.barrier_wait(taken)

                    stats[0], stats[1] = m, total
                    merged[...] = acc
                    plgpu.barrier_arrive(handed)
                else:

                    @pl.when(n > 0)
                    def _():
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.barrier_arrive(taken)

                    plgpu.barrier_wait(handed)
                    other, other_total = plgpu.load(stats.at[0], layout=ROW), plgpu.load(stats.at[1], layout=ROW)
                    top = jnp.maximum(m, other)
                    mine, theirs = jnp.exp2(m - top), jnp.exp2(other - top)
                    total = total * mine + other_total * theirs
                    empty = total == 0
                    total = jnp.where(empty, 1.0, total)
                    lse = jnp.where(empty, -jnp.inf, top + jnp.log2(total))
                    total = 1 / total
                    acc = acc * across(mine * total, value_dim)
                    acc = acc + plgpu.load(merged, layout=WGMMA) * across(theirs * total, value_dim)
                    merged[...] = acc
                    stats[2] = lse * jnp.where(piece < 0, 1 / LOG2E, 1.0)
                    plgpu.commit_smem()

                    def store(to, lse_to, place):
                        into = to.at[place, head, pl.ds(rows.start, stored), pl.ds(0, value_dim)]
                        plgpu.copy_smem_to_gmem(merged.at[pl.ds(0, stored)], into)
                        if padded % 8:  # too short for a copy of whole 16 bytes
                            for row in range(padded):
                                lse_to[place, head, row] = stats[2, row]
                        else:
                            into = lse_to.at[place, head, pl.ds(rows.start, stored)]
                            plgpu.copy_smem_to_gmem(stats.at[2, pl.ds(0, stored)], into)

                    pl.when(piece < 0)(lambda: store(out_ref, lse_ref, b))
                    pl.when(piece >= 0)(lambda: store(part_out_ref, part_lse_ref, piece))
                return used + jnp.maximum(stop - begin, 0), upcoming

            lax.fori_loop(first_item, end, run, (jnp.int32(0), told))
            if side == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(wg == 0)(partial(consumer, 0))
        pl.when(wg == 1)(partial(consumer, 1))

    float32 = jnp.float32
    return kernel(
        body,
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, padded, columns), float32),
            jax.ShapeDtypeStruct((batch, heads, padded), float32),
            jax.ShapeDtypeStruct((plan.pieces, heads, padded, columns), float32),
            jax.ShapeDtypeStruct((plan.pieces, heads, padded), float32),
        ),
        grid=(plan.parts, heads * tiles),
        grid_names=("part", "tile"),
        num_threads=3,
        thread_name="wg",
        scratch_types={
            "q": swizzled(q_slots, TILE, head_dim, dtype=dtype),
            "kv": swizzled(2 * ring, TILE, pages.width, dtype=dtype),
            "merged": swizzled(TILE, value_dim, dtype=float32),
            "stats": plgpu.SMEM((3, TILE), float32),
            "q_full": plgpu.Barrier(num_barriers=q_slots),
            "q_free": plgpu.Barrier(num_arrivals=2, num_barriers=q_slots),
            "kv_full": plgpu.Barrier(num_arrivals=copies_of(pages), num_barriers=2 * ring),
            "kv_free": plgpu.Barrier(num_barriers=2 * ring),
            "handed": plgpu.Barrier(),
            "taken": plgpu.Barrier(),
            # Register operands of wgmma where the interpreter wants them: in shared memory.
            **({"operands": swizzled(2, TILE, TILE, dtype=dtype)} if interpret else {}),
        },
    )(
        q, view.of(buffer), block_tables, jnp.reshape(layer, (1,)), jnp.reshape(scale, (1,)),
        plan.starts, plan.items, plan.cuts,
    )  # fmt: skip
