"""Gives a row on the device to each selected token, the rows of the least recently used tokens to those without one.

A program maps the tokens of one request.  The map (`addressing/hot_map.py`) is updated in place:

    look up the row of each token, and which token that row holds: hits and misses
    barrier
    mark the rows of hits;  of equal misses, find the first
    barrier
    in the order of use, the rows without a mark are evicted, one per miss
    barrier
    each miss takes the row of its rank;  used rows move to the end of the order

What bounds it: the latency of five dependent loads and two scans, because a request has one program.  What is indexed
by rows is therefore read as a whole, and elements are taken from shared memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.runtime.launch import launch

WARPS = 16


def assign_rows(maps, positions, block_tables, layer, *, hot, host_pages):
    """Updates maps [L, B, hot.width] for positions [B, N] of tokens in the blocks [B, M] of host memory.

    Returns the maps, the slots [B, N] of the rows, the numbers [B] of tokens that are to be copied, and their slots in
    host memory and on the device: `sources` and `targets` [B, N], of which only that many elements are valid.
    """
    requests, count = positions.shape

    def result(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((requests, *shape), dtype)

    marks, evicted = result(hot.rows, dtype=jnp.uint8), result(count)  # scratch memory
    maps, slots, counts, sources, targets, *_ = launch(
        _assign_rows,
        (positions, block_tables, jnp.reshape(layer, (1,))),
        (result(count), result(), result(count), result(count), marks, evicted),
        updated=maps,
        grid=(requests,),
        warps=WARPS,
        REQUESTS=requests,
        POSITIONS=hot.positions,
        ROWS=hot.rows,
        COUNT=count,
        LAYERS=host_pages.num_layers,
        BLOCKS=host_pages.num_blocks,
        BLOCK_SIZE=host_pages.block_size,
        TABLE=block_tables.shape[1],
        TOKENS=_tile(count),
        COLUMNS=_tile(hot.rows),
    )
    return maps, slots, counts, sources, targets


def _tile(count: int) -> int:
    """Elements of a tile: at least one per thread, because threads with copies would repeat what others do."""
    return max(triton.next_power_of_2(count), 32 * WARPS)


@triton.jit
def _assign_rows(
    positions, block_tables, layers, maps, slots, counts, sources, targets, marks, evicted,
    REQUESTS: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, LAYERS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TABLE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    layer = tl.load(layers)
    known = (layer >= 0) & (layer < LAYERS)
    of_layer = tl.where(known, layer, 0).to(tl.int64)
    place = maps + (of_layer * REQUESTS + request) * (POSITIONS + 2 * ROWS)
    held = place + POSITIONS
    order = held + ROWS
    marks += request.to(tl.int64) * ROWS
    # All tiles have one layout if Triton does not know this 0: then no load or store is of vectors, and no barriers
    # are needed between layouts.
    zero = tl.minimum(request, 0)
    n = tl.arange(0, TOKENS) ^ zero
    j = tl.arange(0, COLUMNS) ^ zero
    first_here = request.to(tl.int64) * COUNT
    here = first_here + n
    position = tl.load(positions + here, mask=n < COUNT, other=-1)
    holds = tl.load(held + j, mask=j < ROWS, other=-1)
    old = tl.load(order + j, mask=j < ROWS, other=0)
    tl.store(marks + j, tl.zeros_like(j).to(tl.uint8), mask=j < ROWS)
    inside = (position >= 0) & (position < tl.where(known, POSITIONS, 0))
    column = position // BLOCK_SIZE
    block = tl.load(block_tables + request.to(tl.int64) * TABLE + column, mask=inside & (column < TABLE), other=-1)
    row = tl.load(place + position, mask=inside, other=0)
    live = (block >= 0) & (block < BLOCKS)
    hit = live & (tl.gather(holds, row, 0) == position)
    miss = live & (hit == 0)
    tl.debug_barrier()
    tl.store(marks + row, tl.full(n.shape, 1, tl.uint8), mask=hit)
    # Among equal misses the first has the largest of these numbers, which are no rows.
    tl.atomic_max(place + position, ROWS + TOKENS - n, mask=miss, sem="relaxed")
    tl.debug_barrier()
    first = tl.where(miss, ROWS + TOKENS - tl.load(place + position, mask=miss, other=0), n)
    used = tl.load(marks + j, mask=j < ROWS, other=1)
    new = miss & (first == n)
    rank = tl.cumsum(new.to(tl.int32), 0) - 1
    count = tl.sum(new.to(tl.int32), 0)
    free = (j < ROWS) & (tl.gather(used, old, 0) == 0)
    free_rank = tl.cumsum(free.to(tl.int32), 0) - 1
    free_count = tl.sum(free.to(tl.int32), 0)
    leaves = free & (free_rank < count)
    tl.store(evicted + first_here + free_rank, old, mask=leaves)
    tl.debug_barrier()
    taken = tl.load(evicted + first_here + rank, mask=new, other=0)
    tl.store(sources + first_here + rank, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=new)
    tl.store(targets + first_here + rank, request * ROWS + taken, mask=new)
    tl.store(counts + request, count)
    tl.store(held + taken, position, mask=new)
    tl.store(place + position, taken, mask=new)
    # In the new order, rows that are kept come first.
    before = tl.maximum(free_rank + 1 - count, 0)  # kept rows before a used one
    moved = tl.where(free & (leaves == 0), free_rank - count, free_count - count + j - before)
    tl.store(order + moved, old, mask=j < ROWS)
    found = tl.where(hit, row, tl.gather(taken, first, 0))
    tl.store(slots + here, tl.where(live, request * ROWS + found, -1), mask=n < COUNT)
