"""Whole blocks, all layers at once, as runs of memory."""

from dataclasses import dataclass, replace
from math import prod

from jax import lax

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.addressing.row_view import RowView, row_view
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv


@dataclass(frozen=True)
class BlockRuns:
    """Where the runs of a block lie; one after the other they are the block as it travels."""

    view: RowView
    axes: tuple[tuple[str, int], ...]
    """(axis, count) of the axes that the runs are counted over, outermost in memory first."""
    length: int
    """Elements a run."""

    @property
    def count(self) -> int:
        """Runs a block."""
        return prod(count for _, count in self.axes)

    def index(self, block, run):
        """Where a run begins: an index a leading axis of the view, then the column."""
        indices = {}
        for axis, count in reversed(self.axes):
            indices[axis] = lax.rem(run, run.dtype.type(count))
            run = floordiv(run, count)
        return self.view.index(block=block, **indices)


def block_runs(pages: Pages) -> BlockRuns:
    """As few runs as the strides allow; ValueError where a row of the view is too long for int32."""
    if pages.blocks_are_runs:
        length = pages.block_stride
        alone = replace(pages, num_layers=1, num_heads=1, block_size=1, offset=0, width=length)
        return BlockRuns(row_view(alone), (), length)
    axes, length = [], pages.width
    for axis, count, stride in reversed(pages.inner_axes):
        if not axes and stride == length:
            length *= count
        elif count > 1:
            axes.insert(0, (axis, count))
    return BlockRuns(row_view(pages), tuple(axes), length)
