"""A layout in numbers: as a table, and as the pieces of its memory map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxkv.layout import AXES, CacheLayout
from jaxkv_kernels.entries import Entry, IndexerEntry, KVEntry, MLAEntry

SHOWN = 8
"""Axes of up to so many steps are mapped in full; of longer ones the first three and the last."""


def table(groups: Mapping[str, CacheLayout]) -> str:
    """The numbers of a layout (under the name "") or of the groups that share a buffer, in at most 100 columns."""
    first = next(iter(groups.values()))
    lines = [f"{headline(groups)} ({first.nbytes:,} bytes)"]
    for name, layout in groups.items():
        lines += ["", f"{name}:"] if name else []
        lines += [f"  {line}" if name and line else line for line in _section(layout)]
    if len(groups) > 1:
        lines += ["", f"block with all groups: {first.block_nbytes:,} bytes ({human(first.block_nbytes)})"]
    return "\n".join(lines)


def headline(groups: Mapping[str, CacheLayout]) -> str:
    """Order, dtype and size of the buffer."""
    first = next(iter(groups.values()))
    orders = dict.fromkeys(layout.order for layout in groups.values())
    return f"{'/'.join(orders)}, {first.dtype}, {human(first.nbytes)}"


def human(nbytes: int) -> str:
    """Bytes as people say them: `640 B`, `72.0 KiB`, `3.9 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, units = float(nbytes), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    # What would be rounded to 1024.0 belongs to the next unit.
    while size >= 1023.95 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"


def _counts(layout: CacheLayout) -> dict[str, int]:
    """Lengths of the axes, outermost in memory first."""
    counts = {"L": layout.num_layers, "B": layout.num_blocks, "H": layout.num_heads, "N": layout.block_size}
    return {AXES[axis]: counts[axis] for axis in layout.order if axis in counts}


def _section(layout: CacheLayout) -> list[str]:
    item, yes_no = layout.itemsize, {True: "yes", False: "no"}
    lines = [
        f"entry        {layout.entry}",
        f"             {layout.entry.nbytes:,} bytes, {layout.width:,} elements",
        "",
        f"{'axis':<8}{'count':>14}{'stride, elements':>20}{'stride, bytes':>20}",
    ]
    for axis, count in _counts(layout).items():
        stride = getattr(layout.strides, axis)
        about = f"{human(stride * item):>14}" if stride * item >= 1024 else ""
        lines.append(f"{axis:<8}{count:>14,}{stride:>20,}{stride * item:>20,}{about}")
    return [
        *lines,
        "",
        f"offset       {layout.offset:,} elements, {layout.offset * item:,} bytes",
        f"alignment    {layout.alignment:,} bytes",
        f"contiguous   a block: {yes_no[layout.is_block_contiguous]}, a layer: {yes_no[layout.is_layer_contiguous]}",
        f"block        {layout.block_nbytes:,} bytes ({human(layout.block_nbytes)})",
        f"fingerprint  {layout.fingerprint}",
    ]


@dataclass(frozen=True)
class Piece:
    """A run of bytes [start, stop), counted from the buffer's start."""

    kind: str
    """An axis ("block", "layer", "head", "token"), or "part" (of an entry), "padding" or "elided"."""
    start: int
    stop: int
    label: str
    detail: str
    index: int = 0
    """Position on its axis, or in its entry."""
    group: str = ""


@dataclass(frozen=True)
class Band:
    """A row of the memory map: pieces one after the other, without a gap, that enlarge a part of the row above."""

    title: str
    note: str
    pieces: tuple[Piece, ...]
    row: int
    group: str | None
    """The group that alone is shown; None: all of them."""


def bands(groups: Mapping[str, CacheLayout]) -> list[Band]:
    """The memory map: the whole buffer, then what its first step is made of, and so on down to an entry.

    `groups` is a layout under the name "" or a `PackedLayout`, whose groups part below the second row.  ValueError
    where the steps of an axis do not lie one after the other.
    """
    views = [_View(name, layout) for name, layout in groups.items()]
    for view in views:
        view.check_order()
    layout, outer, size = views[0].layout, views[0].axes[0], views[0].layout.nbytes
    start = min(view.start for view in views)
    span = max(view.start + view.span(1) for view in views) - start
    items = _items(outer, start, span)
    # Where blocks are runs, what lies in a run before the first entry belongs to the block.
    low = 0 if layout.blocks_are_runs else start
    high = min(low + outer.stride, size)
    inside = sorted((piece for view in views for piece in view.pieces(1, view.start)), key=lambda piece: piece.start)
    note = "; ".join(f"{view.name}: {view.note(1)}" if view.name else view.note(1) for view in views)
    return [
        Band("buffer", _note(outer, span), _fill(items, 0, size), 0, None),
        Band(items[0].label, note, _fill(inside, low, high), 1, None),
        *(band for view in views for band in view.deeper(items[0].label, high)),
    ]


@dataclass(frozen=True)
class _Axis:
    name: str
    count: int
    stride: int
    """Bytes."""


@dataclass(frozen=True)
class _View:
    """A group in bytes; at depth d the d outermost axes are fixed."""

    name: str
    layout: CacheLayout

    @cached_property
    def axes(self) -> list[_Axis]:
        """Outermost first, without heads or tokens that there is only one of."""
        counts, item = _counts(self.layout), self.layout.itemsize
        axes = [_Axis(axis, count, getattr(self.layout.strides, axis) * item) for axis, count in counts.items()]
        return [axis for axis in axes if axis.count > 1 or axis.name in ("block", "layer")]

    @property
    def start(self) -> int:
        return self.layout.offset * self.layout.itemsize

    def is_page(self, depth: int) -> bool:
        """Whether the next axis is a split indexer page's: all tokens' values, and then all their scales."""
        inner, entry = self.axes[depth:], self.layout.entry
        return isinstance(entry, IndexerEntry) and entry.split and bool(inner) and inner[0].name == "token"

    def span(self, depth: int) -> int:
        """Bytes from the first to the last entry, both included."""
        return sum((axis.count - 1) * axis.stride for axis in self.axes[depth:]) + self.layout.entry.nbytes

    def check_order(self) -> None:
        """ValueError where the steps of an axis interleave, which boxes side by side cannot show."""
        for depth, axis in enumerate(self.axes, 1):
            if axis.count > 1 and axis.stride < self.span(depth):
                raise ValueError(
                    f"the {axis.count:,} {axis.name}s interleave, one every {axis.stride:,} B, each over "
                    f"{self.span(depth):,} B: a memory map shows only what lies one after the other"
                )

    def pieces(self, depth: int, start: int) -> list[Piece]:
        """What begins at `start`: the steps of an axis, or the parts of an entry."""
        parts = _parts(self.layout.entry)
        if depth == len(self.axes):
            return _in_a_row(parts, start, self.name)
        axis = self.axes[depth]
        if not self.is_page(depth):
            return _items(axis, start, self.span(depth + 1), self.name)
        (_, values, _), (_, scale, _) = parts
        scales = "scales", axis.count * scale, f"{axis.count:,} x float32"
        tokens = _items(_Axis("token", axis.count, values), start, values, self.name)
        return [*tokens, *_in_a_row([scales], start + axis.count * values, self.name)]

    def note(self, depth: int) -> str:
        """What the pieces are, in words."""
        entry = self.layout.entry
        if depth == len(self.axes):
            return f"one entry, {type(entry).__name__} {entry.format}, {entry.nbytes:,} B"
        if self.is_page(depth):
            return f"{self.axes[depth].count:,} tokens: all values, then all scales"
        return _note(self.axes[depth], self.span(depth + 1))

    def deeper(self, block: str, high: int) -> list[Band]:
        """The rows below the second, down to an entry; `high` is where the second ends."""
        path, pieces, result = [block, self.name] if self.name else [block], self.pieces(1, self.start), []
        for depth, axis in enumerate(self.axes[1:], 2):
            if self.is_page(depth - 1):
                # The row above shows each token's values; this one the rest of it.
                source, scale = pieces[-1], _parts(self.layout.entry)[1][1]
                high, note = source.stop, f"{axis.count:,} x float32, one a token"
                pieces = _items(_Axis("token", axis.count, scale), source.start, scale, self.name)
            else:
                source = pieces[0]
                high = min(source.start + axis.stride, high)
                pieces, note = self.pieces(depth, source.start), self.note(depth)
            path.append(source.label)
            result.append(Band(" · ".join(path), note, _fill(pieces, source.start, high), depth, self.name))
        return result


def _items(axis: _Axis, start: int, span: int, group: str = "") -> list[Piece]:
    """The steps of an axis, each with `span` bytes of entries; the middle of a long axis is one elided piece."""
    every = range(axis.count)
    head, tail = (every, every[:0]) if axis.count <= SHOWN else (every[:3], every[-1:])

    def item(i: int) -> Piece:
        first = start + i * axis.stride
        return Piece(axis.name, first, first + span, f"{axis.name} {i:,}", human(span), i, group)

    middle = []
    if tail:
        low, high = start + len(head) * axis.stride, start + tail[0] * axis.stride
        middle = [Piece("elided", low, high, "…", f"{tail[0] - len(head):,} more", len(head), group)]
    return [*map(item, head), *middle, *map(item, tail)]


def _in_a_row(parts: Sequence[tuple[str, int, str]], start: int, group: str) -> list[Piece]:
    pieces = []
    for i, (name, nbytes, detail) in enumerate(parts):
        pieces.append(Piece("part", start, start + nbytes, name, detail, i, group))
        start += nbytes
    return pieces


def _parts(entry: Entry) -> list[tuple[str, int, str]]:
    """(name, bytes, values) of what an entry consists of, in the order of memory."""
    if entry.format == "fp8_ds_mla":
        latent, rope = entry.sizes
        scales = entry.nbytes - latent - 2 * rope
        return [
            ("latent", latent, f"{latent} x e4m3"),
            ("scales", scales, f"{scales // 4} x float32"),
            ("rope", 2 * rope, f"{rope} x bfloat16"),
        ]
    if isinstance(entry, IndexerEntry) and entry.split:
        return [("values", entry.head_dim, f"{entry.head_dim} x e4m3"), ("scale", 4, "1 x float32")]
    parts: dict[type[Entry], tuple[str, ...]] = {
        MLAEntry: ("latent", "rope"),
        KVEntry: ("K", "V"),
        IndexerEntry: ("key",),
    }
    if type(entry) not in parts or entry.format not in ("bf16", "f16", "f32", "fp8"):
        return [("entry", entry.nbytes, entry.format)]
    names = parts[type(entry)]
    values = "e4m3" if entry.format == "fp8" else entry.dtype.name
    item = entry.dtype.itemsize
    return [(name, size * item, f"{size} x {values}") for name, size in zip(names, entry.sizes, strict=True)]


def _fill(pieces: Sequence[Piece], low: int, high: int) -> tuple[Piece, ...]:
    """The pieces and, as padding, every byte of [low, high) that they leave."""
    ends = [low, *(piece.stop for piece in pieces)]
    starts = [*(piece.start for piece in pieces), high]
    filled = []
    for i, (end, start) in enumerate(zip(ends, starts, strict=True)):
        if start > end:
            filled.append(Piece("padding", end, start, "padding", human(start - end)))
        filled += pieces[i : i + 1]
    return tuple(filled)


def _note(axis: _Axis, span: int) -> str:
    if axis.count == 1:
        return f"1 {axis.name}"
    gaps = f", with gaps of {axis.stride - span:,} B" if axis.stride > span else ""
    return f"{axis.count:,} {axis.name}s, one every {axis.stride:,} B{gaps}"
