"""The two halves of a quantised indexer page: all its values, then all its scales; and keys of any format read."""

from dataclasses import replace

import jax.numpy as jnp

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.indexer_fp8 import SCALE_BYTES
from jaxkv_kernels.xla.rows import read_slots


def split_page(pages: Pages, entry, itemsize: int) -> tuple[Pages, Pages]:
    """Where the values lie and where the scales lie, for a buffer of elements of `itemsize` bytes."""
    values, scale = entry.head_dim // itemsize, SCALE_BYTES // itemsize
    return (
        replace(pages, token_stride=values, width=values),
        replace(pages, token_stride=scale, width=scale, offset=pages.offset + pages.block_size * values),
    )


def read_keys(buffer, pages: Pages, entry, slots, layer):
    """Stored elements [..., width] of the keys at `slots` [...], and which slots lie in the cache [...]."""
    if not entry.split:
        rows, valid = read_slots(buffer, pages, slots, layer)
        return view_as(rows[..., 0, :], entry.dtype), valid
    values, scales = split_page(pages, entry, buffer.dtype.itemsize)
    value_rows, valid = read_slots(buffer, values, slots, layer)
    scale_rows, _ = read_slots(buffer, scales, slots, layer)
    rows = jnp.concatenate([value_rows, scale_rows], axis=-1)[..., 0, :]
    return view_as(rows, entry.dtype), valid
