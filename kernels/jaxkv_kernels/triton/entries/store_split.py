"""Stores `indexer_fp8` keys at slots of a layer, in place: a page holds the values of all tokens, then their scales.

A program stores ROWS consecutive tokens.  It loads slots and keys together, computes a scale per key, and stores values
and scales in the two regions of the pages.  No two programs write the same bytes, unless a slot is given twice.

What bounds it: memory bandwidth.  A tile of 2,048 values takes 16 registers per thread.  If several warps share a key,
its maximum takes one float32 of shared memory.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.formats.indexer_fp8 import SMALLEST_EXPONENT
from jaxkv_kernels.triton.codecs.e4m3 import has_e4m3, power_of_two_scale, to_e4m3
from jaxkv_kernels.triton.entries.addresses import in_bytes, scale_address, slots_of, value_address
from jaxkv_kernels.triton.entries.tiles import WARPS, load_rows, store_pieces, tile_shape
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry"))
def store_split(buffer, k, slots, layer, *, pages, entry):
    """The buffer with k [T, n] stored at slots [T] of a layer; slots outside the cache are skipped."""
    if not slots.size:
        return buffer
    shape = tile_shape(entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZE": entry.head_dim,
        "COUNT": slots.size,
        "SMALLEST_EXPONENT": SMALLEST_EXPONENT,
        "NATIVE": has_e4m3(),
    }
    operands = (k, slots, jnp.reshape(layer, (1,)))
    grid = (triton.cdiv(slots.size, shape["ROWS"]),)
    return launch(_store_split, operands, updated=(buffer,), grid=grid, warps=WARPS, **constants, **shape)[0]


@triton.jit
def _store_split(
    k, slots, layers, buffer,
    PAGES: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr,
    SMALLEST_EXPONENT: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    layer = tl.load(layers)
    slot = tl.load(slots + row, mask=row < COUNT, other=-1)
    keep = (slot >= 0) & (slot < slots_of(layer, PAGES))
    key = load_rows(k, row, COUNT, SIZE, COLUMNS[0]).to(tl.float32)
    scale, inverse = power_of_two_scale(key, SMALLEST_EXPONENT, keep[:, None])
    values = to_e4m3(key * inverse[:, None], NATIVE)
    store_pieces(value_address(buffer, layer, slot, PAGES, SIZE), values, keep, SIZE, COLUMNS[0])
    tl.store(scale_address(buffer, layer, slot, PAGES, SIZE), scale, mask=keep)
