"""Reads `fp8_ds_mla` entries of ragged runs of tokens, dequantized.

A program writes ROWS consecutive rows of the results.  It finds the requests of its tokens by binary search and their
slots in the tables, loads values, scales and rotary keys, multiplies in float32, rounds and stores.

What bounds it: memory bandwidth.  A tile of 2,048 values takes 16 registers per thread.  Values move through 2 KiB of
shared memory to the threads that store them.
"""

from functools import partial
from typing import Any

import jax
import triton
import triton.language as tl

from jaxkv_kernels.formats.latents.fp8_ds_mla import TILE
from jaxkv_kernels.triton.codecs.e4m3 import from_e4m3, has_e4m3
from jaxkv_kernels.triton.entries.addresses import in_bytes, token_address
from jaxkv_kernels.triton.entries.ragged import ragged_constants, ragged_operands, ragged_slots
from jaxkv_kernels.triton.entries.tiles import WARPS, load_pieces, store_rows, tile_shape
from jaxkv_kernels.triton.runtime.arithmetic import rounded
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def load_ds_mla(
    buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype
) -> tuple[jax.Array, ...]:
    """Returns kv_c [total, R] and k_pe [total, P] of `dtype` for ragged runs of tokens; rows without a token are 0."""
    shape = tile_shape(entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZES": entry.sizes,
        "TILE": TILE,
        **ragged_constants(block_tables, seq_starts),
        "COUNT": total,
        "NATIVE": has_e4m3(),
    }
    operands = (buffer, *ragged_operands(block_tables, cu_seq_lens, seq_starts, layer))
    results = [jax.ShapeDtypeStruct((total, size), dtype) for size in entry.sizes]
    grid = (triton.cdiv(total, shape["ROWS"]),)
    return launch(_load_ds_mla, operands, results, grid=grid, warps=WARPS, **constants, **shape)


@triton.jit
def _load_ds_mla(
    buffer, tables, sums, starts, layers, kv_c, k_pe,
    PAGES: tl.constexpr, SIZES: tl.constexpr, TILE: tl.constexpr,
    RUNS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    layer = tl.load(layers)
    slot, known = ragged_slots(row, tables, sums, starts, layer, RUNS, PAGES)
    place = token_address(buffer, layer, slot, 0, PAGES)
    values = load_pieces(place, known, SIZES[0], COLUMNS[0])
    scales = (place + SIZES[0]).to(tl.pointer_type(tl.float32))
    scale = load_pieces(scales, known, SIZES[0] // TILE, COLUMNS[0] // TILE)
    ropes = (place + SIZES[0] + 4 * (SIZES[0] // TILE)).to(tl.pointer_type(tl.bfloat16))
    rope = load_pieces(ropes, known, SIZES[1], COLUMNS[1])
    tiles = tl.reshape(from_e4m3(values, NATIVE), (ROWS, COLUMNS[0] // TILE, TILE)) * scale[:, :, None]
    latent = rounded(tl.reshape(tiles, (ROWS, COLUMNS[0])), kv_c.dtype.element_ty)
    store_rows(kv_c, row, latent, COUNT, SIZES[0], COLUMNS[0])
    store_rows(k_pe, row, rounded(rope, k_pe.dtype.element_ty), COUNT, SIZES[1], COLUMNS[1])
