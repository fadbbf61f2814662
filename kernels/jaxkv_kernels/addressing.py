"""Where the entries of a paged cache lie in its flat buffer, and reading and writing them there in JAX.

- `Pages`: counts and strides, which are all that kernels know of a layout.
- Slots: index arithmetic on block tables.
- `row_view`, `entry_view`: the buffer as rows of fewer than 2**31 elements.  JAX indexes with int32 by default, and
  large caches have more elements.  Therefore the buffer is reshaped to rows, which is free, and an entry is addressed
  by its row and its first column.
- `read_entries`, `write_entries`: windows (runs of elements) in these rows, at index arrays; `read_slots` and
  `write_slots`, at slots; `load_entries` and `store_entries`, encoded entries of any format at slots.
- `runs_of`: a whole block, in all layers, as the fewest runs of contiguous memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from itertools import accumulate
from math import gcd, isqrt, prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import Field

Buffer = jax.Array | tuple[jax.Array, jax.Array]
"""The memory of a cache: one array, or a pair if keys and values have an array each (`Pages.two_arrays`)."""


def dtype_of(buffer: Buffer) -> np.dtype:
    """The dtype of the elements of a buffer."""
    return (buffer[0] if isinstance(buffer, tuple) else buffer).dtype


def one_array(buffer: Buffer) -> jax.Array:
    """The buffer, for code that supports no pairs; ValueError if it is one."""
    if isinstance(buffer, tuple):
        sizes = " and ".join(str(array.size) for array in buffer)
        raise ValueError(f"keys and values are in arrays of {sizes} elements: expected one buffer")
    return buffer


def arrays_of[Array](buffer: Array | tuple[Array, Array], count: int) -> tuple[Array, ...]:
    """The array, or reference, that holds each of `count` parts of entries: the buffer or, if it is a pair, its two."""
    return buffer if isinstance(buffer, tuple) else (buffer,) * count


def updated[B: Buffer](buffer: B, update: Callable[..., jax.Array], *parts: Sequence[Any]) -> B:
    """The buffer after `update(array, *part)` for each part of entries in turn, where `array` holds that part.

    `parts` are sequences that have an item per part.
    """
    if isinstance(buffer, tuple):
        return cast(B, tuple(map(update, buffer, *parts)))
    return cast(B, reduce(lambda array, part: update(array, *part), zip(*parts, strict=True), buffer))


@dataclass(frozen=True)
class Pages:
    """Counts and strides of a cache, all of them Python ints; strides are in elements of the buffer.

    Entry (layer, block, head, token) is a run of `width` elements.  It begins at element
    offset + layer * layer_stride + block * block_stride + head * head_stride + token * token_stride.  If keys and
    values lie apart, these are the addresses of the keys, and `values` has those of the values.
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
    values: "Pages | None" = None
    own_array: bool = False
    """Of values that lie apart: whether they are in an array of their own.  The buffer is then a pair of arrays."""

    @property
    def parts(self) -> "tuple[Pages, ...]":
        """The addresses of whole entries, or those of keys and those of values, if these lie apart."""
        return (self,) if self.values is None else (replace(self, values=None), self.values)

    @property
    def two_arrays(self) -> bool:
        """Whether keys and values are in an array each."""
        return self.values is not None and self.values.own_array

    @property
    def value_distance(self) -> int | None:
        """Elements from a key to its value, if these lie apart in one array and have the same strides; else None."""
        if self.values is None or self.two_arrays or _axes(self) != _axes(self.values):
            return None
        return self.values.offset - self.offset

    def resized(self, old: int, new: int) -> "Pages":
        """The same addresses, counted in elements of `new` bytes instead of `old`, which must divide them."""
        steps = ("layer_stride", "block_stride", "head_stride", "token_stride", "offset", "width", "size")
        values = self.values and self.values.resized(old, new)
        return replace(self, values=values, **{name: getattr(self, name) * old // new for name in steps})

    @property
    def whole_blocks(self) -> "Pages":
        """Whole blocks as single entries; only if `blocks_are_runs`."""
        one = dict.fromkeys(("num_layers", "num_heads", "block_size"), 1)
        return replace(self, **one, offset=0, width=self.block_stride, values=None)

    @property
    def num_slots(self) -> int:
        """Slots of one layer: blocks times tokens per block."""
        return self.num_blocks * self.block_size

    @property
    def inner_axes(self) -> tuple[tuple[str, int, int], ...]:
        """(axis, count, stride) of the axes within a block, outermost in memory first; those of the keys, if apart."""
        axes = (
            ("layer", self.num_layers, self.layer_stride),
            ("token", self.block_size, self.token_stride),
            ("head", self.num_heads, self.head_stride),
        )
        return tuple(sorted(axes, key=lambda axis: -axis[2]))

    @property
    def block_span(self) -> int:
        """Elements from the first entry of a block to the end of its last one; of the keys, if apart."""
        return sum((count - 1) * stride for _, count, stride in self.inner_axes) + self.width

    @property
    def blocks_are_runs(self) -> bool:
        """Whether the buffer is divided into blocks: block b is the run [b * block_stride, (b + 1) * block_stride).

        Padding and the other groups of a packed block are part of the run.
        """
        return self.block_stride * self.num_blocks == self.size and all(
            part.block_stride == self.block_stride
            and part.offset + part.block_span <= part.block_stride
            and not part.own_array
            for part in self.parts
        )

    @property
    def block_elements(self) -> int:
        """Elements of an exported block: its run, or only its entries if blocks are not runs."""
        if self.blocks_are_runs:
            return self.block_stride
        return self.num_layers * self.num_heads * self.block_size * sum(part.width for part in self.parts)

    @property
    def exported(self) -> "Pages":
        """Where the entries lie in an exported block, a buffer of one block.

        This is the run, if blocks are runs.  Otherwise the entries follow one another in their order in memory; all
        keys come before the values, if these lie apart.
        """
        found, size, end = [], self.block_elements, 0
        for part in self.parts:
            strides, offset = {}, part.offset
            if not self.blocks_are_runs:
                offset, extent = end, part.width
                for axis, count, _ in reversed(part.inner_axes):
                    strides[f"{axis}_stride"] = extent
                    extent *= count
                end += extent
            whole = {"num_blocks": 1, "block_stride": size, "size": size, "own_array": False}
            found.append(replace(part, offset=offset, **whole, **strides))
        first, *rest = found
        return replace(first, values=rest[0] if rest else None)


MAX_SLOTS = 2**31 - 1
"""The number of slots that int32 can address."""


def sums_from_0(counts: jax.Array) -> jax.Array:
    """The running sum of `counts` [B], int32 [B + 1], which begins with 0."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def table_tokens(block_tables: jax.Array, block_size: int) -> int:
    """The capacity of block tables [B, M] in tokens per request."""
    return min(block_tables.shape[1] * block_size, MAX_SLOTS)


def lengths_in_table(seq_lens: jax.Array, block_tables: jax.Array, block_size: int) -> jax.Array:
    """`seq_lens` [B] clamped to the range from 0 to the capacity of the tables, as in every operation."""
    return jnp.clip(seq_lens, 0, table_tokens(block_tables, block_size))


@partial(jax.jit, static_argnames="block_size")
def slots_for(block_tables: jax.Array, positions: jax.Array, *, block_size: int) -> jax.Array:
    """Slots of `positions` [B, ...], looked up in the tables [B, M]; -1 for positions without a slot."""
    batch = jnp.arange(block_tables.shape[0], dtype=jnp.int32)
    request = jnp.broadcast_to(batch.reshape(-1, *[1] * (positions.ndim - 1)), positions.shape)
    return _lookup(block_tables, request, positions, block_size)


@partial(jax.jit, static_argnames=("total", "block_size"))
def ragged_slots(
    block_tables: jax.Array,
    cu_seq_lens: jax.Array,
    *,
    total: int,
    block_size: int,
    seq_starts: jax.Array | None = None,
) -> jax.Array:
    """Slots [total] of runs of tokens, one run per request, concatenated; -1 where there is no slot.

    `cu_seq_lens` [B + 1] must not fall.
    """
    request, position = ragged_positions(cu_seq_lens, total=total, seq_starts=seq_starts)
    return _lookup(block_tables, request, position, block_size)


@partial(jax.jit, static_argnames="total")
def ragged_positions(
    cu_seq_lens: jax.Array, *, total: int, seq_starts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The request and the position [total] of each token of such runs; 0 and -1 past the last run."""
    row = jnp.arange(total, dtype=jnp.int32)
    request = jnp.searchsorted(cu_seq_lens[1:], row, side="right").astype(jnp.int32)
    live = request < cu_seq_lens.shape[0] - 1
    request = jnp.where(live, request, 0)
    position = row - cu_seq_lens[request]
    if seq_starts is not None:
        position = position + seq_starts[request]
    return request, jnp.where(live, position, -1)


def _lookup(block_tables, request, positions, block_size):
    block = block_tables[request, jnp.clip(positions // block_size, 0, block_tables.shape[1] - 1)]
    inside = (positions >= 0) & (positions < table_tokens(block_tables, block_size))
    # An invalid entry must not wrap around into a valid slot.
    inside &= (block >= 0) & (block < MAX_SLOTS // block_size)
    return jnp.where(inside, block * block_size + positions % block_size, -1)


ROW_LIMIT = 2**31

MOST_COLUMNS, LARGEST_TRIED = 2**30, 2**20
"""For `PieceView`: rows are shorter than MOST_COLUMNS; divisors of the size are searched up to LARGEST_TRIED."""

AXES = ("layer", "block", "head", "token")


@dataclass(frozen=True)
class RowView:
    """The buffer reshaped to `shape`, and how the index in it depends on each axis of the cache."""

    shape: tuple[int, ...]
    origin: tuple[int, ...]
    """The start of entry (0, 0, 0, 0): one index per leading axis, then the column."""
    steps: dict[str, tuple[int, ...]]
    """What one step along an axis adds to the index."""
    window: int
    """Elements moved at once: one entry."""

    def index(self, **indices) -> tuple[Any, ...]:
        """The start of the entry at `layer`, `block`, `head` and `token`: one index per leading axis, then the column.

        Indices are int32 integers or arrays.
        """
        place = list(self.origin)
        for axis, i in indices.items():
            for dimension, step in enumerate(self.steps.get(axis, ())):
                if step:
                    place[dimension] = place[dimension] + i * step
        return tuple(place)


def row_view(pages: Pages) -> RowView:
    """The coarsest view whose rows have fewer than 2**31 elements; ValueError if the strides allow none.

    Keys and values do not lie apart.
    """
    (view,) = row_views(pages)
    return view


def row_views(pages: Pages) -> tuple[RowView, ...]:
    """The coarsest view of each of `pages.parts`, whose rows have fewer than 2**31 elements.

    All views have one shape, unless they are of two arrays.  ValueError if the strides allow none.
    """
    parts = pages.parts
    if pages.two_arrays:
        return tuple(map(row_view, parts))
    axes = [_axes(part) for part in parts]
    row, columns = pages.size, [part.offset for part in parts]
    shape, split, origins = [], [], [[] for _ in parts]
    while all(axes) and (not shape or row >= ROW_LIMIT):
        stride, _, axis = axes[0][0]
        inside = [
            column % stride + sum(s * (n - 1) for s, n, _ in inner) + part.width
            for part, column, (_, *inner) in zip(parts, columns, axes, strict=True)
        ]
        same = all(own[0] == axes[0][0] for own in axes)
        if not same or row % stride or max(inside) > stride or row // stride >= ROW_LIMIT:
            break
        shape.append(row // stride)
        split.append(axis)
        for i, column in enumerate(columns):
            axes[i].pop(0)
            origins[i].append(column // stride)
        row, columns = stride, [column % stride for column in columns]
    if row >= ROW_LIMIT:
        strides = [dict(zip(AXES, _strides(part), strict=True)) for part in parts]
        raise ValueError(
            f"a buffer of {pages.size} elements with strides {' and '.join(map(str, strides))} and offset "
            f"{' and '.join(str(part.offset) for part in parts)} cannot be viewed as rows of fewer than 2**31 "
            "elements: outer strides must divide the size"
        )
    leading = {axis: tuple(int(i == j) for j in range(len(shape) + 1)) for i, axis in enumerate(split)}
    views = []
    for part, own, origin, column in zip(parts, axes, origins, columns, strict=True):
        steps: dict[str, tuple[int, ...]] = {axis: (0,) * len(shape) + (stride,) for stride, _, axis in own}
        views.append(RowView((*shape, row), (*origin, column), steps | leading, part.width))
    return tuple(views)


def in_views(buffer: Buffer, views: Sequence[RowView]) -> Buffer:
    """The buffer in the shape of `row_views`, or each of two arrays in that of its own view; no copy."""
    if isinstance(buffer, tuple):
        keys, values = (array.reshape(view.shape) for array, view in zip(buffer, views, strict=True))
        return keys, values
    return buffer.reshape(views[0].shape)


@dataclass(frozen=True)
class PieceView:
    """The buffer reshaped to `shape`.  Entries may cross rows, but consist of pieces that do not."""

    shape: tuple[int, int]
    window: int
    """Elements moved at once: one piece.  An entry is several pieces of this length."""
    pages: Pages

    def index(self, **indices) -> tuple[Any, Any]:
        """Rows and columns [..., pieces] where the pieces of the entries at `layer`, `block`, `head` and `token` begin.

        The indices must be int32 arrays [..., 1], which broadcast over the pieces of an entry.
        """
        pages, (_, length) = self.pages, self.shape
        starts = divmod(pages.offset + np.arange(0, pages.width, self.window), length)
        row, column = (start.astype(np.int32) for start in starts)
        # Multiply an index by its step a few bits at a time, and carry from columns to rows in between, so that columns
        # stay below 2**31.
        digits = 31 - length.bit_length()
        for stride, count, axis in _axes(pages):
            for low in range(0, (count - 1).bit_length(), digits):
                digit = indices[axis] >> low & (1 << digits) - 1
                rows, columns = divmod(stride << low, length)
                column = column + digit * columns
                row, column = row + digit * rows + column // length, column % length
        return row, column


@cache
def piece_view(pages: Pages) -> PieceView:
    """The view with the longest pieces, then the shortest rows; ValueError if no rows divide the buffer."""
    unit = gcd(pages.width, pages.offset, *(stride for stride, _, _ in _axes(pages)))
    length = max(_row_lengths(pages.size), key=lambda length: (gcd(length, unit), -length))
    return PieceView((pages.size // length, length), gcd(length, unit), pages)


def entry_view(pages: Pages) -> RowView | PieceView:
    """The `row_view` if the strides allow one, otherwise the `piece_view`."""
    try:
        return row_view(pages)
    except ValueError:
        return piece_view(pages)


def _axes(pages: Pages) -> list[tuple[int, int, str]]:
    """(stride, count, axis) of the axes of more than one step, outermost in memory first."""
    counts = (pages.num_layers, pages.num_blocks, pages.num_heads, pages.block_size)
    return sorted(((s, n, a) for s, n, a in zip(_strides(pages), counts, AXES, strict=True) if n > 1), reverse=True)


def _strides(pages: Pages) -> tuple[int, ...]:
    return pages.layer_stride, pages.block_stride, pages.head_stride, pages.token_stride


def _row_lengths(size: int) -> list[int]:
    """Divisors of `size` such that `PieceView` can count rows and columns in int32; ValueError if there are none.

    Below 2**40 elements, only a size with a prime factor above 2**31 has none.
    """
    found = []
    if size < MOST_COLUMNS * ROW_LIMIT:
        divisors = np.arange(1, min(isqrt(size), LARGEST_TRIED) + 1)
        divisors = divisors[size % divisors == 0].tolist()
        found = [n for n in {*divisors, *(size // n for n in divisors)} if n < MOST_COLUMNS and size // n < ROW_LIMIT]
    if not found:
        unit = max(512, 2 ** (size // ROW_LIMIT).bit_length())
        raise ValueError(
            f"a buffer of {size} elements cannot be divided into fewer than 2**31 rows of fewer than 2**30 elements "
            f"each, in which int32 indices reach its entries: expected another size, such as {-(-size // unit) * unit}"
        )
    return found


def read_entries(buffer: jax.Array, pages: Pages, *, block, **axes) -> jax.Array:
    """The entries [..., width] at index arrays that all have the same shape [...].  All indices must be in range.

    `axes` are `layer`, `head` and `token`.
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


def load_entries(
    buffer: Buffer, pages: Pages, entry: Entry, slots: jax.Array, layer, *, dtype=None
) -> tuple[jax.Array, jax.Array]:
    """Encoded entries [..., H, width] of all heads at `slots` [...], and whether each is in the cache.

    Entries are elements of `dtype`, by default the natural one, which `entry.decode` expects.  Those at slots outside
    the cache are 0, and the caller must mask the values that they decode to.
    """
    runs = entry_runs(pages, entry, dtype_of(buffer).itemsize)
    found = [
        read_slots(array, run, slots, layer) for array, run in zip(arrays_of(buffer, len(runs)), runs, strict=True)
    ]
    # Bytes in a buffer of bf16 are joined as bytes: XLA's older emitters quiet signalling NaNs when they join bf16.
    return join_runs(pages, entry, [view_as(rows, dtype or entry.dtype) for rows, _ in found]), found[0][1]


def scale_at(scale: jax.Array | None, slots: jax.Array) -> jax.Array | None:
    """The scales [..., H] of the entries at `slots` [...], if `scale` has one per token; otherwise `scale` as it is.

    Slots outside the cache have any scale: the caller must mask their values.
    """
    if scale is None or scale.ndim < 2:
        return scale
    return scale.reshape(-1, scale.shape[-1]).at[slots].get(mode="clip")


def store_entries[B: Buffer](buffer: B, pages: Pages, entry: Entry, rows: jax.Array, slots: jax.Array, layer) -> B:
    """The buffer with encoded entries [..., H, width] stored at `slots` [...]; slots outside the cache are skipped."""
    dtype = dtype_of(buffer)
    runs, pieces = entry_runs(pages, entry, dtype.itemsize), split_runs(pages, entry, rows, dtype)

    def stored(array, run, piece):
        return write_slots(array, run, piece, slots, layer)

    return updated(buffer, stored, runs, pieces)


def entry_runs(pages: Pages, entry: Entry, itemsize: int) -> list[Pages]:
    """Addresses of the runs of bytes that make up an entry.

    These are the whole entry, its parts in each region of a split page, or its key and its value, if these lie apart.
    `itemsize` is that of the buffer.
    """
    if not entry.split:
        return [*pages.parts]

    def run(first: Field) -> Pages:
        width = (first.step or 0) // itemsize
        return replace(pages, token_stride=width, width=width, offset=pages.offset + first.offset // itemsize)

    return [run(first) for first, *_ in entry.regions(pages.block_size)]


def join_runs(pages: Pages, entry: Entry, runs: Sequence[jax.Array]) -> jax.Array:
    """Encoded entries [..., width] from the contents [..., n_i] of their `entry_runs`, all of the same dtype."""
    if pages.values is not None:
        return entry.from_planes(runs)
    return jnp.concatenate(runs, axis=-1)


def split_runs(pages: Pages, entry: Entry, rows: jax.Array, dtype) -> list[jax.Array]:
    """The contents [..., n_i] of the `entry_runs` of encoded entries [..., width], as elements of `dtype`."""
    if pages.values is not None:
        return [view_as(plane, dtype) for plane in entry.to_planes(rows)]
    rows = view_as(rows, dtype)
    widths = [run.width for run in entry_runs(pages, entry, rows.dtype.itemsize)]
    return [rows[..., end - width : end] for width, end in zip(widths, accumulate(widths), strict=True)]


@dataclass(frozen=True)
class Runs:
    """The runs of a block, counted in elements.  Concatenated, they are the exported block, or a part of it."""

    axes: tuple[tuple[str, int, int], ...]
    """(axis, count, stride) of the axes that enumerate the runs, outermost first."""
    length: int
    """Elements per run."""
    offset: int
    """The element of the buffer at which the first run of block 0 begins."""
    block_stride: int

    @property
    def count(self) -> int:
        """Runs per block."""
        return prod(count for _, count, _ in self.axes)


def runs_of(pages: Pages) -> tuple[Runs, ...]:
    """The runs of a block: one run, with padding and other groups, if blocks are runs; otherwise runs of entries.

    Keys and values that lie apart have runs of their own.  If these lie in one array and differ only in where they
    begin, they are returned together, with "part" as the outermost axis.
    """
    if pages.blocks_are_runs:
        return (Runs((), pages.block_stride, 0, pages.block_stride),)
    found = []
    for part in pages.parts:
        axes: list[tuple[str, int, int]] = []
        length = part.width
        for axis, count, stride in reversed(part.inner_axes):
            if not axes and stride == length:
                length *= count
            elif count > 1:
                axes.insert(0, (axis, count, stride))
        found.append(Runs(tuple(axes), length, part.offset, part.block_stride))
    keys, distance = found[0], found[-1].offset - found[0].offset
    if len(found) > 1 and not pages.two_arrays and found[-1] == replace(keys, offset=keys.offset + distance):
        return (replace(keys, axes=(("part", 2, distance), *keys.axes)),)
    return tuple(found)
