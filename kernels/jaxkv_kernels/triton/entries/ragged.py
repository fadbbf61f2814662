"""The slots of ragged runs of tokens: one run per request, concatenated."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.entries.addresses import slots_of


def ragged_operands(block_tables, cu_seq_lens, seq_starts, layer) -> tuple[jax.Array, ...]:
    """The operands of gather kernels besides the buffer: tables, cumulative lengths, first tokens, layer."""
    starts = cu_seq_lens if seq_starts is None else seq_starts  # a placeholder, not read
    return block_tables, cu_seq_lens, starts, jnp.reshape(layer, (1,))


def ragged_constants(block_tables, seq_starts) -> dict[str, Any]:
    """The constant RUNS: number of requests, blocks per table, and whether first tokens are given."""
    return {"RUNS": (*block_tables.shape, seq_starts is not None)}


@triton.jit
def ragged_slots(token, tables, sums, starts, layer, RUNS: tl.constexpr, PAGES: tl.constexpr):
    """Slots, int32 [n], of tokens with index `token` [n] in all runs together, and whether each is in the cache.

    `tables`, `sums`, `starts` and RUNS are those of `ragged_operands` and `ragged_constants`.
    """
    REQUESTS: tl.constexpr = RUNS[0]
    request = tl.zeros_like(token)  # the number of runs that end at or before the token
    span: tl.constexpr = triton.next_power_of_2(REQUESTS)
    for i in tl.static_range(span.bit_length()):
        ahead = request + (span >> i)
        ended = tl.load(sums + tl.minimum(ahead, REQUESTS)) <= token
        request = tl.where((ahead <= REQUESTS) & ended, ahead, request)
    live = request < REQUESTS
    request = tl.where(live, request, 0)
    position = token - tl.load(sums + request)
    if RUNS[2]:
        position += tl.load(starts + request)
    column = position // PAGES.block_size
    in_table = live & (position >= 0) & (column < RUNS[1])
    block = tl.load(tables + request.to(tl.int64) * RUNS[1] + column, mask=in_table, other=-1)
    # The slot of an invalid table entry must not overflow to a valid one.
    known = (block >= 0) & (block < PAGES.num_blocks)
    slot = tl.where(known, block * PAGES.block_size + position % PAGES.block_size, 0)
    return slot, known & (slot < slots_of(layer, PAGES))
