"""Reading and writing entries of the flat buffer as windows of rows.

Default JAX indexes with int32, and real caches have more than 2**31 elements.  So the buffer is seen as rows of fewer
elements than that (the reshape is free), and an entry is addressed by its row and its first element in the row:
block-major buffers get one row a block, layer-major ones one row a layer, or a layer and a block.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.pages import Pages

ROW_LIMIT = 2**31

AXES = ("layer", "block", "head", "token")


@dataclass(frozen=True)
class RowView:
    """The buffer as `shape`, and for each axis of the cache the index or the column that it moves."""

    shape: tuple[int, ...]
    origin: tuple[int, ...]
    """Where entry (0, 0, 0, 0) begins: an index a leading axis, then the column."""
    steps: dict[str, tuple[int, ...]]
    """What one step along an axis adds to it."""


def row_view(pages: Pages) -> RowView:
    """The coarsest view whose rows have fewer than 2**31 elements; ValueError where the strides allow none."""
    counts = (pages.num_layers, pages.num_blocks, pages.num_heads, pages.block_size)
    strides = (pages.layer_stride, pages.block_stride, pages.head_stride, pages.token_stride)
    axes = sorted(((s, n, a) for s, n, a in zip(strides, counts, AXES, strict=True) if n > 1), reverse=True)
    row, column = pages.size, pages.offset
    shape, origin, split = [], [], []
    while axes and (not shape or row >= ROW_LIMIT):
        stride, _, axis = axes[0]
        inside = column % stride + sum(s * (n - 1) for s, n, _ in axes[1:]) + pages.width
        if row % stride or inside > stride:
            break
        axes.pop(0)
        shape.append(row // stride)
        origin.append(column // stride)
        split.append(axis)
        row, column = stride, column % stride
    if row >= ROW_LIMIT:
        raise ValueError(
            f"a buffer of {pages.size} elements with strides {dict(zip(AXES, strides, strict=True))} and offset "
            f"{pages.offset} cannot be seen as rows of fewer than 2**31 elements: outer strides must divide the size"
        )
    steps: dict[str, tuple[int, ...]] = {axis: (0,) * len(shape) + (stride,) for stride, _, axis in axes}
    steps |= {axis: tuple(int(i == j) for j in range(len(shape) + 1)) for i, axis in enumerate(split)}
    return RowView((*shape, row), (*origin, column), steps)


def read_entries(buffer: jax.Array, pages: Pages, *, layer, block, head, token) -> jax.Array:
    """Windows [..., width] of the entries at index arrays of one shape [...], all in range."""
    view = row_view(pages)
    start = _start(view, layer=layer, block=block, head=head, token=token)
    leading = tuple(range(len(view.shape) - 1))
    return lax.gather(
        buffer.reshape(view.shape),
        start,
        lax.GatherDimensionNumbers(
            offset_dims=(start.ndim - 1,), collapsed_slice_dims=leading, start_index_map=(*leading, len(leading))
        ),
        slice_sizes=(*[1] * len(leading), pages.width),
        mode="promise_in_bounds",
    )


def write_entries(buffer: jax.Array, pages: Pages, rows: jax.Array, keep, *, layer, block, head, token) -> jax.Array:
    """The buffer with windows `rows` [..., width] stored where `keep` [...] holds, and nothing else touched."""
    view = row_view(pages)
    start = _start(view, layer=layer, block=block, head=head, token=token)
    start = jnp.where(keep[..., None], start, jnp.int32(ROW_LIMIT - 1))  # out of bounds: dropped
    leading = tuple(range(len(view.shape) - 1))
    return lax.scatter(
        buffer.reshape(view.shape),
        start,
        rows,
        lax.ScatterDimensionNumbers(
            update_window_dims=(start.ndim - 1,),
            inserted_window_dims=leading,
            scatter_dims_to_operand_dims=(*leading, len(leading)),
        ),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    ).reshape(buffer.shape)


def read_slots(buffer: jax.Array, pages: Pages, slots: jax.Array, layer) -> tuple[jax.Array, jax.Array]:
    """Entries of all heads at `slots` [...]: windows [..., H, width], and which slots lie in the cache [...].

    What is returned for the others is an entry of the cache, to be masked by the caller.
    """
    index, valid = _locate(pages, slots, layer)
    return read_entries(buffer, pages, **index), valid


def write_slots(buffer: jax.Array, pages: Pages, rows: jax.Array, slots: jax.Array, layer) -> jax.Array:
    """The buffer with windows `rows` [..., H, width] stored at `slots` [...]; those outside the cache are skipped."""
    index, valid = _locate(pages, slots, layer)
    return write_entries(buffer, pages, rows, jnp.broadcast_to(valid[..., None], index["head"].shape), **index)


def _locate(pages, slots, layer):
    valid = (slots >= 0) & (slots < pages.num_slots) & (layer >= 0) & (layer < pages.num_layers)
    slots = jnp.where(valid, slots, 0)[..., None]
    head = jnp.arange(pages.num_heads, dtype=jnp.int32)
    shape = (*slots.shape[:-1], pages.num_heads)
    index = {
        "layer": jnp.where((layer >= 0) & (layer < pages.num_layers), layer, 0),
        "block": slots // pages.block_size,
        "head": head,
        "token": slots % pages.block_size,
    }
    return {axis: jnp.broadcast_to(i, shape) for axis, i in index.items()}, valid


def _start(view, **index):
    """Start indices [..., rank of the view] of the windows."""
    columns = []
    for dimension, first in enumerate(view.origin):
        column = jnp.int32(first)
        for axis, i in index.items():
            if axis in view.steps and (step := view.steps[axis][dimension]):
                column = column + i.astype(jnp.int32) * jnp.int32(step)
        columns.append(jnp.broadcast_to(column, index["block"].shape))
    return jnp.stack(columns, axis=-1)
