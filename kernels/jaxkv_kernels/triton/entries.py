"""Storing new entries at slots of a layer, in place, and reading entries of ragged runs of tokens.

Plain and e4m3 entries (`store_entries`, `load_entries`), `fp8_ds_mla` entries (`store_ds_mla`, `load_ds_mla`),
`indexer_fp8` keys in split pages (`store_split`, `load_split`) and the bytes of entries (`load_bytes`) have a kernel
each.  A row is one head of one token, and a program processes ROWS consecutive rows.

To store, a program loads slots and values together, encodes, and stores each part at its slot.  No two programs write
the same bytes, unless a slot is given twice.  To read, it finds the requests of its tokens by binary search and their
slots in the tables, loads, decodes in float32, rounds and stores.

What bounds them: memory bandwidth.  A tile of 2,048 values takes 16 registers per thread, and one of the other part
slightly more.  Stores take no shared memory, except for one float32 per scale if several warps share its values.  Loads
of e4m3 values move them through 2 KiB of shared memory to the threads that store them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Pages, entry_runs
from jaxkv_kernels.formats import indexer_fp8
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.latents import fp8_ds_mla
from jaxkv_kernels.triton.arithmetic import as_float32, rounded
from jaxkv_kernels.triton.codecs import from_e4m3, has_e4m3, load_scales, power_of_two_scale, quotient, to_e4m3
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import element_type, launch
from jaxkv_kernels.triton.tiles import (
    WARPS,
    in_bytes,
    load_pieces,
    load_rows,
    scale_address,
    slots_of,
    store_pieces,
    store_rows,
    tile_shape,
    token_address,
    value_address,
)


def second_part(entry: Entry, pages: Pages, itemsize: int) -> int:
    """Bytes from the start of an entry to its second part, which may lie apart."""
    return pages.part_stride * itemsize if pages.num_parts > 1 else entry.sizes[0] * entry.dtype.itemsize


def two_parts(entry: Entry, pages: Pages, itemsize: int, rows: int, scales) -> tuple[list[jax.Array], dict[str, Any]]:
    """Returns the scales as operands, and the constants, of a kernel that moves `rows` heads of entries.

    If entries have one part, the second has no values.

    Args:
      entry: the kind and format of entries.
      pages: the addresses of entries, in elements of the buffer.
      itemsize: bytes of such an element.
      rows: tokens times heads.
      scales: for e4m3 entries, a float32 scalar or [H] for each part.
    """
    sizes = (*entry.sizes, 0)[:2]
    scales = [jnp.reshape(scale, (-1,)) for scale in scales] or [jnp.ones(1)] * 2
    return scales, {
        "PAGES": in_bytes(pages, itemsize),
        "SIZES": sizes,
        "SECOND": second_part(entry, pages, itemsize) // entry.dtype.itemsize,
        "DTYPE": element_type(entry.dtype),
        "SCALE_STEPS": tuple(int(scale.size > 1) for scale in scales) if entry.codec.scaled else None,
        "COUNT": rows,
        "NATIVE": has_e4m3(),
        **tile_shape(sizes),
    }


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


def pairs(cos_sin, interleaved: bool) -> str | None:
    """The constant PAIRS: which values are rotated together; None if none are."""
    return None if cos_sin is None else "interleaved" if interleaved else "halves"


@triton.jit
def load_rotated(
    array, cos_sin, row, COUNT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr
):
    """`load_rows`, rotated by rows `row` [n] of `cos_sin` [COUNT, SIZE] unless PAIRS is None.

    The other value of a pair is loaded a second time, from the same cache lines.
    """
    tile = load_rows(array, row, COUNT, SIZE, COLUMNS)
    if PAIRS is None:
        return tile
    HALF: tl.constexpr = SIZE // 2
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < COUNT)[:, None] & (column < SIZE)
    if PAIRS == "interleaved":
        second, other, angle = column % 2 == 1, column ^ 1, column // 2
    else:
        second, other, angle = column >= HALF, (column + HALF) % SIZE, column % HALF
    start = row.to(tl.int64)[:, None] * SIZE
    partner = tl.load(array + start + other, mask=mask)
    cos = tl.load(cos_sin + start + angle, mask=mask)
    sin = tl.load(cos_sin + start + HALF + angle, mask=mask)
    # Triton's `-sin` is `0 - sin`, which is +0 for both zeros.
    sin = tl.where(second, sin, sin * -1.0)
    return rounded(as_float32(tile) * cos + as_float32(partner) * sin, array.dtype.element_ty)


@partial(jax.jit, static_argnames=("pages", "entry", "interleaved"))
def store_ds_mla(buffer, kv_c, k_pe, slots, layer, cos_sin=None, *, pages, entry, interleaved=False):
    """The buffer with kv_c [T, R], k_pe [T, P] stored at slots [T] of a layer; slots outside the cache are skipped.

    With `cos_sin` [T, P], k_pe is rotated first.  Programs store rotary keys first, so that their load is issued with
    the others, and then compute a scale per tile of 128 values.
    """
    if not slots.size:
        return buffer
    shape = tile_shape(entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZES": entry.sizes,
        "COUNT": slots.size,
        "TILE": fp8_ds_mla.TILE,
        "SMALLEST_EXPONENT": fp8_ds_mla.SMALLEST_EXPONENT,
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


@partial(jax.jit, static_argnames=("pages", "entry"))
def store_split(buffer, k, slots, layer, *, pages, entry):
    """The buffer with k [T, n] stored at slots [T] of a layer; slots outside the cache are skipped.

    A page holds the values of all tokens, then their scales.
    """
    if not slots.size:
        return buffer
    shape = tile_shape(entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZE": entry.head_dim,
        "COUNT": slots.size,
        "SMALLEST_EXPONENT": indexer_fp8.SMALLEST_EXPONENT,
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


def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, *, pages, entry, interleaved):
    """Stores kv_c [T, R] and k_pe [T, P], rotated by cos_sin [T, P] (or None); returns the new buffer."""
    options = dict(pages=pages, entry=entry, interleaved=interleaved)
    if entry.format == "fp8_ds_mla":
        return store_ds_mla(buffer, kv_c, k_pe, slot_mapping, layer, cos_sin, **options)
    scales = (kv_scale, kv_scale) if entry.codec.scaled else ()
    return store_entries(buffer, (kv_c, k_pe), slot_mapping, layer, scales, cos_sin, **options)


def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """Stores k [T, H, D] and v [T, H, Dv] at slots [T] of a layer; returns the new buffer."""
    scales = (k_scale, v_scale) if entry.codec.scaled else ()
    return store_entries(buffer, (k, v), slot_mapping, layer, scales, pages=pages, entry=entry)


def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """Stores k [T, head_dim] at slots [T] of a layer; returns the new buffer."""
    if entry.split:
        return store_split(buffer, k, slot_mapping, layer, pages=pages, entry=entry)
    return store_entries(buffer, (k,), slot_mapping, layer, pages=pages, entry=entry)


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


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def load_ds_mla(
    buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype
) -> tuple[jax.Array, ...]:
    """Returns kv_c [total, R] and k_pe [total, P] of `dtype` for ragged runs of tokens; rows without a token are 0."""
    shape = tile_shape(entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(pages, buffer.dtype.itemsize),
        "SIZES": entry.sizes,
        "TILE": fp8_ds_mla.TILE,
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


@partial(jax.jit, static_argnames=("pages", "entry", "total"))
def load_bytes(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total) -> jax.Array:
    """Returns uint8 [total, H, nbytes] for the tokens of ragged runs; rows without a token are 0.

    Entries that lie in several runs of bytes (in split pages, or keys and values apart) take a kernel per run.
    """
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


def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """Returns kv_c [total, R] and k_pe [total, P] of `dtype`; rows without a token are 0."""
    runs, options = (block_tables, cu_seq_lens, seq_starts), dict(pages=pages, entry=entry, total=total, dtype=dtype)
    if entry.format == "fp8_ds_mla":
        return load_ds_mla(buffer, *runs, layer, **options)
    scales = (kv_scale, kv_scale) if entry.codec.scaled else ()
    return tuple(part[:, 0] for part in load_entries(buffer, *runs, layer, scales, **options))


def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """Returns k [total, H, D] and v [total, H, Dv] of `dtype`; rows without a token are 0."""
    runs, scales = (block_tables, cu_seq_lens, seq_starts), (k_scale, v_scale) if entry.codec.scaled else ()
    return tuple(load_entries(buffer, *runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype))


def gather_indexer_k(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype):
    """Returns k [total, head_dim] of `dtype`, dequantised; rows without a token are 0."""
    runs, options = (block_tables, cu_seq_lens, seq_starts), dict(pages=pages, entry=entry, total=total, dtype=dtype)
    if entry.split:
        return load_split(buffer, *runs, layer, **options)
    return load_entries(buffer, *runs, layer, **options)[0][:, 0]


def gather_entries(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total):
    """Returns the bytes of entries, uint8 [total, (H,) nbytes]; rows without a token are 0."""
    found = load_bytes(buffer, block_tables, cu_seq_lens, seq_starts, layer, pages=pages, entry=entry, total=total)
    return found[:, 0] if entry.one_head else found
