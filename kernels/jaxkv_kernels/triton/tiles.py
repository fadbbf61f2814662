"""Tiles of rows: where entries lie, and moving rows between memory and registers.

Addresses of entries are pointers to bytes, computed in 64 bits for any strides.  Layers, blocks, slots and heads are
int32, with shapes that broadcast.  Addresses of slots outside the cache are computed as well, but must not be
dereferenced.
"""

from typing import Any

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.triton.language import tl, triton


def in_bytes(pages: Pages, itemsize: int) -> Pages:
    """`pages` with strides in bytes, for elements of `itemsize` bytes.  Kernels receive it as a constant."""
    return pages.resized(itemsize, 1)


@triton.jit
def slots_of(layer, PAGES: tl.constexpr):
    """The number of slots of a layer; 0 if the cache has no such layer."""
    return tl.where((layer >= 0) & (layer < PAGES.num_layers), PAGES.num_slots, 0)


@triton.jit
def page_address(buffer, layer, block, head, PAGES: tl.constexpr):
    """The start of pages (the first token of a head in a block)."""
    page = tl.cast(layer, tl.int64) * PAGES.layer_stride + tl.cast(block, tl.int64) * PAGES.block_stride
    return buffer.to(tl.pointer_type(tl.uint8)) + (page + tl.cast(head, tl.int64) * PAGES.head_stride + PAGES.offset)


@triton.jit
def token_address(buffer, layer, slot, head, PAGES: tl.constexpr):
    """The start of entries."""
    slot = tl.cast(slot, tl.uint32)  # unsigned quotients by powers of two are one instruction
    page = page_address(buffer, layer, slot // PAGES.block_size, head, PAGES)
    return page + (slot % PAGES.block_size).to(tl.int64) * PAGES.token_stride


@triton.jit
def second_part(place, value_buffer, layer, slot, head, PAGES: tl.constexpr, SECOND: tl.constexpr):
    """The start of the second parts of entries that begin at `place`, as pointers of the same type.

    They begin SECOND elements later or, if SECOND is None, where the strides of values put them in `value_buffer`: the
    array of values, or the buffer that has keys and values.
    """
    if SECOND is None:
        VALUES: tl.constexpr = PAGES.values
        found = token_address(value_buffer, layer, slot, head, VALUES).to(place.dtype)
    else:
        found = place + tl.full((), SECOND, tl.int64)
    return found


@triton.jit
def value_address(buffer, layer, slot, PAGES: tl.constexpr, SIZE: tl.constexpr):
    """The start of the SIZE bytes of a key's values, in split pages."""
    page = page_address(buffer, layer, slot // PAGES.block_size, 0, PAGES)
    return page + (slot % PAGES.block_size).to(tl.int64) * SIZE


@triton.jit
def scale_address(buffer, layer, slot, PAGES: tl.constexpr, SIZE: tl.constexpr):
    """The scales of keys in split pages, as pointers to float32."""
    scales = page_address(buffer, layer, slot // PAGES.block_size, 0, PAGES) + PAGES.block_size * SIZE
    return scales.to(tl.pointer_type(tl.float32)) + slot % PAGES.block_size


WARPS = 4
VALUES = 2048
"""Values per tile, 16 per thread: two loads of 16 bytes for values of 2 bytes."""
TILE_LIMIT = 2**20
"""The most values of a tile in Triton."""


def tile_shape(sizes) -> dict[str, Any]:
    """Constants for rows whose parts have `sizes` values: ROWS per program and COLUMNS of each tile, powers of two."""
    columns = tuple(triton.next_power_of_2(max(size, 1)) for size in sizes)
    return {"ROWS": max(1, VALUES // max(columns)), "COLUMNS": columns}


@triton.jit
def load_rows(array, row, COUNT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads rows `row` [n] of `array` [COUNT, SIZE] as a tile [n, COLUMNS]."""
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < COUNT)[:, None] & (column < SIZE)
    return tl.load(array + row.to(tl.int64)[:, None] * SIZE + column, mask=mask)


@triton.jit
def store_rows(array, row, tile, COUNT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores a tile [n, COLUMNS] to rows `row` [n] of `array` [COUNT, SIZE]."""
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < COUNT)[:, None] & (column < SIZE)
    tl.store(array + row.to(tl.int64)[:, None] * SIZE + column, tile, mask=mask)


@triton.jit
def load_pieces(place, keep, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads SIZE elements from each of the pointers `place` [n] as a tile [n, COLUMNS].

    The tile is 0 past SIZE, and in rows where `keep` [n] is False.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    mask = keep[:, None] if SIZE >= COLUMNS else keep[:, None] & (column < SIZE)
    return tl.load(place[:, None] + column, mask=mask, other=0)


@triton.jit
def store_pieces(place, tile, keep, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores SIZE elements of each row of a tile [n, COLUMNS] to the pointers `place` [n], where `keep` [n] is True."""
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(place[:, None] + column, tile, mask=keep[:, None] & (column < SIZE))
