"""A whole block, in all layers, as the fewest runs of contiguous memory that the strides allow."""

from dataclasses import dataclass
from math import prod

from jaxkv_kernels.addressing.pages import Pages


@dataclass(frozen=True)
class Runs:
    """The runs of a block, counted in elements.  Concatenated, they are the exported block."""

    axes: tuple[tuple[str, int, int], ...]
    """(axis, count, stride) of the axes that enumerate the runs, outermost in memory first."""
    length: int
    """Elements per run."""
    offset: int
    """The element of the buffer at which the first run of block 0 begins."""

    @property
    def count(self) -> int:
        """Runs per block."""
        return prod(count for _, count, _ in self.axes)


def runs_of(pages: Pages) -> Runs:
    """The runs of a block: one run, with padding and other groups, if blocks are runs; otherwise runs of entries."""
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
