"""Where entries lie, in bytes: 64-bit arithmetic, whatever the strides."""

from dataclasses import replace

import triton
import triton.language as tl

from jaxkv_kernels.pages import Pages


def in_bytes(pages: Pages, itemsize: int) -> Pages:
    """The same places in a buffer of bytes, where elements have `itemsize`; a constant that kernels read fields of."""
    steps = ("layer_stride", "block_stride", "head_stride", "token_stride", "offset", "width", "size")
    return replace(pages, **{name: getattr(pages, name) * itemsize for name in steps})


@triton.jit
def page_address(buffer, layer, block, head, PAGES: tl.constexpr):
    """Pointer(s) to the first byte of pages; `layer`, `block` and `head` are int32, of shapes that broadcast."""
    page = layer.to(tl.int64) * PAGES.layer_stride + block.to(tl.int64) * PAGES.block_stride
    return buffer.to(tl.pointer_type(tl.uint8)) + (page + head.to(tl.int64) * PAGES.head_stride + PAGES.offset)


@triton.jit
def slots_of(layer, PAGES: tl.constexpr):
    """How many slots a layer has: none where `layer`, int32, is not one of the cache."""
    return tl.where((layer >= 0) & (layer < PAGES.num_layers), PAGES.num_slots, 0)
