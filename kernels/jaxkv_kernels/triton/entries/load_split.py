"""Reads `indexer_fp8` keys of ragged runs of tokens, dequantized.

A program writes ROWS consecutive rows of the result.  It finds the requests of its tokens by binary search and their
slots in the tables, loads values and scales from the two regions of the pages, multiplies, rounds and stores.

What bounds it: memory bandwidth.  A tile of 2,048 values takes 16 registers per thread.  Values move through 2 KiB of
shared memory to the threads that store them.
"""

from functools import partial
from typing import Any

import jax
import triton
import triton.language as tl

from jaxkv_kernels.triton.codecs.e4m3 import from_e4m3, has_e4m3
from jaxkv_kernels.triton.entries.addresses import in_bytes, scale_address, value_address
from jaxkv_kernels.triton.entries.ragged import ragged_constants, ragged_operands, ragged_slots
from jaxkv_kernels.triton.entries.tiles import WARPS, load_pieces, store_rows, tile_shape
from jaxkv_kernels.triton.runtime.arithmetic import rounded
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def load_split(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype) -> jax.Array:
    """Returns k [total, n] of `dtype` for the tokens of ragged runs; rows without a token are 0."""
    shape = tile_shape(entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZE": entry.head_dim,
        **ragged_constants(block_tables, seq_starts),
        "COUNT": total,
        "NATIVE": has_e4m3(),
    }
    operands = (buffer, *ragged_operands(block_tables, cu_seq_lens, seq_starts, layer))
    result = jax.ShapeDtypeStruct((total, entry.head_dim), dtype)
    grid = (triton.cdiv(total, shape["ROWS"]),)
    return launch(_load_split, operands, (result,), grid=grid, warps=WARPS, **constants, **shape)[0]


@triton.jit
def _load_split(
    buffer, tables, sums, starts, layers, k,
    PAGES: tl.constexpr, SIZE: tl.constexpr,
    RUNS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    layer = tl.load(layers)
    slot, known = ragged_slots(row, tables, sums, starts, layer, RUNS, PAGES)
    values = load_pieces(value_address(buffer, layer, slot, PAGES, SIZE), known, SIZE, COLUMNS[0])
    scale = tl.load(scale_address(buffer, layer, slot, PAGES, SIZE), mask=known, other=0)
    key = rounded(from_e4m3(values, NATIVE) * scale[:, None], k.dtype.element_ty)
    store_rows(k, row, key, COUNT, SIZE, COLUMNS[0])
