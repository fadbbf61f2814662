"""Storing new entries at slots of a layer, in place, and reading entries of ragged runs of tokens.

Plain and e4m3 entries (`store_entries`, `load_entries`), `fp8_ds_mla` entries (`store_ds_mla`, `load_ds_mla`),
`indexer_fp8` keys (`store_split`, `load_split`), other entries whose values have scales by tile (`store_tiled`,
`load_tiled`) and the bytes of entries (`store_bytes`, `load_bytes`) have a kernel each.  A row is one head of one
token, and a program processes ROWS consecutive rows.

The functions `write_*` and `gather_*` choose the kernel by the format.  The bytes of other entries are taken for e4m3.

To store, a program loads slots and values together, encodes, and stores each part at its slot.  No two programs write
the same bytes, unless a slot is given twice.  To read, it finds the requests of its tokens by binary search and their
slots in the tables, loads, decodes in float32, rounds and stores.  Reads of given slots are gathers with a run of one
token per slot (`ReadCall` in `calls.py`).

What bounds them: memory bandwidth.  A tile of 2,048 values takes 16 registers per thread, and one of the other part
slightly more.  Stores take no shared memory, except for one float32 per scale if several warps share its values.  Loads
of e4m3 values move them through 2 KiB of shared memory to the threads that store them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Buffer, Pages, arrays_of, dtype_of, entry_runs, join_runs, split_runs, updated
from jaxkv_kernels.calls import (
    GatherCall,
    GatherEntries,
    GatherIndexerK,
    GatherKV,
    GatherMLA,
    ReadCall,
    WriteEntries,
    WriteIndexerK,
    WriteKV,
    WriteMLA,
    token_scale_reasons,
)
from jaxkv_kernels.formats import indexer_fp8
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import FORMATS
from jaxkv_kernels.formats.latents import fp8_ds_mla
from jaxkv_kernels.formats.scales import RULES
from jaxkv_kernels.triton.arithmetic import as_float32, rounded
from jaxkv_kernels.triton.codecs import from_e4m3, has_e4m3, load_scales, power_of_two_scale, quotient, to_e4m3
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import element_type, launch
from jaxkv_kernels.triton.tiled import load_part, store_part, tiled_entry
from jaxkv_kernels.triton.tiles import (
    TILE_LIMIT,
    WARPS,
    in_bytes,
    load_pieces,
    load_rows,
    scale_address,
    second_part,
    slots_of,
    store_pieces,
    store_rows,
    tile_shape,
    token_address,
    value_address,
)

WriteCall = WriteMLA | WriteKV | WriteIndexerK


def write_unsupported_reasons(call: WriteCall | GatherCall | ReadCall) -> Iterator[str]:
    """Reasons against a call that stores entries."""
    yield from token_scale_reasons(call)
    for size in call.entry.sizes:
        if size > TILE_LIMIT:
            yield f"part of {size} values: supports at most {TILE_LIMIT}, which is what a tile may have in Triton"


def kv_write_unsupported_reasons(call: WriteKV) -> Iterator[str]:
    """Reasons against a call that stores keys and values."""
    yield from write_unsupported_reasons(call)
    if call.pages.values is None and any(field.name == "padding" for field in call.entry.fields()):
        yield f"zeros after keys or values: supports multiples of 16 bytes of each in entries of {call.entry.label!r}"


def gather_unsupported_reasons(call: GatherCall | ReadCall) -> Iterator[str]:
    """Reasons against a call that reads entries."""
    yield from write_unsupported_reasons(call)
    if 0 in call.entry.sizes:
        yield "part of 0 values: no kernel has a result of no values"


def read_unsupported_reasons(call: ReadCall) -> Iterator[str]:
    """Reasons against a call that reads entries at slots, by the kernels of gathers."""
    yield from gather_unsupported_reasons(call)
    if not call.slots.size:
        yield "no slots: supports at least one"


def bytes_unsupported_reasons(call: WriteEntries | GatherEntries) -> Iterator[str]:
    """Reasons against a call that stores or reads the bytes of entries."""
    if call.entry.nbytes > TILE_LIMIT:
        yield f"entries of {call.entry.nbytes} bytes: supports at most {TILE_LIMIT}, of a tile in Triton"


@jax.jit
def write_mla(call: WriteMLA) -> Buffer:
    """The buffer with latents and rotary keys stored, these rotated by `cos_sin` unless that is None."""
    if call.entry.format == "fp8_ds_mla":
        return store_ds_mla(call)
    if call.entry.format in RULES:
        return store_tiled(call, (call.kv_c, call.k_pe), call.cos_sin, call.interleaved)
    scales = call.kv_scale, call.kv_scale
    return store_entries(call, (call.kv_c, call.k_pe), scales, call.cos_sin, call.interleaved)


@jax.jit
def write_kv(call: WriteKV) -> Buffer:
    """The buffer with keys and values stored."""
    return store_entries(call, (call.k, call.v), (call.k_scale, call.v_scale))


@jax.jit
def write_indexer_k(call: WriteIndexerK) -> Buffer:
    """The buffer with indexer keys stored."""
    if call.entry.format == "indexer_fp8":
        return store_split(call)
    return store_tiled(call, (call.k,)) if call.entry.format in RULES else store_entries(call, (call.k,))


@jax.jit
def write_entries(call: WriteEntries) -> Buffer:
    """The buffer with the bytes of entries stored."""
    return store_bytes(call)


@jax.jit
def gather_mla(call: GatherMLA) -> tuple[jax.Array, jax.Array]:
    """Latents and rotary keys; rows without a token are 0."""
    if call.entry.format == "fp8_ds_mla":
        return load_ds_mla(call)
    if call.entry.format in RULES:
        kv_c, k_pe = load_tiled(call)
        return kv_c, k_pe
    kv_c, k_pe = load_entries(call, (call.kv_scale, call.kv_scale))
    return kv_c[:, 0], k_pe[:, 0]


@jax.jit
def gather_kv(call: GatherKV) -> tuple[jax.Array, jax.Array]:
    """Keys and values; rows without a token are 0."""
    k, v = load_entries(call, (call.k_scale, call.v_scale))
    return k, v


@jax.jit
def gather_indexer_k(call: GatherIndexerK) -> jax.Array:
    """Indexer keys, dequantised; rows without a token are 0."""
    if call.entry.format == "indexer_fp8":
        return load_split(call)
    return load_tiled(call)[0] if call.entry.format in RULES else load_entries(call)[0][:, 0]


@jax.jit
def gather_entries(call: GatherEntries) -> jax.Array:
    """The bytes of entries; rows without a token are 0."""
    found = load_bytes(call)
    return found[:, 0] if call.entry.one_head else found


def second_at(entry: Entry, pages: Pages, itemsize: int) -> int | None:
    """Bytes from the start of an entry to its second part; None if this has strides, or an array, of its own."""
    if pages.values is None:
        at = {field.name: field.offset for field in entry.fields()}
        return at["V"] if len(entry.format_names) > 1 else entry.fields()[0].nbytes
    return None if pages.value_distance is None else pages.value_distance * itemsize


def stored_types(entry: Entry) -> tuple[tl.dtype, tl.dtype]:
    """The element types of both parts of an entry in memory."""
    first, *others = entry.format_names
    if not others:
        return (element_type(entry.dtype),) * 2
    return element_type(FORMATS[first].dtype), element_type(FORMATS[others[0]].dtype)


def two_parts(call: WriteCall | GatherCall, rows: int, scales) -> tuple[list[jax.Array], dict[str, Any]]:
    """Returns the scales as operands, and the constants, of a kernel that moves `rows` heads of entries.

    If entries have one part, the second has no values.  `scales` are those of `store_entries`.
    """
    entry, itemsize = call.entry, dtype_of(call.buffer).itemsize
    sizes, second = (*entry.sizes, 0)[:2], second_at(entry, call.pages, itemsize)
    scales = [jnp.ones(1) if scale is None else jnp.reshape(scale, (-1,)) for scale in scales]
    return scales, {
        "PAGES": in_bytes(call.pages, itemsize),
        "SIZES": sizes,
        "SECOND": None if second is None else second // entry.dtype.itemsize,
        "DTYPE": element_type(entry.dtype),
        "TYPES": stored_types(entry),
        "SCALE_STEPS": tuple(int(scale.size > 1) for scale in scales) if entry.codec.scaled else None,
        "COUNT": rows,
        "NATIVE": has_e4m3(),
        **tile_shape(sizes),
    }


def store_entries(call: WriteCall, parts, scales=(None, None), cos_sin=None, interleaved=False) -> Buffer:
    """The buffer with entries stored at the slots of a call; slots outside the cache are skipped.

    Args:
      call: a call that stores plain or e4m3 entries.
      parts: one or two arrays [T, (H,) n_i].
      scales: for e4m3 entries, a float32 scalar or [H] for each part: stored = value / scale.
      cos_sin: float32 [T, n_1], by which the second part is rotated first, or None; entries then have one head.
      interleaved: which values of the second part are pairs, if it is rotated.
    """
    slots = call.slot_mapping
    if not slots.size:
        return call.buffer
    rows = slots.size * call.pages.num_heads
    scales, constants = two_parts(call, rows, scales)
    constants["PAIRS"] = pairs(cos_sin, interleaved)
    angles = parts[-1] if cos_sin is None else cos_sin
    operands = (parts[0], parts[-1], angles, *scales, slots, jnp.reshape(call.layer, (1,)))
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    if isinstance(call.buffer, tuple):
        keys, values = launch(
            _store_keys_and_values, operands, updated=call.buffer, grid=grid, warps=WARPS, **constants
        )
        return keys, values
    return launch(_store_entries, operands, updated=(call.buffer,), grid=grid, warps=WARPS, **constants)[0]


@triton.jit
def _store_entries(
    first, second, cos_sin, first_scale, second_scale, slots, layers, buffer,
    PAGES: tl.constexpr, SIZES: tl.constexpr, SECOND: tl.constexpr, DTYPE: tl.constexpr, TYPES: tl.constexpr,
    SCALE_STEPS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    _store_parts(
        first, second, cos_sin, first_scale, second_scale, slots, layers, buffer, buffer,
        PAGES, SIZES, SECOND, DTYPE, TYPES, SCALE_STEPS, COUNT, NATIVE, PAIRS, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _store_keys_and_values(
    first, second, cos_sin, first_scale, second_scale, slots, layers, keys, values,
    PAGES: tl.constexpr, SIZES: tl.constexpr, SECOND: tl.constexpr, DTYPE: tl.constexpr, TYPES: tl.constexpr,
    SCALE_STEPS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """`_store_entries` for a cache of two arrays, both of which it updates."""
    _store_parts(
        first, second, cos_sin, first_scale, second_scale, slots, layers, keys, values,
        PAGES, SIZES, SECOND, DTYPE, TYPES, SCALE_STEPS, COUNT, NATIVE, PAIRS, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _store_parts(
    first, second, cos_sin, first_scale, second_scale, slots, layers, buffer, value_buffer,
    PAGES: tl.constexpr, SIZES: tl.constexpr, SECOND: tl.constexpr, DTYPE: tl.constexpr, TYPES: tl.constexpr,
    SCALE_STEPS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
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
    tile, other = _stored(tile, scales, 0, TYPES, NATIVE), _stored(other, scales, 1, TYPES, NATIVE)
    store_pieces(place.to(tl.pointer_type(TYPES[0])), tile, keep, SIZES[0], COLUMNS[0])
    other_place = second_part(place, value_buffer, layer, slot, head, PAGES, SECOND)
    store_pieces(other_place.to(tl.pointer_type(TYPES[1])), other, keep, SIZES[1], COLUMNS[1])


@triton.jit
def _stored(tile, scales, NUMBER: tl.constexpr, TYPES: tl.constexpr, NATIVE: tl.constexpr):
    """A tile [n, columns] as elements of TYPES[NUMBER]: rounded, or divided by `scales`[NUMBER] [n] to e4m3 bytes."""
    if TYPES[NUMBER] == tl.uint8:
        return to_e4m3(quotient(as_float32(tile), scales[NUMBER][:, None]), NATIVE)
    return rounded(tile, TYPES[NUMBER])


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


def store_ds_mla(call: WriteMLA) -> jax.Array:
    """The buffer with `fp8_ds_mla` entries stored; slots outside the cache are skipped.

    Programs store rotary keys first, so that their load is issued with the others, and then compute a scale per tile of
    128 values.
    """
    k_pe, cos_sin, slots = call.k_pe, call.cos_sin, call.slot_mapping
    if not slots.size:
        return call.buffer
    shape = tile_shape(call.entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(call.pages, call.buffer.dtype.itemsize),
        "SIZES": call.entry.sizes,
        "COUNT": slots.size,
        "TILE": fp8_ds_mla.TILE,
        "SMALLEST_EXPONENT": fp8_ds_mla.SMALLEST_EXPONENT,
        "NATIVE": has_e4m3(),
        "PAIRS": pairs(cos_sin, call.interleaved),
    }
    operands = (call.kv_c, k_pe, k_pe if cos_sin is None else cos_sin, slots, jnp.reshape(call.layer, (1,)))
    grid = (triton.cdiv(slots.size, shape["ROWS"]),)
    return launch(_store_ds_mla, operands, updated=(call.buffer,), grid=grid, warps=WARPS, **constants, **shape)[0]


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


def store_tiled(call: WriteMLA | WriteIndexerK, values, cos_sin=None, interleaved=False) -> jax.Array:
    """The buffer with entries stored whose values have scales by tile; slots outside the cache are skipped.

    Args:
      call: a call that stores entries of a format in `formats.scales.RULES`.
      values: one or two arrays [T, n_i].
      cos_sin: float32 [T, n_1], by which the second part is rotated first, or None.
      interleaved: which values of the second part are pairs, if it is rotated.

    Programs store the second part first, so that its load is issued with the others.
    """
    slots = call.slot_mapping
    if not slots.size:
        return call.buffer
    constants: dict[str, Any] = {
        "ENTRY": tiled_entry(call.entry, call.pages, call.buffer.dtype.itemsize),
        "COUNT": slots.size,
        "NATIVE": has_e4m3(),
        "PAIRS": pairs(cos_sin, interleaved),
        "ROWS": tile_shape(call.entry.sizes)["ROWS"],
    }
    angles = values[-1] if cos_sin is None else cos_sin
    operands = (values[0], values[-1], angles, slots, jnp.reshape(call.layer, (1,)))
    grid = (triton.cdiv(slots.size, constants["ROWS"]),)
    return launch(_store_tiled, operands, updated=(call.buffer,), grid=grid, warps=WARPS, **constants)[0]


@triton.jit
def _store_tiled(
    first, second, cos_sin, slots, layers, buffer,
    ENTRY: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    VALUES: tl.constexpr = ENTRY.values
    SCALES: tl.constexpr = ENTRY.scales
    FIRST: tl.constexpr = ENTRY.parts[0]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < COUNT, other=-1)
    layer = tl.load(layers)
    keep = (slot >= 0) & (slot < slots_of(layer, VALUES))
    tile = load_rows(first, row, COUNT, FIRST.size, FIRST.columns)
    entry = token_address(buffer, layer, slot, 0, VALUES)
    scales = token_address(buffer, layer, slot, 0, SCALES)
    if len(ENTRY.parts) > 1:
        SECOND: tl.constexpr = ENTRY.parts[1]
        other = load_rotated(second, cos_sin, row, COUNT, SECOND.size, SECOND.columns, PAIRS)
        store_part(other, entry, scales, keep, SECOND, NATIVE)
    store_part(tile, entry, scales, keep, FIRST, NATIVE)


def store_split(call: WriteIndexerK) -> jax.Array:
    """The buffer with `indexer_fp8` keys stored; slots outside the cache are skipped.

    A page holds the values of all tokens, then their scales.
    """
    slots = call.slot_mapping
    if not slots.size:
        return call.buffer
    shape = tile_shape(call.entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(call.pages, call.buffer.dtype.itemsize),
        "SIZE": call.entry.head_dim,
        "COUNT": slots.size,
        "SMALLEST_EXPONENT": indexer_fp8.SMALLEST_EXPONENT,
        "NATIVE": has_e4m3(),
    }
    operands = (call.k, slots, jnp.reshape(call.layer, (1,)))
    grid = (triton.cdiv(slots.size, shape["ROWS"]),)
    return launch(_store_split, operands, updated=(call.buffer,), grid=grid, warps=WARPS, **constants, **shape)[0]


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


def store_bytes(call: WriteEntries) -> Buffer:
    """The buffer with the bytes of entries stored; slots outside the cache are skipped.

    Entries that lie in several runs of bytes (in split pages, or keys and values apart) take a kernel per run.
    """
    buffer, slots, heads = call.buffer, call.slot_mapping, call.pages.num_heads
    if not slots.size:
        return buffer
    rows, dtype = slots.size * heads, dtype_of(buffer)

    def stored(array, run, piece):
        run = in_bytes(run, dtype.itemsize)
        shape = tile_shape((run.width,))
        return launch(
            _store_bytes,
            (piece, slots, jnp.reshape(call.layer, (1,))),
            updated=(array,),
            grid=(triton.cdiv(rows, shape["ROWS"]),),
            warps=WARPS,
            PAGES=run,
            COUNT=rows,
            **shape,
        )[0]

    pieces = [view_as(piece, jnp.uint8) for piece in split_runs(call.pages, call.entry, call.rows, dtype)]
    return updated(buffer, stored, entry_runs(call.pages, call.entry, dtype.itemsize), pieces)


@triton.jit
def _store_bytes(
    rows, slots, layers, buffer,
    PAGES: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row // PAGES.num_heads, mask=row < COUNT, other=-1)
    layer = tl.load(layers)
    keep = (slot >= 0) & (slot < slots_of(layer, PAGES))
    place = token_address(buffer, layer, slot, row % PAGES.num_heads, PAGES)
    store_pieces(place, load_rows(rows, row, COUNT, PAGES.width, COLUMNS[0]), keep, PAGES.width, COLUMNS[0])


def load_entries(call: GatherMLA | GatherKV | GatherIndexerK, scales=(None, None)) -> list[jax.Array]:
    """The parts [total, H, n_i] of plain or e4m3 entries; rows without a token are 0.

    `scales`, for e4m3 entries, has a float32 scalar or [H] for each part: value = stored * scale.
    """
    heads = call.pages.num_heads
    rows = call.total * heads
    scales, constants = two_parts(call, rows, scales)
    constants |= ragged_constants(call)
    operands = (*arrays_of(call.buffer, 2), *scales, *ragged_operands(call))
    # At least one value, because an array without values has no memory to point to.
    results = [jax.ShapeDtypeStruct((call.total, heads, max(size, 1)), call.dtype) for size in constants["SIZES"]]
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    found = launch(_load_entries, operands, results, grid=grid, warps=WARPS, **constants)
    return list(found[: len(call.entry.sizes)])


@triton.jit
def _load_entries(
    buffer, value_buffer, first_scale, second_scale, tables, sums, starts, layers, first, second,
    PAGES: tl.constexpr, SIZES: tl.constexpr, SECOND: tl.constexpr, DTYPE: tl.constexpr, TYPES: tl.constexpr,
    SCALE_STEPS: tl.constexpr, RUNS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = row % PAGES.num_heads
    layer = tl.load(layers)
    scales = load_scales(first_scale, second_scale, head, SCALE_STEPS)
    slot, known = ragged_slots(row // PAGES.num_heads, tables, sums, starts, layer, RUNS, PAGES)
    place = token_address(buffer, layer, slot, head, PAGES).to(tl.pointer_type(DTYPE))
    tile = load_pieces(place.to(tl.pointer_type(TYPES[0])), known, SIZES[0], COLUMNS[0])
    other_place = second_part(place, value_buffer, layer, slot, head, PAGES, SECOND)
    other = load_pieces(other_place.to(tl.pointer_type(TYPES[1])), known, SIZES[1], COLUMNS[1])
    if TYPES[0] == tl.uint8:
        tile = from_e4m3(tile, NATIVE) * scales[0][:, None]
    if TYPES[1] == tl.uint8:
        other = from_e4m3(other, NATIVE) * scales[1][:, None]
    store_rows(first, row, rounded(tile, first.dtype.element_ty), COUNT, SIZES[0], COLUMNS[0])
    store_rows(second, row, rounded(other, second.dtype.element_ty), COUNT, SIZES[1], COLUMNS[1])


def load_ds_mla(call: GatherMLA) -> tuple[jax.Array, jax.Array]:
    """The latents [total, R] and rotary keys [total, P] of `fp8_ds_mla` entries; rows without a token are 0."""
    shape = tile_shape(call.entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(call.pages, call.buffer.dtype.itemsize),
        "SIZES": call.entry.sizes,
        "TILE": fp8_ds_mla.TILE,
        **ragged_constants(call),
        "COUNT": call.total,
        "NATIVE": has_e4m3(),
    }
    operands = (call.buffer, *ragged_operands(call))
    results = [jax.ShapeDtypeStruct((call.total, size), call.dtype) for size in call.entry.sizes]
    grid = (triton.cdiv(call.total, shape["ROWS"]),)
    kv_c, k_pe = launch(_load_ds_mla, operands, results, grid=grid, warps=WARPS, **constants, **shape)
    return kv_c, k_pe


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


def load_tiled(call: GatherMLA | GatherIndexerK) -> list[jax.Array]:
    """The parts [total, n_i] of entries whose values have scales by tile; rows without a token are 0."""
    constants: dict[str, Any] = {
        "ENTRY": tiled_entry(call.entry, call.pages, call.buffer.dtype.itemsize),
        **ragged_constants(call),
        "COUNT": call.total,
        "NATIVE": has_e4m3(),
        "ROWS": tile_shape(call.entry.sizes)["ROWS"],
    }
    operands = (call.buffer, *ragged_operands(call))
    # The second result of entries with one part has a value that nothing reads.
    results = [jax.ShapeDtypeStruct((call.total, size), call.dtype) for size in (*call.entry.sizes, 1)[:2]]
    grid = (triton.cdiv(call.total, constants["ROWS"]),)
    found = launch(_load_tiled, operands, results, grid=grid, warps=WARPS, **constants)
    return list(found[: len(call.entry.sizes)])


@triton.jit
def _load_tiled(
    buffer, tables, sums, starts, layers, first, second,
    ENTRY: tl.constexpr, RUNS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    VALUES: tl.constexpr = ENTRY.values
    SCALES: tl.constexpr = ENTRY.scales
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    layer = tl.load(layers)
    slot, known = ragged_slots(row, tables, sums, starts, layer, RUNS, VALUES)
    entry = token_address(buffer, layer, slot, 0, VALUES)
    scales = token_address(buffer, layer, slot, 0, SCALES)
    FIRST: tl.constexpr = ENTRY.parts[0]
    tile = load_part(entry, scales, known, 0, FIRST.columns, FIRST, NATIVE)
    if len(ENTRY.parts) > 1:
        SECOND: tl.constexpr = ENTRY.parts[1]
        other = load_part(entry, scales, known, 0, SECOND.columns, SECOND, NATIVE)
        store_rows(second, row, rounded(other, second.dtype.element_ty), COUNT, SECOND.size, SECOND.columns)
    store_rows(first, row, rounded(tile, first.dtype.element_ty), COUNT, FIRST.size, FIRST.columns)


def load_split(call: GatherIndexerK) -> jax.Array:
    """The `indexer_fp8` keys [total, n] of runs of tokens; rows without a token are 0."""
    shape = tile_shape(call.entry.sizes)
    constants: dict[str, Any] = {
        "PAGES": in_bytes(call.pages, call.buffer.dtype.itemsize),
        "SIZE": call.entry.head_dim,
        **ragged_constants(call),
        "COUNT": call.total,
        "NATIVE": has_e4m3(),
    }
    operands = (call.buffer, *ragged_operands(call))
    result = jax.ShapeDtypeStruct((call.total, call.entry.head_dim), call.dtype)
    grid = (triton.cdiv(call.total, shape["ROWS"]),)
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


def load_bytes(call: GatherEntries) -> jax.Array:
    """The bytes of entries, uint8 [total, H, nbytes]; rows without a token are 0.

    Entries that lie in several runs of bytes (in split pages, or keys and values apart) take a kernel per run.
    """
    heads, itemsize = call.pages.num_heads, dtype_of(call.buffer).itemsize
    rows, found = call.total * heads, []
    runs = entry_runs(call.pages, call.entry, itemsize)
    for array, run in zip(arrays_of(call.buffer, len(runs)), runs, strict=True):
        run = in_bytes(run, itemsize)
        shape = tile_shape((run.width,))
        found += launch(
            _load_bytes,
            (array, *ragged_operands(call)),
            (jax.ShapeDtypeStruct((call.total, heads, run.width), jnp.uint8),),
            grid=(triton.cdiv(rows, shape["ROWS"]),),
            warps=WARPS,
            PAGES=run,
            COUNT=rows,
            **ragged_constants(call),
            **shape,
        )
    return join_runs(call.pages, call.entry, found)


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


def ragged_operands(call: GatherCall) -> tuple[jax.Array, ...]:
    """The operands of gather kernels besides the buffer: tables, cumulative lengths, first tokens, layer."""
    starts = call.cu_seq_lens if call.seq_starts is None else call.seq_starts  # a placeholder, not read
    return call.block_tables, call.cu_seq_lens, starts, jnp.reshape(call.layer, (1,))


def ragged_constants(call: GatherCall) -> dict[str, Any]:
    """The constant RUNS: number of requests, blocks per table, and whether first tokens are given."""
    return {"RUNS": (*call.block_tables.shape, call.seq_starts is not None)}


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
