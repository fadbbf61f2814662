"""The flat buffer as rows of fewer than 2**31 elements.

Default JAX indexes with int32, and real caches have more elements than that.  So the buffer is seen as rows (the
reshape is free), and an entry is addressed by its row and its first element in the row: block-major buffers get one row
a block, layer-major ones one row a layer, or a layer and a block.
"""

from dataclasses import dataclass
from typing import Any

from jaxkv_kernels.addressing.pages import Pages

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

    def index(self, **indices) -> tuple[Any, ...]:
        """Where the entry at `layer`, `block`, `head` and `token` begins: an index a leading axis, then the column.

        int32 integers or arrays of them.
        """
        place = list(self.origin)
        for axis, i in indices.items():
            for dimension, step in enumerate(self.steps.get(axis, ())):
                if step:
                    place[dimension] = place[dimension] + i * step
        return tuple(place)


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
