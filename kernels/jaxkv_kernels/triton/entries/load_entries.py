"""Reads plain and e4m3 entries of ragged runs of tokens.

A program writes consecutive rows of the results; a row is one head of one token.  It finds the requests of its tokens
by binary search and their slots in the tables, loads, decodes and stores.

What bounds it: memory bandwidth.  A tile of 2,048 values and one of the other part take slightly more than 16 registers
per thread.  e4m3 values move through 2 KiB of shared memory to the threads that store them.
"""

from functools import partial

import jax
import triton
import triton.language as tl

from jaxkv_kernels.triton.codecs.e4m3 import from_e4m3, load_scales
from jaxkv_kernels.triton.entries.addresses import token_address
from jaxkv_kernels.triton.entries.ragged import ragged_constants, ragged_operands, ragged_slots
from jaxkv_kernels.triton.entries.tiles import WARPS, load_pieces, store_rows
from jaxkv_kernels.triton.entries.two_parts import two_parts
from jaxkv_kernels.triton.runtime.arithmetic import rounded
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def load_entries(
    buffer, block_tables, cu_seq_lens, seq_starts, layer, scales=(), *, pages, entry, total, dtype
) -> list[jax.Array]:
    """Returns parts [total, H, n_i] of `dtype` for the tokens of ragged runs; rows without a token are 0.

    `scales`, for e4m3 entries, has a float32 scalar or [H] for each part: value = stored * scale.
    """
    rows = total * pages.num_heads
    scales, constants = two_parts(entry, pages, buffer.dtype.itemsize, rows, scales)
    constants |= ragged_constants(block_tables, seq_starts)
    operands = (buffer, *scales, *ragged_operands(block_tables, cu_seq_lens, seq_starts, layer))
    # At least one value, because an array without values has no memory to point to.
    results = [jax.ShapeDtypeStruct((total, pages.num_heads, max(size, 1)), dtype) for size in constants["SIZES"]]
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    found = launch(_load_entries, operands, results, grid=grid, warps=WARPS, **constants)
    return list(found[: len(entry.sizes)])


@triton.jit
def _load_entries(
    buffer, first_scale, second_scale, tables, sums, starts, layers, first, second,
    PAGES: tl.constexpr, SIZES: tl.constexpr, SECOND: tl.constexpr, DTYPE: tl.constexpr, SCALE_STEPS: tl.constexpr,
    RUNS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = row % PAGES.num_heads
    layer = tl.load(layers)
    scales = load_scales(first_scale, second_scale, head, SCALE_STEPS)
    slot, known = ragged_slots(row // PAGES.num_heads, tables, sums, starts, layer, RUNS, PAGES)
    place = token_address(buffer, layer, slot, head, PAGES).to(tl.pointer_type(DTYPE))
    tile = load_pieces(place, known, SIZES[0], COLUMNS[0])
    other = load_pieces(place + tl.full((), SECOND, tl.int64), known, SIZES[1], COLUMNS[1])
    if SCALE_STEPS is not None:
        tile = from_e4m3(tile, NATIVE) * scales[0][:, None]
        other = from_e4m3(other, NATIVE) * scales[1][:, None]
    store_rows(first, row, rounded(tile, first.dtype.element_ty), COUNT, SIZES[0], COLUMNS[0])
    store_rows(second, row, rounded(other, second.dtype.element_ty), COUNT, SIZES[1], COLUMNS[1])
