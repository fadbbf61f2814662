"""A layout as numbers: its table, and the bands (rows) of its memory map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import Field

SHOWN = 8
"""Axes of up to this many steps are shown in full; of longer ones the first three and the last."""


@dataclass(frozen=True)
class Axis:
    """`count` steps of `stride` bytes along "layer", "block", "head", "token" or "part" (keys and values)."""

    name: str
    count: int
    stride: int


@dataclass(frozen=True)
class Run:
    """Where the entries lie, or the keys or the values of all entries, if these lie apart; in bytes."""

    name: str
    """"entries", "keys" or "values"."""
    fields: tuple[Field, ...]
    """What one run stores."""
    axes: tuple[Axis, ...]
    """All four axes, outermost in memory first."""
    offset: int
    """The byte of the buffer at which the first of them begins."""
    nbytes: int
    """Bytes of one of them."""
    own_array: bool = False
    """Whether values lie in an array of their own."""


@dataclass(frozen=True)
class Description:
    """The numbers to show of a layout, in bytes unless stated otherwise."""

    entry: Entry
    block_size: int
    runs: tuple[Run, ...]
    """One, of whole entries, or two, of keys and of values, if these lie apart."""
    order: str
    """The order of the axes in letters, such as `BLNHC`."""
    nbytes: int
    """Bytes of the whole buffer."""
    block_nbytes: int
    """Bytes of an exported block."""
    dtype: str
    """Dtype of the buffer."""
    itemsize: int
    alignment: int
    blocks_are_runs: bool
    is_block_contiguous: bool
    is_layer_contiguous: bool
    fingerprint: str
    shards: tuple[int, int] = (1, 1)
    """Over how many devices the tokens of requests are divided, and how many consecutive tokens a device has."""
    table: str = ""
    """The block table of a group of a `PackedLayout`."""
    note: str = ""
    """What else there is to say of a group: its rate, its table if there are several, and its window."""


def page_contents(entry: Entry) -> str:
    """What a split page stores: `all latent and rope, then all scales`."""
    return ", then ".join(f"all {_region_name(region)}" for region in entry.regions())


def _region_name(region: Sequence[Field]) -> str:
    """The names of a region's parts, without padding unless it has nothing else."""
    return " and ".join([part.name for part in region if part.name != "padding"] or ["padding"])


Descriptions = Mapping[str, Description]
"""A layout under the name "", or the groups that share a buffer, by name."""


def table(groups: Descriptions) -> str:
    """The numbers of a layout, or of the groups that share a buffer, in at most 100 columns."""
    first = next(iter(groups.values()))
    lines = [f"{headline(groups)} ({first.nbytes:,} bytes)"]
    for name, about in groups.items():
        lines += ["", f"{name}: {about.note}".rstrip(" ")] if name else []
        lines += [f"  {line}" if name and line else line for line in _section(about)]
    if len(groups) > 1:
        blocks = "block of any table" if len(_tables(groups)) > 1 else "block with all groups"
        lines += ["", f"{blocks}: {first.block_nbytes:,} bytes ({human(first.block_nbytes)})"]
    return "\n".join(lines)


def _tables(groups: Descriptions) -> list[str]:
    """The names of the groups' tables, in order."""
    return list(dict.fromkeys(about.table for about in groups.values()))


def headline(groups: Descriptions) -> str:
    """Order, dtype and size of the buffer."""
    first = next(iter(groups.values()))
    orders = dict.fromkeys(about.order for about in groups.values())
    return f"{'/'.join(orders)}, {first.dtype}, {human(first.nbytes)}"


