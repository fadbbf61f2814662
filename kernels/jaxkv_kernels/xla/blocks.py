"""Copying, reading and writing whole blocks, all layers and groups at once."""

from itertools import accumulate
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Buffer, Pages, arrays_of, read_entries, updated, write_entries
from jaxkv_kernels.calls import CopyBlocks, ReadBlocks, WriteBlocks


def _moved(pages: Pages) -> tuple[Pages, ...]:
    """Addresses of the units that are moved: if blocks are runs, whole blocks as single entries; otherwise entries."""
    return (pages.whole_blocks,) if pages.blocks_are_runs else pages.parts


def _grid(pages, blocks):
    """Index arrays [n, ...] over the entries of each block, in the order in which they lie in memory."""
    counts = [count for _, count, _ in pages.inner_axes]
    grid = jnp.meshgrid(blocks, *(jnp.arange(n, dtype=jnp.int32) for n in counts), indexing="ij")
    return dict(zip(("block", *(axis for axis, _, _ in pages.inner_axes)), grid, strict=True))


def _valid(pages, blocks):
    return (blocks >= 0) & (blocks < pages.num_blocks)


def read_rows(buffer, pages, blocks):
    """Rows [n, block_elements] of `blocks` [n]; 0 for ids outside the cache."""
    valid = _valid(pages, blocks)
    parts, known = _moved(pages), jnp.where(valid, blocks, 0)
    arrays = arrays_of(buffer, len(parts))
    found = [read_entries(x, moved, **_grid(moved, known)) for x, moved in zip(arrays, parts, strict=True)]
    rows = jnp.concatenate([entries.reshape(blocks.size, prod(entries.shape[1:])) for entries in found], axis=1)
    return jnp.where(valid[:, None], rows, 0)


def write_rows(buffer: Buffer, pages: Pages, blocks: jax.Array, rows: jax.Array, keep: Any = True) -> Buffer:
    """The buffer with rows [n, block_elements] stored in `blocks` [n].

    Ids that are outside the cache, or for which `keep` is false, are skipped.
    """
    keep, parts = _valid(pages, blocks) & keep, _moved(pages)

    def written(array, moved, count, end):
        index = _grid(moved, blocks)
        shape = index["block"].shape
        kept = jnp.broadcast_to(keep.reshape(-1, *[1] * (len(shape) - 1)), shape)
        entries = rows[:, end - count : end].reshape(*shape, moved.width)
        return write_entries(array, moved, entries, kept, **index)

    counts = [prod(count for _, count, _ in moved.inner_axes) * moved.width for moved in parts]
    return updated(buffer, written, parts, counts, [*accumulate(counts)])


@jax.jit
def copy_blocks(call: CopyBlocks) -> Buffer:
    """The buffer with blocks `src` copied over blocks `dst`; all are read before any is written.

    Pairs with an id outside the cache are skipped.
    """
    keep = (call.src >= 0) & (call.src < call.pages.num_blocks)
    return write_rows(call.buffer, call.pages, call.dst, read_rows(call.buffer, call.pages, call.src), keep)


@jax.jit
def read_blocks(call: ReadBlocks) -> jax.Array:
    """Blocks as rows [n, block_elements]; rows of ids outside the cache are 0."""
    return read_rows(call.buffer, call.pages, call.blocks)


@jax.jit
def write_blocks(call: WriteBlocks) -> Buffer:
    """The buffer with rows stored in blocks; ids outside the cache are skipped."""
    return write_rows(call.buffer, call.pages, call.blocks, call.data)
