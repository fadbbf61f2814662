"""Reading and writing encoded entries at slots of a layer, for formats with and without split pages."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.addressing.rows import read_slots, write_slots
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import Part


def load_entries(
    buffer: jax.Array, pages: Pages, entry: Entry, slots: jax.Array, layer, *, dtype=None
) -> tuple[jax.Array, jax.Array]:
    """Encoded entries [..., H, width] of all heads at `slots` [...], and whether each is in the cache.

    Entries are elements of `dtype`, by default the natural one, which `entry.decode` expects.  Those at slots outside
    the cache are 0, and the caller must mask the values that they decode to.
    """
    found = [read_slots(buffer, run, slots, layer) for run in entry_runs(pages, entry, buffer.dtype.itemsize)]
    # Bytes in a buffer of bf16 are joined as bytes: XLA's older emitters quiet signalling NaNs when they join bf16.
    return jnp.concatenate([view_as(rows, dtype or entry.dtype) for rows, _ in found], axis=-1), found[0][1]


def store_entries(buffer: jax.Array, pages: Pages, entry: Entry, rows: jax.Array, slots: jax.Array, layer) -> jax.Array:
    """The buffer with encoded entries [..., H, width] stored at `slots` [...]; slots outside the cache are skipped."""
    rows, first = view_as(rows, buffer.dtype), 0
    for run in entry_runs(pages, entry, buffer.dtype.itemsize):
        buffer = write_slots(buffer, run, rows[..., first : first + run.width], slots, layer)
        first += run.width
    return buffer


def entry_runs(pages: Pages, entry: Entry, itemsize: int) -> list[Pages]:
    """Addresses of the runs of bytes that make up an entry.

    These are the whole entry, its parts in each region of a split page, or its key and its value, if these lie apart.
    `itemsize` is that of the buffer.
    """
    if not entry.split:
        offsets = [pages.offset + part * pages.part_stride for part in range(pages.num_parts)]
        return [replace(pages, offset=offset, num_parts=1, part_stride=0) for offset in offsets]

    def run(first: Part) -> Pages:
        width = (first.step or 0) // itemsize
        return replace(pages, token_stride=width, width=width, offset=pages.offset + first.offset // itemsize)

    return [run(first) for first, *_ in entry.regions(pages.block_size)]
