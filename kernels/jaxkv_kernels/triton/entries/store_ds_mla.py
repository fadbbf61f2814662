"""Stores `fp8_ds_mla` entries at slots of a layer, in place.

A program stores ROWS consecutive tokens.  It loads slots and values together, stores the rotary keys (first, so that
their load is issued with the others), computes a scale per tile of 128 values, and stores values and scales.  No two
programs write the same bytes, unless a slot is given twice.

What bounds it: memory bandwidth.  A tile of 2,048 values takes 16 registers per thread.  If several warps share a tile
of 128 values, its maximum takes one float32 of shared memory.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.formats.latents.fp8_ds_mla import SMALLEST_EXPONENT, TILE
from jaxkv_kernels.triton.codecs.e4m3 import has_e4m3, power_of_two_scale, to_e4m3
from jaxkv_kernels.triton.entries.addresses import in_bytes, slots_of, token_address
from jaxkv_kernels.triton.entries.rotary import load_rotated, pairs
from jaxkv_kernels.triton.entries.tiles import WARPS, load_rows, store_pieces, tile_shape
from jaxkv_kernels.triton.runtime.arithmetic import rounded
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "interleaved"))
def store_ds_mla(buffer, kv_c, k_pe, slots, layer, cos_sin=None, *, pages, entry, interleaved=False):
    """The buffer with kv_c [T, R], k_pe [T, P] stored at slots [T] of a layer; slots outside the cache are skipped.

    With `cos_sin` [T, P], k_pe is rotated first.
    """
    if not slots.size:
        return buffer
    shape = tile_shape(entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZES": entry.sizes,
        "COUNT": slots.size,
        "TILE": TILE,
        "SMALLEST_EXPONENT": SMALLEST_EXPONENT,
        "NATIVE": has_e4m3(),
        "PAIRS": pairs(cos_sin, interleaved),
    }
    operands = (kv_c, k_pe, k_pe if cos_sin is None else cos_sin, slots, jnp.reshape(layer, (1,)))
    grid = (triton.cdiv(slots.size, shape["ROWS"]),)
    return launch(_store_ds_mla, operands, updated=(buffer,), grid=grid, warps=WARPS, **constants, **shape)[0]


@triton.jit
def _store_ds_mla(
    kv_c, k_pe, cos_sin, slots, layers, buffer,
    PAGES: tl.constexpr, SIZES: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
    SMALLEST_EXPONENT: tl.constexpr, NATIVE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = COLUMNS[0] // TILE
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < COUNT, other=-1)
    layer = tl.load(layers)
    keep = (slot >= 0) & (slot < slots_of(layer, PAGES))
    latent = load_rows(kv_c, row, COUNT, SIZES[0], COLUMNS[0]).to(tl.float32)
    rope = load_rotated(k_pe, cos_sin, row, COUNT, SIZES[1], COLUMNS[1], PAIRS)
    place = token_address(buffer, layer, slot, 0, PAGES)
    ropes = (place + SIZES[0] + 4 * (SIZES[0] // TILE)).to(tl.pointer_type(tl.bfloat16))
    store_pieces(ropes, rounded(rope, tl.bfloat16), keep, SIZES[1], COLUMNS[1])
    tiles = tl.reshape(latent, (ROWS, TILES, TILE))
    scale, inverse = power_of_two_scale(tiles, SMALLEST_EXPONENT, keep[:, None, None])
    values = tl.reshape(to_e4m3(tiles * inverse[:, :, None], NATIVE), (ROWS, COLUMNS[0]))
    store_pieces(place, values, keep, SIZES[0], COLUMNS[0])
    scales = (place + SIZES[0]).to(tl.pointer_type(tl.float32))
    store_pieces(scales, scale, keep, SIZES[0] // TILE, TILES)
