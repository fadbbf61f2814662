"""Copying, reading and writing whole blocks, in all layers at once, and converting them between layouts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache, int32
from jaxkv.dispatch import Implementations, run
from jaxkv.layout.layout import UNDIVIDED, CacheLayout, TokenShards
from jaxkv.layout.packed import PackedLayout, Table
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import array
from jaxkv_kernels import calls
from jaxkv_kernels.addressing import Pages, entry_runs, one_array, read_entries, write_entries
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.integers import as_int


def copy_blocks[E: Entry](
    cache: KVCache[E], src: ArrayLike, dst: ArrayLike, *, implementation: Implementations | None = None
) -> KVCache[E]:
    """Copies blocks over other blocks of the same cache, in every layer.

    What belongs to a block depends on the layout.  If blocks are runs (`layout.blocks_are_runs`), it is the whole run:
    the entries, the padding of pages and of the block, and the other groups of a `PackedLayout`.  Otherwise it is the
    entries alone, and the padding and gaps between them are neither read nor written.

    Args:
      cache: any cache.
      src: int32 [n], blocks to read.  All are read before any is written.
      dst: int32 [n], blocks to overwrite.  A pair with an id outside the cache is skipped.  A negative `dst` states
        that there is nothing to copy; `jaxkv.checked` reports all other ids outside the cache.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with the blocks copied, and all other bytes unchanged; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_cache(cache, Entry)
    dims, pages = Dims(), cache.layout.pages
    dims.check_ints("src", src, "n")
    dims.check_ints("dst", dst, "n")
    src, dst = int32(src), int32(dst)
    if data_checks.checking():
        data_checks.check_ids("src", src, pages, used=dst >= 0)
        data_checks.check_ids("dst", dst, pages, used=dst >= 0)
        data_checks.check_written_once("dst", dst, "block")
    call = calls.CopyBlocks(buffer=cache.buffer, pages=pages, src=src, dst=dst)
    return KVCache(run(call, implementation), cache.layout)


def read_blocks(cache: KVCache, blocks: ArrayLike, *, implementation: Implementations | None = None) -> jax.Array:
    """Returns the payloads of blocks, to be stored elsewhere or sent to another cache.

    Args:
      cache: any cache.
      blocks: int32 [n], blocks to read.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      [n, layout.block_nbytes / itemsize] of the buffer's dtype.  A row holds what belongs to a block (see
      `copy_blocks`), in its order in memory: if blocks are runs, the run with its padding, bit for bit; otherwise only
      the entries, all keys before the values if these lie apart.  The row of an id outside the cache is 0.  Caches
      whose layouts have equal fingerprints can exchange rows.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_cache(cache, Entry)
    Dims().check_ints("blocks", blocks, "n")
    blocks = int32(blocks)
    if data_checks.checking():
        data_checks.check_ids("blocks", blocks, cache.layout.pages)
    return run(calls.ReadBlocks(buffer=cache.buffer, pages=cache.layout.pages, blocks=blocks), implementation)


def write_blocks[E: Entry](
    cache: KVCache[E], blocks: ArrayLike, data: ArrayLike, *, implementation: Implementations | None = None
) -> KVCache[E]:
    """Overwrites blocks with payloads.

    A payload replaces all that belongs to a block (see `copy_blocks`): if blocks are runs, also their padding and the
    other groups of a `PackedLayout`; otherwise only the entries, and padding and gaps keep their bytes.

    Args:
      cache: any cache.
      blocks: int32 [n], blocks to overwrite; an id outside the cache is skipped.
      data: [n, layout.block_nbytes / itemsize] of the buffer's dtype, as `read_blocks` returns them for a layout with
        the same fingerprint.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with the blocks stored, and all other bytes unchanged; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_cache(cache, Entry)
    pages = cache.layout.pages
    dims = Dims(E=(pages.block_elements, "the elements of a block's payload"))
    dims.check_ints("blocks", blocks, "n")
    data = dims.check("data", data, "n E", (str(cache.layout.dtype),))
    blocks = int32(blocks)
    if data_checks.checking():
        data_checks.check_ids("blocks", blocks, pages)
        data_checks.check_written_once("blocks", blocks, "block")
    call = calls.WriteBlocks(buffer=cache.buffer, pages=pages, blocks=blocks, data=data)
    return KVCache(run(call, implementation), cache.layout)


