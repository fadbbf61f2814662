"""Draws the memory map of a layout, which shows the bytes of each block, layer, head and token."""

import io
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.layout.describe import Band, Descriptions, Piece, bands, headline, in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Inches.
WIDTH, COLUMN, MARGIN = 12.0, 6.6, 0.3  # the least width of a picture, and of a group's column in it
TOP, ROW, HEIGHT = 0.92, 1.36, 0.52  # top of the first row, distance between rows, height of the coloured part
TITLE, ADDRESSES = 0.28, 0.24  # heights of the text above and below the coloured part
ELIDED, SLIVER = (
    0.74,
    0.06,
)  # width of an elided piece, and the least width of others, so that padding stays visible

INK, FAINT, LINE, SHADOW = "#1f2937", "#6b7280", "#9ca3af", "#eef0f3"
HUES = {"block": "#475569", "layer": "#1d4ed8", "head": "#7c3aed", "token": "#0f766e", "part": "#b45309"}
GROUP_HUES = ("#1d4ed8", "#b45309", "#0f766e", "#7c3aed", "#be123c")


def draw(groups: Descriptions, path: str | os.PathLike[str] | None = None) -> "Figure":
    """The memory map as a matplotlib figure, saved if `path` is given; addresses are in bytes.

    Args:
      groups: descriptions by name: that of one layout under the name "", or those of the groups of a `PackedLayout`.
      path: a file name that ends in .svg or .png.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: `path` ends in neither .svg nor .png, or blocks, layers, heads or tokens interleave in memory.
    """
    if path is not None and Path(path).suffix not in (".svg", ".png"):
        raise ValueError(f"`path` ends in {Path(path).suffix!r}: expected .svg or .png")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a memory map needs matplotlib: pip install matplotlib") from error
    rows, names = bands(groups), list(groups)
    width, height = max(WIDTH, COLUMN * len(names)), TOP + ROW * max(band.row for band in rows) + HEIGHT + 0.4
    figure = Figure((width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _text(axes, MARGIN, 0.28, headline(groups), 13, weight="bold")
    legend = "addresses in bytes; hatched: bytes without an entry of this layout; slivers are widened to be seen"
    _text(axes, width - MARGIN, 0.28, legend, 8, color=FAINT, ha="right")
    hues = HUES | {name: GROUP_HUES[i % len(GROUP_HUES)] for i, name in enumerate(names) if name}
    column = (width - MARGIN) / len(names)
    drawn: dict[tuple[int, str | None], tuple[list[int], list[float]]] = {}
    for band in rows:
        left, right = MARGIN, width - MARGIN
        if band.group is not None:
            left += column * names.index(band.group)
            right = left + column - MARGIN
        addresses = [band.pieces[0].start, *(piece.stop for piece in band.pieces)]
        edges = _edges(band.pieces, left, right)
        drawn[band.row, band.group] = addresses, edges
        if band.above is not None:
            enlarged = np.interp([addresses[0], addresses[-1]], *drawn[band.above]).tolist()
            _draw_zoom(axes, band.above[0], band.row, enlarged, (left, right))
        _draw_band(axes, band, edges, hues)
    if path is not None:
        _save(figure, path, Path(path).suffix[1:])
    return figure


def svg(groups: Descriptions) -> str | None:
    """The memory map as SVG text; None without matplotlib, and for a layout that has no map."""
    try:
        figure = draw(groups)
    except (ImportError, ValueError):
        return None
    file = io.StringIO()
    _save(figure, file, "svg")
    return file.getvalue()


def for_notebook(groups: Descriptions) -> tuple[str, dict[str, str]] | None:
    """The memory map as SVG text, and its metadata with a description under "alt"; None where `svg` returns None."""
    picture = svg(groups)
    return None if picture is None else (picture, {"alt": in_words(groups)})


def _save(figure: "Figure", file: str | os.PathLike[str] | io.StringIO, suffix: str) -> None:
    from matplotlib import rc_context

    # Equal pictures make equal files: without a date, and without random ids.
    with rc_context({"svg.hashsalt": "jaxkv"}):
        figure.savefig(file, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)


def _edges(pieces: Sequence[Piece], left: float, right: float) -> list[float]:
    """Where the pieces begin and end: to scale, except that small pieces are widened until they are visible."""
    fixed = {i: ELIDED for i, piece in enumerate(pieces) if piece.kind == "elided"}
    while True:
        free = {i: piece.stop - piece.start for i, piece in enumerate(pieces) if i not in fixed}
        scale = (right - left - sum(fixed.values())) / sum(free.values())
        small = {i: SLIVER for i, nbytes in free.items() if nbytes * scale < SLIVER}
        if not small:
            break
        fixed |= small
    widths = fixed | {i: nbytes * scale for i, nbytes in free.items()}
    return [left + sum(widths[j] for j in range(i)) for i in range(len(pieces) + 1)]


def _draw_zoom(axes: "Axes", source: int, row: int, above: Sequence[float], here: Sequence[float]) -> None:
    """Draws the shadow that connects the enlarged part of row `source` to a row below it."""
    top, bottom = TOP + ROW * row, TOP + ROW * source + HEIGHT
    y = [bottom, bottom + ADDRESSES, top - TITLE, top]
    left, right = ((above[side], above[side], here[side], here[side]) for side in (0, 1))
    axes.fill([*left, *reversed(right)], [*y, *reversed(y)], color=SHADOW, linewidth=0, zorder=0)


def _draw_band(axes: "Axes", band: Band, edges: Sequence[float], hues: Mapping[str, str]) -> None:
    from matplotlib.patches import Rectangle

    top = TOP + ROW * band.row
    hue = hues[band.group] if band.group else INK
    after = _text(axes, edges[0] + 0.04, top - 0.13, band.title, 9, weight="bold", color=hue)
    _text(axes, after + 0.1, top - 0.13, band.note, 8, color=FAINT)
    for piece, (x0, x1) in zip(band.pieces, pairwise(edges), strict=True):
        color = FAINT
        fill: dict[str, Any] = {"facecolor": "white", "edgecolor": "#d1d5db", "hatch": "/////", "linewidth": 0.6}
        if piece.kind not in ("padding", "elided"):
            alike = [other for other in band.pieces if (other.kind, other.group) == (piece.kind, piece.group)]
            shade = alike.index(piece) / max(len(alike) - 1, 1)
            color = INK if shade > 0.6 else "white"
            fill = {"facecolor": _paler(hues[piece.group or piece.kind], shade), "edgecolor": "white", "linewidth": 0.8}
        if piece.kind != "elided":
            axes.add_patch(Rectangle((x0, top), x1 - x0, HEIGHT, **fill))
        _draw_label(axes, piece, (x0 + x1) / 2, top + HEIGHT / 2, x1 - x0 - 0.08, color)
    _draw_addresses(axes, band.pieces, edges, top + HEIGHT)


def _draw_label(axes: "Axes", piece: Piece, x: float, y: float, room: float, color: str) -> None:
    """Draws as much of the label of a piece as fits."""
    style: dict[str, Any] = {"color": color, "ha": "center"}
    if piece.kind == "padding":
        style["bbox"] = {"facecolor": "white", "linewidth": 0, "pad": 1}
    label, short = _text_width(piece.label, 9), f"{piece.index:,}"
    if max(label, _text_width(piece.detail, 7.5)) <= room:
        _text(axes, x, y - 0.085, piece.label, 9, **style)
        _text(axes, x, y + 0.1, piece.detail, 7.5, **style)
    elif label <= room:
        _text(axes, x, y, piece.label, 9, **style)
    elif piece.kind not in ("part", "padding") and _text_width(short, 8) <= room:
        _text(axes, x, y, short, 8, **style)
    elif room >= 0.1 and _text_width(piece.label, 7) <= HEIGHT:
        _text(axes, x, y, piece.label, 7, rotation=90, **style)


def _draw_addresses(axes: "Axes", pieces: Sequence[Piece], edges: Sequence[float], bottom: float) -> None:
    """Draws the addresses that fit: first the end of the row, then starts of pieces, then starts of padding."""
    last = f"{pieces[-1].stop:,}"
    _text(axes, edges[-1], bottom + 0.1, last, 7, color=FAINT, ha="right")
    taken = [(edges[-1] - _text_width(last, 7), edges[-1])]
    for piece, x in sorted(zip(pieces, edges[:-1], strict=True), key=lambda place: place[0].kind == "padding"):
        address = f"{piece.start:,}"
        end = x + 0.04 + _text_width(address, 7)
        if piece.kind == "elided" or any(x < stop + 0.06 and start < end + 0.06 for start, stop in taken):
            continue
        taken.append((x, end))
        axes.plot([x, x], [bottom, bottom + 0.16], color=LINE, linewidth=0.6)
        _text(axes, x + 0.04, bottom + 0.1, address, 7, color=FAINT)


def _text(axes: "Axes", x: float, y: float, text: str, size: float, color: str = INK, **style: Any) -> float:
    """Draws text at (x, y), and returns the x at which left-aligned text ends."""
    align = "center" if "rotation" in style else "center_baseline"
    axes.text(x, y, text, fontsize=size, color=color, va=align, family="DejaVu Sans", parse_math=False, **style)
    return x + _text_width(text, size, style.get("weight", "normal"))


def _text_width(text: str, size: float, weight: str = "normal") -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    # The width of letters is rounded up to pixels.
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72 * 1.04


def _paler(color: str, shade: float) -> tuple[float, ...]:
    """A colour mixed with white: 0 leaves it, 1 is pale."""
    from matplotlib.colors import to_rgb

    return tuple(channel + (1 - channel) * 0.7 * shade for channel in to_rgb(color))
