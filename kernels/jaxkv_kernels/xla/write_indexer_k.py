"""Stores indexer keys; quantised ones into split pages."""

from functools import partial

import jax

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.xla.rows import write_slots
from jaxkv_kernels.xla.split_page import split_page


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """k [T, head_dim] into slots [T] of a layer; the new buffer."""
    rows = view_as(entry.encode((k,)), buffer.dtype)[:, None]
    if not entry.split:
        return write_slots(buffer, pages, rows, slot_mapping, layer)
    values, scales = split_page(pages, entry, buffer.dtype.itemsize)
    buffer = write_slots(buffer, values, rows[..., : values.width], slot_mapping, layer)
    return write_slots(buffer, scales, rows[..., values.width :], slot_mapping, layer)
