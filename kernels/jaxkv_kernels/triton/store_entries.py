"""Stores plain entries at slots of a layer, in place, from arrays of their parts.

Who does what.  A program has ROWS consecutive rows, a row being a token's part of one head: it reads their slots, then
moves one part after the other in pieces of up to COLUMNS values, converted on the way.
Order.  None: no two programs write the same bytes, unless a slot is given twice.
Budget.  Registers: ROWS x COLUMNS values, 16 a thread; no shared memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.addresses import in_bytes, page_address, slots_of
from jaxkv_kernels.triton.arithmetic import rounded
from jaxkv_kernels.triton.launch import launch
from jaxkv_kernels.triton.types import element_type

ROWS, WARPS = 4, 4


@partial(jax.jit, static_argnames=("pages", "entry"))
def store_entries(buffer, parts, slots, layer, *, pages, entry):
    """The buffer with parts [T, (H,) n_i] side by side at slots [T] of a layer; slots outside the cache are skipped."""
    if not slots.size:
        return buffer
    rows = slots.size * pages.num_heads
    first, second = parts
    constants = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZES": entry.sizes,
        "DTYPE": element_type(entry.dtype),
        "COUNT": rows,
        "ROWS": ROWS,
        "COLUMNS": min(triton.next_power_of_2(max(entry.sizes)), 512),
    }
    grid = (triton.cdiv(rows, ROWS),)
    operands = (first, second, slots, jnp.reshape(layer, (1,)))
    return launch(_store_entries, operands, updated=buffer, grid=grid, warps=WARPS, **constants)[0]


@triton.jit
def _store_entries(
    first, second, slots, layers, buffer,
    PAGES: tl.constexpr, SIZES: tl.constexpr, DTYPE: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    layer = tl.load(layers)
    slot = tl.load(slots + row // PAGES.num_heads, mask=row < COUNT, other=-1)
    keep = (slot >= 0) & (slot < slots_of(layer, PAGES))
    page = page_address(buffer, layer, slot // PAGES.block_size, row % PAGES.num_heads, PAGES)
    place = (page + (slot % PAGES.block_size).to(tl.int64) * PAGES.token_stride).to(tl.pointer_type(DTYPE))
    _store_part(first, row, place, keep, SIZES[0], COLUMNS)
    _store_part(second, row, place + SIZES[0], keep, SIZES[1], COLUMNS)


@triton.jit
def _store_part(part, row, place, keep, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows `row` of `part` [rows, SIZE] to the pointers `place` where `keep` holds."""
    source = part + row.to(tl.int64) * SIZE
    for begin in range(0, SIZE, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        mask = keep[:, None] & (column < SIZE)
        values = tl.load(source[:, None] + column, mask=mask)
        tl.store(place[:, None] + column, rounded(values, place.dtype.element_ty), mask=mask)
