"""Stores plain and e4m3 entries at slots of a layer, in place.

A program stores consecutive rows; a row is one head of one token.  It loads slots and values together, encodes, and
stores each part at its slot.  No two programs write the same bytes, unless a slot is given twice.

What bounds it: memory bandwidth.  A tile of 2,048 values and one of the other part take slightly more than 16 registers
per thread.  No shared memory is used.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.codecs.e4m3 import load_scales, quotient, to_e4m3
from jaxkv_kernels.triton.entries.addresses import slots_of, token_address
from jaxkv_kernels.triton.entries.rotary import load_rotated, pairs
from jaxkv_kernels.triton.entries.tiles import WARPS, load_rows, store_pieces
from jaxkv_kernels.triton.entries.two_parts import two_parts
from jaxkv_kernels.triton.runtime.arithmetic import as_float32, rounded
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "interleaved"))
def store_entries(buffer, parts, slots, layer, scales=(), cos_sin=None, *, pages, entry, interleaved=False):
    """The buffer with entries stored at slots [T] of a layer; slots outside the cache are skipped.

    Args:
      buffer: the buffer of the cache.
      parts: one or two arrays [T, (H,) n_i].
      slots: int32 [T].
      layer: int32 scalar.
      scales: for e4m3 entries, a float32 scalar or [H] for each part: stored = value / scale.
      cos_sin: float32 [T, n_1], by which the second part is rotated first, or None; entries then have one head.
      pages: the addresses of entries.
      entry: the kind and format of entries.
      interleaved: which values of the second part are pairs, if it is rotated.
    """
    if not slots.size:
        return buffer
    rows = slots.size * pages.num_heads
    scales, constants = two_parts(entry, pages, buffer.dtype.itemsize, rows, scales)
    constants["PAIRS"] = pairs(cos_sin, interleaved)
    angles = parts[-1] if cos_sin is None else cos_sin
    operands = (parts[0], parts[-1], angles, *scales, slots, jnp.reshape(layer, (1,)))
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    return launch(_store_entries, operands, updated=(buffer,), grid=grid, warps=WARPS, **constants)[0]


@triton.jit
def _store_entries(
    first, second, cos_sin, first_scale, second_scale, slots, layers, buffer,
    PAGES: tl.constexpr, SIZES: tl.constexpr, SECOND: tl.constexpr, DTYPE: tl.constexpr, SCALE_STEPS: tl.constexpr,
    COUNT: tl.constexpr, NATIVE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = row % PAGES.num_heads
    slot = tl.load(slots + row // PAGES.num_heads, mask=row < COUNT, other=-1)
    layer = tl.load(layers)
    keep = (slot >= 0) & (slot < slots_of(layer, PAGES))
    scales = load_scales(first_scale, second_scale, head, SCALE_STEPS)
    tile = load_rows(first, row, COUNT, SIZES[0], COLUMNS[0])
    other = load_rotated(second, cos_sin, row, COUNT, SIZES[1], COLUMNS[1], PAIRS)
    place = token_address(buffer, layer, slot, head, PAGES).to(tl.pointer_type(DTYPE))
    if SCALE_STEPS is None:
        tile, other = rounded(tile, DTYPE), rounded(other, DTYPE)
    else:
        tile, other = _quantised(tile, scales[0], NATIVE), _quantised(other, scales[1], NATIVE)
    store_pieces(place, tile, keep, SIZES[0], COLUMNS[0])
    store_pieces(place + tl.full((), SECOND, tl.int64), other, keep, SIZES[1], COLUMNS[1])


@triton.jit
def _quantised(tile, scale, NATIVE: tl.constexpr):
    """The bytes of a tile [n, columns] divided by `scale` [n]."""
    return to_e4m3(quotient(as_float32(tile), scale[:, None]), NATIVE)
