"""A whole block, all layers at once, as runs of contiguous memory: as few as the strides allow."""

from dataclasses import dataclass
from math import prod

from jaxkv_kernels.addressing.pages import Pages


@dataclass(frozen=True)
class Runs:
    """The runs of a block, in elements; one after the other they are the block as it is exported."""

    axes: tuple[tuple[str, int, int], ...]
    """(axis, count, stride) of the axes that the runs are counted over, outermost in memory first."""
    length: int
    """Elements per run."""
    offset: int
    """Where the first run of block 0 begins."""

    @property
    def count(self) -> int:
        """Runs per block."""
        return prod(count for _, count, _ in self.axes)


def runs_of(pages: Pages) -> Runs:
    """One run where a block is contiguous, padding and other groups included; else the runs of its entries."""
    if pages.blocks_are_runs:
        return Runs((), pages.block_stride, 0)
    axes: list[tuple[str, int, int]] = []
    length = pages.width
    for axis, count, stride in reversed(pages.inner_axes):
        if not axes and stride == length:
            length *= count
        elif count > 1:
            axes.insert(0, (axis, count, stride))
    return Runs(tuple(axes), length, pages.offset)
