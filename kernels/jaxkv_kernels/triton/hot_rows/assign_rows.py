"""Gives a row on the device to each selected token, the rows of the least recently used tokens to those without one.

A program maps the tokens of one request.  The map (`addressing/hot_map.py`) is updated in place:

    look up the row of each token, and which token that row holds: hits and misses
    mark the rows of hits;  of equal misses, find the first
    barrier
    in the order of use, the rows without a mark are evicted, one per miss;  used rows move to the end of the order
    barrier
    each miss takes the row of its rank;  marks are removed
    barrier
    each token reads its row

What bounds it: the latency of a dozen dependent loads, stores and scans, because a request has one program.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.runtime.launch import launch

WARPS = 16


def assign_rows(maps, positions, host_slots, layer, *, hot, num_layers, num_slots):
    """Updates maps [L, B, hot.width] for positions [B, N], and returns what must be copied.

    Returns the maps, the slots [B, N] of the rows, and `sources` and `targets` [B, N]: the slots in host memory and on
    the device of tokens that are to be copied, the first ones of each row of the arrays; sources are -1 after these.
    """
    requests, count = positions.shape
    results = [jax.ShapeDtypeStruct((requests, count), jnp.int32)] * 4
    maps, slots, sources, targets, _ = launch(
        _assign_rows,
        (positions, host_slots, jnp.reshape(layer, (1,))),
        results,
        updated=maps,
        grid=(requests,),
        warps=WARPS,
        REQUESTS=requests,
        POSITIONS=hot.positions,
        ROWS=hot.rows,
        COUNT=count,
        LAYERS=num_layers,
        SLOTS=num_slots,
        TOKENS=triton.next_power_of_2(count),
        COLUMNS=triton.next_power_of_2(hot.rows),
    )
    return maps, slots, sources, targets


@triton.jit
def _assign_rows(
    positions, host_slots, layers, maps, slots, sources, targets, evicted,
    REQUESTS: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, LAYERS: tl.constexpr,
    SLOTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    layer = tl.load(layers)
    known = (layer >= 0) & (layer < LAYERS)
    of_layer = tl.where(known, layer, 0).to(tl.int64)
    place = maps + (of_layer * REQUESTS + request) * (POSITIONS + 2 * ROWS)
    held = place + POSITIONS
    order = held + ROWS
    n = tl.arange(0, TOKENS)
    here = request.to(tl.int64) * COUNT + n
    position = tl.load(positions + here, mask=n < COUNT, other=-1)
    host_slot = tl.load(host_slots + here, mask=n < COUNT, other=-1)
    end = tl.where(known, POSITIONS, 0)
    live = (position >= 0) & (position < end) & (host_slot >= 0) & (host_slot < SLOTS)
    row = tl.load(place + position, mask=live, other=0)
    hit = live & (tl.load(held + row, mask=live, other=-1) == position)
    miss = live & (hit == 0)
    j = tl.arange(0, COLUMNS)
    old = tl.load(order + j, mask=j < ROWS, other=0)
    tl.debug_barrier()
    tl.store(held + row, -2 - position, mask=hit)  # the mark
    # Among equal misses the first has the largest of these numbers, which are no rows.
    tl.atomic_max(place + position, ROWS + TOKENS - n, mask=miss, sem="relaxed")
    tl.debug_barrier()
    new = miss & (tl.load(place + position, mask=miss, other=0) == ROWS + TOKENS - n)
    rank = tl.cumsum(new.to(tl.int32), 0) - 1
    count = tl.sum(new.to(tl.int32), 0)
    holds = tl.load(held + old, mask=j < ROWS, other=0)
    marked = (j < ROWS) & (holds < -1)
    free = (j < ROWS) & (marked == 0)
    free_rank = tl.cumsum(free.to(tl.int32), 0) - 1
    leaves = free & (free_rank < count)
    kept = free & (leaves == 0)
    # In the new order, rows that are kept come first.
    before = tl.maximum(free_rank + 1 - count, 0)  # kept rows before a used one
    last = ROWS - count - tl.sum(marked.to(tl.int32), 0)
    moved = tl.where(kept, free_rank - count, last + j - before)
    tl.store(evicted + request.to(tl.int64) * COUNT + free_rank, old, mask=leaves)
    tl.debug_barrier()
    tl.store(order + moved, old, mask=j < ROWS)
    tl.store(held + old, -2 - holds, mask=marked)
    taken = tl.load(evicted + request.to(tl.int64) * COUNT + rank, mask=new, other=0)
    tl.store(held + taken, position, mask=new)
    tl.store(place + position, taken, mask=new)
    tl.store(sources + request.to(tl.int64) * COUNT + rank, host_slot, mask=new)
    tl.store(targets + request.to(tl.int64) * COUNT + rank, request * ROWS + taken, mask=new)
    tl.store(sources + here, -1, mask=(n < COUNT) & (n >= count))
    tl.store(targets + here, -1, mask=(n < COUNT) & (n >= count))
    tl.debug_barrier()
    found = tl.load(place + position, mask=live, other=0)
    tl.store(slots + here, tl.where(live, request * ROWS + found, -1), mask=n < COUNT)
