"""Reading and writing entries of the flat buffer, as windows (runs of elements) in its rows; see `row_view.py`."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.addressing.row_view import ROW_LIMIT, entry_view


def read_entries(buffer: jax.Array, pages: Pages, *, block, **axes) -> jax.Array:
    """The entries [..., width] at index arrays that all have the same shape [...].  All indices must be in range.

    `axes` are `layer`, `head`, `token` and, if entries have several parts, `part`.
    """
    view = entry_view(pages)
    start = _start(view, block=block, **axes)
    leading = tuple(range(len(view.shape) - 1))
    return lax.gather(
        buffer.reshape(view.shape),
        start,
        lax.GatherDimensionNumbers(
            offset_dims=(start.ndim - 1,), collapsed_slice_dims=leading, start_index_map=(*leading, len(leading))
        ),
        slice_sizes=(*[1] * len(leading), view.window),
        mode="promise_in_bounds",
    ).reshape(*block.shape, pages.width)


def write_entries(buffer: jax.Array, pages: Pages, rows: jax.Array, keep, **axes) -> jax.Array:
    """The buffer with entries `rows` [..., width] stored where `keep` [...] is true; everything else is unchanged.

    `axes` are the index arrays [...], as in `read_entries`.
    """
    view = entry_view(pages)
    start = _start(view, **axes)
    start = jnp.where(keep[..., None, None], start, jnp.int32(ROW_LIMIT - 1))  # out of bounds: dropped
    leading = tuple(range(len(view.shape) - 1))
    return lax.scatter(
        buffer.reshape(view.shape),
        start,
        rows.reshape(*start.shape[:-1], view.window),
        lax.ScatterDimensionNumbers(
            update_window_dims=(start.ndim - 1,),
            inserted_window_dims=leading,
            scatter_dims_to_operand_dims=(*leading, len(leading)),
        ),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    ).reshape(buffer.shape)


def read_slots(buffer: jax.Array, pages: Pages, slots: jax.Array, layer) -> tuple[jax.Array, jax.Array]:
    """Entries [..., H, width] of all heads at `slots` [...], and whether each slot is in the cache, bool [...].

    Entries at slots outside the cache are set to 0 before anything is computed from them.  Otherwise, gradients could
    be NaN.
    """
    index, valid = _locate(pages, slots, layer)
    return jnp.where(valid[..., None, None], read_entries(buffer, pages, **index), 0), valid


def write_slots(buffer: jax.Array, pages: Pages, rows: jax.Array, slots: jax.Array, layer) -> jax.Array:
    """The buffer with entries `rows` [..., H, width] stored at `slots` [...]; slots outside the cache are skipped."""
    index, valid = _locate(pages, slots, layer)
    keep = jnp.broadcast_to(valid[..., None], index["head"].shape)
    if keep.size == 1:
        # XLA replaces a scatter of one window by a dynamic-update-slice.  On CPUs, it fuses that with operations that
        # read the buffer, and then copies the buffer.  A second entry, which is not kept, avoids this.
        rows, keep = jnp.broadcast_to(rows, (2, *rows.shape)), jnp.stack([keep, jnp.zeros_like(keep)])
        index = {name: jnp.broadcast_to(at, keep.shape) for name, at in index.items()}
    return write_entries(buffer, pages, rows, keep, **index)


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


def _start(view, **indices):
    """Start indices of the windows of entries, int32 [..., windows per entry, rank of the view]."""
    indices = {axis: i[..., None] for axis, i in indices.items()}
    place = view.index(**indices)
    shape = jnp.broadcast_shapes(indices["block"].shape, *(jnp.shape(i) for i in place))
    return jnp.stack([jnp.broadcast_to(jnp.int32(i), shape) for i in place], axis=-1)