def human(nbytes: int) -> str:
    """Human-readable bytes: `640 B`, `72.0 KiB`, `3.9 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, units = float(nbytes), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    # What would be rounded to 1024.0 belongs to the next unit.
    while size >= 1023.95 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"


def _section(about: Description) -> list[str]:
    item, yes_no = about.itemsize, {True: "yes", False: "no"}
    lines = [
        f"entry        {about.entry}",
        f"             {about.entry.nbytes:,} bytes, {about.entry.nbytes // item:,} elements",
    ]
    offsets = []
    for run in about.runs:
        apart = len(about.runs) > 1
        offset = f"{run.offset // item:,} elements, {run.offset:,} bytes"
        what = f" ({run.name} of {run.nbytes:,} bytes{', in an array of their own' * run.own_array})"
        offsets.append(f"offset       {offset}" + what * apart)
        title = run.name if apart else "axis"
        lines += ["", f"{title:<8}{'count':>14}{'stride, elements':>20}{'stride, bytes':>20}"]
        for axis in run.axes:
            size = f"{human(axis.stride):>14}" if axis.stride >= 1024 else ""
            lines.append(f"{axis.name:<8}{axis.count:>14,}{axis.stride // item:>20,}{axis.stride:>20,}{size}")
    devices, interleave = about.shards
    tokens = f"1 of {devices:,} devices' share, {interleave:,} consecutive token{'s' * (interleave > 1)} at a time"
    return [
        *lines,
        "",
        *[f"tokens       {tokens}"] * (devices > 1),
        *offsets,
        f"alignment    {about.alignment:,} bytes",
        f"contiguous   a block: {yes_no[about.is_block_contiguous]}, a layer: {yes_no[about.is_layer_contiguous]}",
        f"block        {about.block_nbytes:,} bytes ({human(about.block_nbytes)})",
        f"fingerprint  {about.fingerprint}",
    ]


@dataclass(frozen=True)
class Piece:
    """A run of bytes [start, stop), counted from the buffer's start."""

    kind: str
    """An axis ("block", "layer", "head", "token"), or "part" (of an entry or a page), "padding" or "elided"."""
    start: int
    stop: int
    label: str
    detail: str
    index: int = 0
    """Position on its axis, or in its entry."""
    group: str = ""


@dataclass(frozen=True)
class Band:
    """A row of the memory map: pieces without gaps between them, which enlarge a part of the row above."""

    title: str
    note: str
    pieces: tuple[Piece, ...]
    row: int
    group: str | None
    """The only group that is shown, or None for all, or for all of one table."""
    above: tuple[int, str | None] | None
    """`row` and `group` of the band that this one enlarges a part of; None for the first."""


def bands(groups: Descriptions) -> list[Band]:
    """The rows of the memory map: the whole buffer, then its first step in more detail, and so on down to an entry.

    If groups have several tables, there is a row for the first block of each table, as if that table had it.  Below
    these rows, each group has its own.  If keys and values lie apart, a row shows both, and those below it what comes
    first in memory.  ValueError if the steps of an axis, or keys and values, interleave in memory.
    """
    views = [_View(name, about) for name, about in groups.items()]
    for view in views:
        view.check_order()
    about, outer = views[0].about, views[0].axes[0]
    start = min(view.start for view in views)
    span = max(view.start + view.span(1) for view in views) - start
    items = views[0].items(0, start) if outer.name == "part" else _items(outer, start, span)
    # If blocks are runs, the bytes of the run before its first entry belong to the block.
    low = 0 if about.blocks_are_runs else start
    high = min(low + outer.stride, about.nbytes)
    found = [Band("buffer", _note(outer, span), _fill(items, 0, about.nbytes), 0, None, None)]
    tables = _tables(groups)
    for row, name in enumerate(tables, 1):
        inside = [view for view in views if view.about.table == name]
        pieces = sorted((x for view in inside for x in view.pieces(1, view.start)), key=lambda x: x.start)
        title = items[0].label + f" of table {name!r}" * (len(tables) > 1)
        note = "; ".join(f"{view.name}: {view.note(1)}" if view.name else view.note(1) for view in inside)
        found.append(Band(title, note, _fill(pieces, low, high), row, None, (0, None)))
    for view in views:
        found += view.deeper(items[0].label, high, len(tables), tables.index(view.about.table) + 1)
    return found


def in_words(groups: Descriptions) -> str:
    """What the memory map shows, a sentence per row, for those who cannot see it; ValueError as by `bands`."""
    rows = (f"{band.title}: {band.note}." for band in bands(groups))
    return " ".join([f"Memory map of {headline(groups)}.", *rows])