def convert_blocks(
    data: ArrayLike,
    src: CacheLayout | PackedLayout,
    dst: CacheLayout | PackedLayout,
    *,
    table: str | None = None,
    num_tokens: int | None = None,
) -> jax.Array:
    """Converts block payloads for a cache with another block size, order, padding, strides or buffer dtype.

    Entries are moved bit for bit.  To copy a prompt of one cache to another:

        rows = read_blocks(source, blocks)
        target = write_blocks(target, other_blocks, convert_blocks(rows, source.layout, target.layout))

    Between blocks of the same size, each row is converted by itself.  Otherwise, the rows must hold consecutive tokens
    of one prompt, in order, from a token on at which a block of both caches begins.  Groups with fewer entries than
    tokens are converted likewise if both layouts have the same `rate`.  States that are stored once per block are not
    converted to blocks of another size, because the states at the ends of other blocks were not stored.

    Scales that operations take as arguments (`k_scale`) are not part of a payload: those with one element per token
    must be rearranged in the same way.

    Args:
      data: [n, src.block_nbytes / itemsize] of the dtype of src's buffer, as `read_blocks` returns it for `src`.
      src: the layout of the payloads.  For packed blocks, pass the layout of a group to convert only that group, or the
        PackedLayout to convert all groups.
      dst: the layout to convert to: it must have the same entries, layers, heads and shards, and the same groups if it
        is a PackedLayout.  For caches that divide heads or tokens over devices, see `jaxkv.parallel.convert_blocks`.
      table: the table to which the blocks belong, required if the layouts are packed and have several tables: only its
        groups are converted.
      num_tokens: how many of the n * N tokens of the rows to convert, a static int; N is the block size of the table in
        `src`.  By default, all of them.  A group with several tokens per entry keeps the entries that cover any of
        these tokens.  Of the layout of one group, or under context parallelism, the tokens are the slots of one cache.

    Returns:
      [m, dst.block_nbytes / itemsize] of the dtype of dst's buffer, for `write_blocks` to a cache of `dst`.  The m rows
      are the fewest that hold all tokens: the last block may be partly filled.  They are 0 in padding and gaps, and
      after the last token.

    Raises:
      ValueError: the layouts differ in what they store, `data` does not fit `src`, `table` is not one of theirs, or
        `num_tokens` is more than the rows hold; the message shows the difference.
    """
    conversion = Conversion.of(src, dst, table)
    dims = Dims(E=(conversion.row_elements, "the elements of a block of `src`"))
    rows = jnp.asarray(dims.check("data", data, "n E", (str(conversion.dtype),)))
    return conversion.run(conversion.bits_of(rows)[None], conversion.count(len(rows), num_tokens))[0]


