"""Reads the bytes of entries of ragged runs of tokens.

A program writes ROWS consecutive rows of the result; a row is one head of one token.  It finds the requests of its
tokens by binary search and their slots in the tables, and copies.  Entries that lie in several runs of bytes (in split
pages, or keys and values apart) take a kernel per run.

What bounds it: memory bandwidth.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.addressing.entry_rows import entry_runs
from jaxkv_kernels.triton.entries.addresses import in_bytes, token_address
from jaxkv_kernels.triton.entries.ragged import ragged_constants, ragged_operands, ragged_slots
from jaxkv_kernels.triton.entries.tiles import WARPS, load_pieces, store_rows, tile_shape
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "total"))
def load_bytes(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total) -> jax.Array:
    """Returns uint8 [total, H, nbytes] for the tokens of ragged runs; rows without a token are 0."""
    rows, found = total * pages.num_heads, []
    operands = (buffer, *ragged_operands(block_tables, cu_seq_lens, seq_starts, layer))
    for run in entry_runs(pages, entry, buffer.dtype.itemsize):
        run = in_bytes(run, buffer.dtype.itemsize)
        shape = tile_shape((run.width,))
        found += launch(
            _load_bytes,
            operands,
            (jax.ShapeDtypeStruct((total, pages.num_heads, run.width), jnp.uint8),),
            grid=(triton.cdiv(rows, shape["ROWS"]),),
            warps=WARPS,
            PAGES=run,
            COUNT=rows,
            **ragged_constants(block_tables, seq_starts),
            **shape,
        )
    return jnp.concatenate(found, axis=-1)


@triton.jit
def _load_bytes(
    buffer, tables, sums, starts, layers, out,
    PAGES: tl.constexpr, COUNT: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    layer = tl.load(layers)
    slot, known = ragged_slots(row // PAGES.num_heads, tables, sums, starts, layer, RUNS, PAGES)
    place = token_address(buffer, layer, slot, row % PAGES.num_heads, PAGES)
    store_rows(out, row, load_pieces(place, known, PAGES.width, COLUMNS[0]), COUNT, PAGES.width, COLUMNS[0])
