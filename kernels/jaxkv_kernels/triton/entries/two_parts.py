"""Operands and constants of the kernels that move plain and e4m3 entries, which are one or two parts."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.triton.codecs.e4m3 import has_e4m3
from jaxkv_kernels.triton.entries.addresses import in_bytes
from jaxkv_kernels.triton.entries.tiles import tile_shape
from jaxkv_kernels.triton.runtime.dtypes import element_type


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
