"""Ragged runs of tokens, one run a request, one after the other: which slots they are."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.addresses import slots_of


def ragged_operands(block_tables, cu_seq_lens, seq_starts, layer) -> tuple[jax.Array, ...]:
    """What kernels that gather read beside the cache: tables, running sum, first tokens, layer."""
    starts = jnp.zeros(block_tables.shape[0], jnp.int32) if seq_starts is None else seq_starts
    return block_tables, cu_seq_lens, starts, jnp.reshape(layer, (1,))


@triton.jit
def ragged_slots(token, tables, sums, starts, layer, REQUESTS: tl.constexpr, BLOCKS: tl.constexpr, PAGES: tl.constexpr):
    """Slots int32 [n] of the tokens `token` [n] of all runs together, and which of them are in the cache.

    tables [REQUESTS, BLOCKS], sums [REQUESTS + 1] and starts [REQUESTS], pointers to int32, are as `gather_mla` takes
    them.
    """
    request = tl.zeros_like(token)  # how many runs end at or before the token
    step: tl.constexpr = triton.next_power_of_2(REQUESTS)
    span = step
    for _ in tl.static_range(step.bit_length()):
        inside = request + span <= REQUESTS
        ended = tl.load(sums + tl.where(inside, request + span, 0)) <= token
        request += tl.where(inside & ended, span, 0)
        span = span // 2
    live = request < REQUESTS
    request = tl.where(live, request, 0)
    position = token - tl.load(sums + request) + tl.load(starts + request)
    column = position // PAGES.block_size
    in_table = live & (position >= 0) & (column < BLOCKS)
    block = tl.load(tables + request.to(tl.int64) * BLOCKS + column, mask=in_table, other=-1)
    # A poisoned entry of a table must not wrap round into somebody's slot.
    known = (block >= 0) & (block < PAGES.num_blocks)
    slot = tl.where(known, block, 0) * PAGES.block_size + position % PAGES.block_size
    return tl.where(known, slot, 0), known & (slot < slots_of(layer, PAGES))