@dataclass(frozen=True)
class _View:
    """A group as the memory map shows it.  At depth d, the indices of the d outermost axes are fixed."""

    name: str
    about: Description

    @cached_property
    def runs(self) -> list[Run]:
        """The runs of the layout, in order of their first bytes."""
        return sorted(self.about.runs, key=lambda run: run.offset)

    @property
    def start(self) -> int:
        """The first byte of an entry."""
        return self.runs[0].offset

    @cached_property
    def axes(self) -> list[Axis]:
        """The axes, outermost first, without head and token axes of length 1.

        If keys and values lie apart, "part" is one of the axes.  Those outside of it are axes of both, and those inside
        of it are axes of what comes first.
        """
        axes, theirs = _shown(self.runs[0]), _shown(self.runs[-1])
        if len(self.runs) == 1:
            return axes
        if any(run.own_array for run in self.runs):
            raise ValueError("keys and values lie in an array each: a memory map shows one buffer")
        first, second = self.runs
        for depth in range(len(axes) + 1):
            if first.offset + _extent(axes[depth:]) + first.nbytes <= second.offset:
                return [*axes[:depth], Axis("part", 2, second.offset - first.offset), *axes[depth:]]
            if not all(_alike(*pair) for pair in zip(axes[depth : depth + 1], theirs[depth : depth + 1], strict=True)):
                break
        raise ValueError(
            "keys and values interleave in memory.  A memory map can show only parts that lie one after the other"
        )

    @cached_property
    def regions(self) -> list[tuple[Field, ...]]:
        """The parts of a split page, by region."""
        return self.about.entry.regions(self.about.block_size)

    def is_split_page(self, depth: int) -> bool:
        """Whether the next axis enumerates the tokens of a split page."""
        inner = self.axes[depth:]
        return self.about.entry.split and bool(inner) and inner[0].name == "token"

    def span(self, depth: int) -> int:
        """Bytes from the start of the first entry at this depth to the end of the last one."""
        names = [axis.name for axis in self.axes]
        if "part" not in names[depth:]:
            return _extent(self.axes[depth:]) + self.runs[0].nbytes
        part = names.index("part")
        second = self.runs[1]
        inner = _extent([axis for axis in second.axes if axis.name not in names[:part]]) + second.nbytes
        return _extent(self.axes[depth:part]) + self.axes[part].stride + inner

    def check_order(self) -> None:
        """ValueError if the steps of an axis interleave in memory, which adjacent boxes cannot show."""
        for depth, axis in enumerate(self.axes, 1):
            if axis.count > 1 and axis.name != "part" and axis.stride < self.span(depth):
                raise ValueError(
                    f"the {axis.count:,} {axis.name}s interleave: one begins every {axis.stride:,} B and spans "
                    f"{self.span(depth):,} B.  A memory map can show only parts that lie one after the other"
                )

    def pieces(self, depth: int, start: int) -> list[Piece]:
        """The pieces from `start` on: the steps of an axis, the parts of an entry, or the contents of a split page."""
        if depth == len(self.axes):
            return _parts(self.runs[0].fields, start, self.name)
        if not self.is_split_page(depth):
            return self.items(depth, start)
        axis = self.axes[depth]
        first, *rest = self.regions
        return [*_tokens(first, axis.count, start, self.name), *_wholes(rest, axis.count, start, self.name)]

    def items(self, depth: int, start: int) -> list[Piece]:
        """The steps of an axis from `start` on."""
        axis = self.axes[depth]
        if axis.name != "part":
            return _items(axis, start, self.span(depth + 1), self.name)
        begins, ends = (start, start + axis.stride), (start + self.span(depth + 1), start + self.span(depth))
        return [
            Piece("part", begin, end, run.name, human(end - begin), i, self.name)
            for i, (run, begin, end) in enumerate(zip(self.runs, begins, ends, strict=True))
        ]

    def note(self, depth: int) -> str:
        """A description of the pieces."""
        entry = self.about.entry
        if depth == len(self.axes):
            what = "one entry" if len(self.runs) == 1 else f"one of the {self.runs[0].name}"
            return f"{what}, {type(entry).__name__} {entry.label}, {self.runs[0].nbytes:,} B"
        if self.is_split_page(depth):
            return f"{self.axes[depth].count:,} tokens: {page_contents(entry)}"
        return _note(self.axes[depth], self.span(depth + 1))

    def deeper(self, block: str, high: int, last: int, own: int) -> list[Band]:
        """The rows below those of blocks, down to an entry.

        `high` is where a block ends, `last` the last row of blocks, and `own` that of the group's table.
        """
        path, start = [block, self.name] if self.name else [block], self.start
        pieces, result = self.pieces(1, start), []
        above: tuple[int, str | None] = own, None
        for depth, axis in enumerate(self.axes[1:], 2):
            row = last + depth - 1
            if self.is_split_page(depth - 1):
                result += self._inside_page(path, pieces, start, row, axis.count, above)
                break
            start, high = pieces[0].start, min(pieces[0].start + axis.stride, high)
            path.append(pieces[0].label)
            pieces, note = self.pieces(depth, start), self.note(depth)
            result.append(Band(" · ".join(path), note, _fill(pieces, start, high), row, self.name, above))
            above = row, self.name
        return result

    def _inside_page(self, path, pieces, page, row, tokens, above) -> list[Band]:
        """The rows from `row` on, below that of a split page at `page`, which shows its first region token by token.

        The first row shows the other regions token by token.  If the first region has several parts, the next row shows
        those of its first token.
        """
        first, *rest = self.regions
        begin, stop = pieces[-len(rest)].start, pieces[-1].stop
        title = ", ".join(_region_name(region) for region in rest)
        note = "; ".join(
            f"{tokens * part.count:,} x {part.dtype}, {part.count} per token" for region in rest for part in region
        )
        inner = [piece for region in rest for piece in _tokens(region, tokens, page, self.name)]
        found = [Band(" · ".join([*path, title]), note, _fill(inner, begin, stop), row, self.name, above)]
        if len(first) > 1:
            parts = _parts(first, page, self.name)
            note = f"one token's {_region_name(first)}, {first[0].step:,} B"
            title = " · ".join([*path, pieces[0].label])
            below = row, self.name
            found.append(Band(title, note, _fill(parts, page, parts[-1].stop), row + 1, self.name, below))
        return found


