"""Whole blocks, all layers at once, as rows of `Pages.block_elements`."""

import jax.numpy as jnp

from jaxkv_kernels.xla.rows import read_entries, write_entries


def _grid(pages, blocks):
    """Index arrays [n, ...] over the entries of each block, in the order in which they lie in memory."""
    counts = [count for _, count, _ in pages.inner_axes]
    grid = jnp.meshgrid(blocks, *(jnp.arange(n, dtype=jnp.int32) for n in counts), indexing="ij")
    return dict(zip(("block", *(axis for axis, _, _ in pages.inner_axes)), grid, strict=True))


def _valid(pages, blocks):
    return (blocks >= 0) & (blocks < pages.num_blocks)


def read_rows(buffer, pages, blocks):
    """Rows [n, block_elements] of `blocks` [n]; 0 where the id is not a block of the cache."""
    valid = _valid(pages, blocks)
    blocks = jnp.where(valid, blocks, 0)
    if pages.blocks_are_runs:
        rows = buffer.reshape(pages.num_blocks, pages.block_stride).at[blocks].get(mode="promise_in_bounds")
    else:
        rows = read_entries(buffer, pages, **_grid(pages, blocks)).reshape(blocks.size, pages.block_elements)
    return jnp.where(valid[:, None], rows, 0)


def write_rows(buffer, pages, blocks, rows, keep=True):
    """The buffer with rows [n, block_elements] in `blocks` [n]; ids outside the cache, or not kept, are skipped."""
    keep = _valid(pages, blocks) & keep
    if pages.blocks_are_runs:
        blocks = jnp.where(keep, blocks, pages.num_blocks)
        runs = buffer.reshape(pages.num_blocks, pages.block_stride)
        return runs.at[blocks].set(rows, mode="drop").reshape(buffer.shape)
    index = _grid(pages, blocks)
    keep = jnp.broadcast_to(keep.reshape(-1, 1, 1, 1), index["block"].shape)
    return write_entries(buffer, pages, rows.reshape(*keep.shape, pages.width), keep, **index)