@dataclass(frozen=True)
class Conversion:
    """The conversion of payloads of one table between caches of two layouts, which may divide heads and tokens.

    A cache that is divided over devices has as many rows of a block as devices.  `src_shards` and `dst_shards` say how
    its tokens are divided; heads are divided into consecutive parts.  The tokens are divided over the last axis of the
    mesh, as in `jaxkv.parallel.zeros`: device i * num_shards + j has part i of the heads, and shard j of the tokens.
    """

    pairs: tuple[tuple[CacheLayout, CacheLayout], ...]
    """The two layouts of each group of the table, of one device."""
    rates: tuple[int, ...]
    """Tokens per entry of each group."""
    src_size: int
    """Tokens per block of the table."""
    dst_size: int
    src_shards: TokenShards = UNDIVIDED
    dst_shards: TokenShards = UNDIVIDED

    @staticmethod
    def of(
        src,
        dst,
        table: str | None,
        *,
        free: tuple[str, ...] = ("block_size",),
        names: tuple[str, str] = ("src", "dst"),
    ) -> "Conversion":
        """The conversion between two layouts, which may differ in `free`; tokens and heads are those of one device.

        ValueError if the layouts differ in what they store, or `table` is not the name of one of their tables.
        Messages call the layouts `names`.
        """
        layouts = dict(zip(names, (src, dst), strict=True))
        groups = _groups(**layouts)
        tables, sizes = (_tables(layout) for layout in (src, dst))
        if table is None and len(tables) == 1:
            (table,) = tables
        check_same_groups(groups, layouts, free=free, table=table)
        if table is None or table not in tables:
            raise ValueError(
                f"`table` is {table!r}: expected one of {', '.join(map(repr, tables))}, the table of these blocks"
            )
        members = tables[table].groups
        rates = tuple(src.groups[name].rate if isinstance(src, PackedLayout) else 1 for name in members)
        pairs = tuple(groups[name] for name in members)
        return Conversion(pairs, rates, tables[table].block_size, sizes[table].block_size)

    @property
    def dtype(self):
        """The dtype of rows of the source."""
        return self.pairs[0][0].dtype

    @property
    def row_elements(self) -> int:
        """The elements of a row of the source."""
        return self.pairs[0][0].pages.block_elements

    def count(self, rows: int, num_tokens: int | None) -> int:
        """`num_tokens`, by default all tokens that `rows` rows of every device hold; ValueError if it is more."""
        held = self.src_shards.capacity(rows * self.src_size)
        if num_tokens is None:
            return held
        number = as_int(num_tokens)
        if number is None or not 0 <= number <= held:
            raise ValueError(
                f"`num_tokens` is {num_tokens!r}: expected an int (it is static) from 0 to {held}, the tokens of "
                f"{rows} blocks of {self.src_size} tokens"
                + f" on each of {self.src_shards.num_shards} devices"
                * (self.src_shards.num_shards > 1)
            )
        return number

    def bits_of(self, rows: ArrayLike) -> jax.Array:
        """Rows of the source as unsigned integers, for `run`."""
        return view_as(jnp.asarray(rows), _bits(self.pairs[0][0]))

    def run(self, rows: jax.Array, tokens: int, dst_devices: int = 1) -> jax.Array:
        """Converts the first `tokens` tokens of rows [devices, n, E], from `bits_of`, to rows [dst_devices, m, E]."""
        _, target = self.pairs[0]
        count = -(-self.dst_shards.largest_share(tokens) // self.dst_size)
        out = jnp.zeros((dst_devices, count, target.pages.block_elements), _bits(target))
        for (old, new), rate in zip(self.pairs, self.rates, strict=True):
            if tokens:
                out = self._move(rows, out, old, new, -(-tokens // rate))
        return view_as(lax.optimization_barrier(out), target.dtype)

    def _move(self, rows: jax.Array, out: jax.Array, old: CacheLayout, new: CacheLayout, count: int) -> jax.Array:
        """`out` with the first `count` entries of each layer and head of a group."""
        heads = rows.shape[0] // self.src_shards.num_shards * old.num_heads
        whole = self.src_shards == self.dst_shards == UNDIVIDED
        unit = gcd(old.block_size, new.block_size) if whole else 1
        grid = _grid(jnp.arange(-(-count // unit), dtype=jnp.int32), old, heads, unit)
        source = _place(old, self.src_shards, rows.shape[:2], *grid)
        target = _place(new, self.dst_shards, out.shape[:2], *grid)
        entries = [read_entries(rows.reshape(-1), pages, **source) for pages in _runs_in_rows(rows, old)]
        keep = jnp.array(True) if count % unit == 0 else grid[0] * unit + grid[-1] < count
        flat = out.reshape(-1)
        for entry, pages in zip(_as_stored(old, new, entries), _runs_in_rows(out, new), strict=True):
            flat = write_entries(flat, pages, entry, keep, **target)
        return flat.reshape(out.shape)

    @property
    def units_of_row(self) -> int:
        """The units of a row of the target; a unit has as many tokens as divide the blocks of both layouts."""
        return self.dst_size // gcd(self.src_size, self.dst_size)

    @property
    def units_of_block(self) -> int:
        """The units of a block of the source."""
        return self.src_size // gcd(self.src_size, self.dst_size)

    def read(self, cache: KVCache, units: jax.Array) -> jax.Array:
        """Blocks of the target's layout from a cache of the source's: [n, E], 0 where a unit is not in the cache.

        `units` int32 [n, units_of_row] says where the tokens of each row are in the cache: unit u of block b, counted
        in units, is b * units_of_block + u.
        """
        buffer, target = one_array(cache.buffer), self.pairs[0][1]
        out = jnp.zeros((1, len(units), target.pages.block_elements), _bits(target))
        for old, new in self.pairs:
            in_cache, in_rows, keep = self._units(cache, units, old, new)
            runs = entry_runs(self._pages(cache, old), old.entry, old.itemsize)
            entries = [view_as(read_entries(buffer, pages, **in_cache), _bits(old)) for pages in runs]
            flat = out.reshape(-1)
            for entry, pages in zip(_as_stored(old, new, entries), _runs_in_rows(out, new), strict=True):
                flat = write_entries(flat, pages, entry, keep, **in_rows)
            out = flat.reshape(out.shape)
        return view_as(lax.optimization_barrier(out[0]), target.dtype)

    def write[E: Entry](self, cache: KVCache[E], units: jax.Array, rows: jax.Array) -> KVCache[E]:
        """The cache with rows [n, E] of the target's layout stored at `units`, as `read` finds them.

        Units outside the cache are skipped, and all bytes but those of the entries keep their contents.
        """
        buffer, target = one_array(cache.buffer), self.pairs[0][1]
        rows = view_as(rows, _bits(target))[None]
        for old, new in self.pairs:
            in_cache, in_rows, keep = self._units(cache, units, old, new)
            entries = [read_entries(rows.reshape(-1), pages, **in_rows) for pages in _runs_in_rows(rows, new)]
            runs = entry_runs(self._pages(cache, old), old.entry, old.itemsize)
            for entry, pages in zip(_as_stored(new, old, entries), runs, strict=True):
                buffer = write_entries(buffer, pages, view_as(entry, old.dtype), keep, **in_cache)
        return KVCache(buffer, cache.layout)

    def _pages(self, cache: KVCache, old: CacheLayout) -> Pages:
        """The addresses of a group in a cache, whose number of blocks `old` need not have."""
        if cache.layout.packed is None:
            return cache.layout.pages  # in layer-major orders, other strides depend on that number
        return replace(old.pages, num_blocks=cache.layout.num_blocks, size=cache.layout.size)

    def _units(self, cache: KVCache, units: jax.Array, old: CacheLayout, new: CacheLayout):
        """Where the entries of a group lie in the cache and in rows, and whether they are in the cache."""
        unit = gcd(old.block_size, new.block_size)
        runs, *rest = _grid(jnp.arange(units.size, dtype=jnp.int32), old, old.num_heads, unit)
        places = jnp.broadcast_to(units.reshape(-1, 1, 1, 1), runs.shape)
        count = cache.layout.num_blocks
        keep = (places >= 0) & (places < count * self.units_of_block)
        in_cache = _place(old, UNDIVIDED, (1, count), jnp.where(keep, places, 0), *rest)
        return in_cache, _place(new, UNDIVIDED, (1, len(units)), runs, *rest), keep


def _grid(runs: jax.Array, layout: CacheLayout, heads: int, unit: int) -> tuple[jax.Array, ...]:
    """The numbers of runs, layers, heads, and entries within a run of `unit`: int32 [runs, layers, heads, unit] each.

    No block divides a run, so that the order of entries is about that in memory.
    """
    rest = (jnp.arange(n, dtype=jnp.int32) for n in (layout.num_layers, heads, unit))
    return tuple(jnp.meshgrid(runs, *rest, indexing="ij"))


def _place(
    layout: CacheLayout, shards: TokenShards, counts: tuple[int, ...], run, layer, head, within
) -> dict[str, jax.Array]:
    """Where entries lie in the blocks of all devices; `counts` are the devices, and the blocks of each.

    Entry number `within` of run number `run` of the entries of a prompt belongs to a head, counted over all devices.
    The arrays are those of `_grid`.
    """
    (devices, blocks), index, unit = counts, {"layer": layer, "head": head}, run.shape[-1]
    if shards == UNDIVIDED:
        runs_of_block = layout.block_size // unit
        block, token = (run, within) if runs_of_block == 1 else divmod(run, runs_of_block)
        if runs_of_block > 1:
            token = token * unit + within
    else:
        shard, slot = shards.place(run)  # runs of one entry
        block, token = divmod(slot, layout.block_size)
        block = shard * blocks + block
    if devices > shards.num_shards:
        part, index["head"] = divmod(head, layout.num_heads)
        block = part * (shards.num_shards * blocks) + block
    return {**index, "block": block, "token": token}


def _as_stored(old: CacheLayout, new: CacheLayout, entries: list[jax.Array]) -> list[jax.Array]:
    """What the runs of `old` store, as the runs of `new` store it, in unsigned integers as wide as new's elements."""
    if len(old.pages.parts) != len(new.pages.parts):
        entries = _divided(old.entry, entries)
    return [view_as(entry, _bits(new)) for entry in entries]


def _bits(layout: CacheLayout):
    """The unsigned dtype as wide as the buffer's elements: on CPUs, moving floats can change the bits of NaNs."""
    return jnp.dtype(f"uint{8 * layout.itemsize}")


def pairs_of_groups(**layouts: CacheLayout | PackedLayout) -> dict[str, tuple[CacheLayout, CacheLayout]]:
    """The groups of two layouts, paired, by name; ValueError with the difference if they do not store the same."""
    groups = _groups(**layouts)
    check_same_groups(groups, layouts)
    return groups


def _groups(**layouts) -> dict[str, tuple[CacheLayout, CacheLayout]]:
    """The groups of two layouts by name; ValueError unless both have the same names."""
    groups, (src, dst) = [], layouts
    for name, layout in layouts.items():
        if not isinstance(layout, CacheLayout | PackedLayout):
            raise ValueError(f"`{name}` is {layout!r}: expected a CacheLayout or a PackedLayout")
        groups.append(layout if isinstance(layout, Mapping) else {"": layout})
    if set(groups[0]) != set(groups[1]):
        names = ["one group" if list(group) == [""] else f"groups {', '.join(sorted(group))}" for group in groups]
        raise ValueError(f"`{src}` has {names[0]} and `{dst}` {names[1]}: expected the same groups in both")
    return {name: (old, groups[1][name]) for name, old in groups[0].items()}


def check_same_groups(
    groups: Iterable[str],
    layouts: Mapping[str, CacheLayout | PackedLayout],
    *,
    free: tuple[str, ...] = (),
    table: str | None = None,
) -> None:
    """ValueError unless two layouts, given by name, store the same in each of their `groups`.

    They may differ in `free`.  If block sizes may differ, so may the rates of groups of other tables than `table`.
    """
    src, dst = layouts
    allowed = "order, strides, padding, dtype and number of blocks"
    allowed = ", ".join([*(name.replace("num_", "").replace("_", " ") for name in free), allowed])
    for name in groups:
        facts = [_facts(layout, name) for layout in layouts.values()]
        for what, one in facts[0].items():
            if what in free or one == (other := facts[1].get(what, one)):
                continue
            if what == "rate" and "block_size" in free and facts[0]["table"] != table:
                continue
            where = f" of group {name!r}" * bool(name)
            reason = f"only {allowed} may differ"
            if what == "rate":
                reason = "entries that cover other numbers of tokens cannot be made from these"
            elif what in ("num_heads", "shards") and free:
                reason += "; caches that divide heads or tokens over devices need `jaxkv.parallel.convert_blocks`"
            raise ValueError(f"`{what}`{where} is {one} in `{src}` and {other} in `{dst}`: {reason}")


def _tables(layout: CacheLayout | PackedLayout) -> Mapping[str, Table]:
    return layout.tables if isinstance(layout, PackedLayout) else {"": Table(layout.block_size, None, ("",))}


def _facts(layout: CacheLayout | PackedLayout, name: str) -> dict[str, Any]:
    """What a layout, or group `name` of it, stores, by the names of the fields."""
    own = layout[name] if isinstance(layout, PackedLayout) else layout
    facts = {what: getattr(own, what) for what in ("entry", "num_layers", "num_heads")}
    if isinstance(layout, PackedLayout):
        facts |= {what: getattr(layout.groups[name], what) for what in ("rate", "table", "window")}
    return facts | {what: getattr(own, what) for what in ("block_size", "shards")}


def _divided(entry: Entry, entries: list[jax.Array]) -> list[jax.Array]:
    """Whole entries from keys and values that lie apart, or these from whole entries, as bytes."""
    bytes_of = [view_as(part, jnp.uint8) for part in entries]
    return entry.to_planes(*bytes_of) if len(entries) == 1 else [entry.from_planes(bytes_of)]


def _runs_in_rows(rows: jax.Array, layout: CacheLayout) -> list[Pages]:
    """Where the runs of entries lie in rows [devices, n, E], concatenated as a buffer of blocks."""
    devices, count, length = rows.shape
    runs = entry_runs(layout.pages.exported, layout.entry, layout.itemsize)
    return [replace(run, num_blocks=devices * count, block_stride=length, size=rows.size) for run in runs]


_IDS = array("int32", 3)


def _sample_write(cache):
    return (cache, _IDS, array(cache.layout.dtype, 3, cache.layout.pages.block_elements)), {}


_ANY = (MLAEntry, KVEntry, IndexerEntry, StateEntry)

OPERATIONS = (
    Operation(copy_blocks, lambda cache: ((cache, _IDS, _IDS), {}), entries=_ANY),
    Operation(read_blocks, lambda cache: ((cache, _IDS), {}), entries=_ANY),
    Operation(write_blocks, _sample_write, entries=_ANY),
)
