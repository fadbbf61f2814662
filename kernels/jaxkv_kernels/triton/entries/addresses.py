"""Addresses of entries in bytes, computed in 64 bits for any strides.

Layers, blocks, slots and heads are int32, with shapes that broadcast.  Addresses are pointers to bytes.  Addresses of
slots outside the cache are computed as well, but must not be dereferenced.
"""

import triton
import triton.language as tl

from jaxkv_kernels.addressing.pages import Pages


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
    page = page_address(buffer, layer, slot // PAGES.block_size, head, PAGES)
    return page + (slot % PAGES.block_size).to(tl.int64) * PAGES.token_stride


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