def _items(axis: Axis, start: int, span: int, group: str = "") -> list[Piece]:
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


def _tokens(region: Sequence[Field], count: int, page: int, group: str) -> list[Piece]:
    """A region of each of the `count` tokens of the split page that begins at `page`."""
    first = region[0]
    step = first.step or 0
    return _items(Axis("token", count, step), page + first.offset, step, group)


def _parts(parts: Sequence[Field], start: int, group: str) -> list[Piece]:
    """Parts of one token, of the entry or the split page that begins at `start`."""
    return [
        Piece(
            "part",
            start + part.offset,
            start + part.offset + part.nbytes,
            part.name,
            f"{part.count:,} x {part.dtype}",
            i,
            group,
        )
        for i, part in enumerate(parts)
    ]


def _wholes(regions: Sequence[Sequence[Field]], count: int, page: int, group: str) -> list[Piece]:
    """Regions of the split page of `count` tokens that begins at `page`."""
    return [
        Piece(
            "part",
            page + region[0].offset,
            page + region[0].offset + (region[0].step or 0) * count,
            _region_name(region),
            " + ".join(f"{part.count * count:,} x {part.dtype}" for part in region),
            i,
            group,
        )
        for i, region in enumerate(regions)
    ]


def _fill(pieces: Sequence[Piece], low: int, high: int) -> tuple[Piece, ...]:
    """The pieces, and padding for every byte of [low, high) between them."""
    ends = [low, *(piece.stop for piece in pieces)]
    starts = [*(piece.start for piece in pieces), high]
    filled = []
    for i, (end, start) in enumerate(zip(ends, starts, strict=True)):
        if start > end:
            filled.append(Piece("padding", end, start, "padding", human(start - end)))
        filled += pieces[i : i + 1]
    return tuple(filled)


def _shown(run: Run) -> list[Axis]:
    """The axes that a map shows: not those of heads and tokens of length 1."""
    return [axis for axis in run.axes if axis.count > 1 or axis.name in ("block", "layer")]


def _extent(axes: Sequence[Axis]) -> int:
    """Bytes from the first step of all axes to the last one."""
    return sum((axis.count - 1) * axis.stride for axis in axes)


def _alike(one: Axis, other: Axis) -> bool:
    """Whether two axes have the same steps."""
    return one.name == other.name and (one.count == 1 or one.stride == other.stride)


def _note(axis: Axis, span: int) -> str:
    if axis.name == "part":
        return "keys and values, one after the other"
    if axis.count == 1:
        return f"1 {axis.name}"
    gaps = f", with gaps of {axis.stride - span:,} B" if axis.stride > span else ""
    return f"{axis.count:,} {axis.name}s, one every {axis.stride:,} B{gaps}"
