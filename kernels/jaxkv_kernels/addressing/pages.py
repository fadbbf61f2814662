"""Where the entries of a paged cache lie in its flat buffer."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pages:
    """Counts and strides of a cache, all of them Python ints; strides are in elements of the buffer.

    Entry (layer, block, head, token) consists of `num_parts` runs of `width` elements.  The first one begins at element
    offset + layer * layer_stride + block * block_stride + head * head_stride + token * token_stride, and the second one
    (the value of a key, where they lie apart) `part_stride` elements after it.
    """

    num_layers: int
    num_blocks: int
    num_heads: int
    block_size: int
    layer_stride: int
    block_stride: int
    head_stride: int
    token_stride: int
    offset: int
    width: int
    size: int
    """Elements of the whole buffer."""
    num_parts: int = 1
    part_stride: int = 0

    def divided(self, num_parts: int) -> "Pages":
        """The same addresses, with entries of at least `num_parts` parts: adjacent ones, if there was one."""
        if num_parts <= self.num_parts:
            return self
        width = self.width // num_parts
        return replace(self, width=width, num_parts=num_parts, part_stride=width)

    def resized(self, old: int, new: int) -> "Pages":
        """The same addresses, counted in elements of `new` bytes instead of `old`, which must divide them."""
        steps = (
            "layer_stride",
            "block_stride",
            "head_stride",
            "token_stride",
            "part_stride",
            "offset",
            "width",
            "size",
        )
        return replace(self, **{name: getattr(self, name) * old // new for name in steps})

    @property
    def whole_blocks(self) -> "Pages":
        """Whole blocks as single entries; only if `blocks_are_runs`."""
        one = dict.fromkeys(("num_layers", "num_heads", "block_size", "num_parts"), 1)
        return replace(self, **one, offset=0, width=self.block_stride)

    @property
    def num_slots(self) -> int:
        """Slots of one layer: blocks times tokens per block."""
        return self.num_blocks * self.block_size

    @property
    def inner_axes(self) -> tuple[tuple[str, int, int], ...]:
        """(axis, count, stride) of the axes within a block, outermost in memory first."""
        axes = (
            ("layer", self.num_layers, self.layer_stride),
            ("token", self.block_size, self.token_stride),
            ("head", self.num_heads, self.head_stride),
            *([("part", self.num_parts, self.part_stride)] if self.num_parts > 1 else []),
        )
        return tuple(sorted(axes, key=lambda axis: -axis[2]))

    @property
    def blocks_are_runs(self) -> bool:
        """Whether the buffer is divided into blocks: block b is the run [b * block_stride, (b + 1) * block_stride).

        Padding and the other groups of a packed block are part of the run.
        """
        end = self.offset + sum((count - 1) * stride for _, count, stride in self.inner_axes) + self.width
        return end <= self.block_stride and self.block_stride * self.num_blocks == self.size

    @property
    def block_elements(self) -> int:
        """Elements of an exported block: its run, or only its entries if blocks are not runs."""
        if self.blocks_are_runs:
            return self.block_stride
        return self.num_layers * self.num_heads * self.block_size * self.num_parts * self.width

    @property
    def row_axes(self) -> tuple[tuple[str, int, int], ...]:
        """`inner_axes`, but with their strides in an exported block."""
        if self.blocks_are_runs:
            return self.inner_axes
        axes, extent = [], self.width
        for axis, count, _ in reversed(self.inner_axes):
            axes.append((axis, count, extent))
            extent *= count
        return tuple(reversed(axes))

    @property
    def row_offset(self) -> int:
        """The element of an exported block at which its first entry begins."""
        return self.offset if self.blocks_are_runs else 0
