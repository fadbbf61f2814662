"""The runs of a whole block, as kernels index them."""

from dataclasses import dataclass

from jax import lax

from jaxkv_kernels.addressing import Pages, RowView, Runs, row_view, runs_of
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv


@dataclass(frozen=True)
class BlockRuns(Runs):
    """The runs of a block, in a view of the buffer."""

    view: RowView

    def index(self, block, run):
        """Where a run begins: an index per leading axis of the view, then the column."""
        indices = {}
        for axis, count, _ in reversed(self.axes):
            indices[axis] = lax.rem(run, run.dtype.type(count))
            run = floordiv(run, count)
        return self.view.index(block=block, **indices)


def block_runs(pages: Pages) -> BlockRuns:
    """The runs of the blocks of `pages`; ValueError where a row of the view is too long for int32."""
    runs = runs_of(pages)
    view = row_view(pages.whole_blocks if pages.blocks_are_runs else pages)
    return BlockRuns(runs.axes, runs.length, runs.offset, view)
