"""Copying, reading and writing whole blocks, in all layers at once, and converting them between layouts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache, int32
from jaxkv.dispatch import Implementations, run
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout, Table
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import array
from jaxkv_kernels import calls
from jaxkv_kernels.addressing import Pages, read_entries, write_entries
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry


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
    data: ArrayLike, src: CacheLayout | PackedLayout, dst: CacheLayout | PackedLayout, *, table: str | None = None
) -> jax.Array:
    """Converts block payloads for a cache with another order, padding, strides or buffer dtype.

    Entries are moved bit for bit.  To copy blocks of one cache to another:

        rows = read_blocks(source, blocks)
        target = write_blocks(target, other_blocks, convert_blocks(rows, source.layout, target.layout))

    Args:
      data: [n, src.block_nbytes / itemsize] of the dtype of src's buffer, as `read_blocks` returns it for `src`.
      src: the layout of the payloads.  For packed blocks, pass the layout of a group to convert only that group, or the
        PackedLayout to convert all groups.
      dst: the layout to convert to: it must have the same entries, layers, heads, block size and shards, and the same
        groups if it is a PackedLayout.
      table: the table to which the blocks belong, required if the layouts are packed and have several tables: only its
        groups are converted.

    Returns:
      [n, dst.block_nbytes / itemsize] of the dtype of dst's buffer, for `write_blocks` to a cache of `dst`; 0 in
      padding and gaps.

    Raises:
      ValueError: the layouts differ in what they store, `data` does not fit `src`, or `table` is not one of theirs; the
        message shows the difference.
    """
    groups = pairs_of_groups(src=src, dst=dst)
    tables = src.tables if isinstance(src, PackedLayout) else {"": Table(src.block_size, None, ("",))}
    if table is None and len(tables) == 1:
        (table,) = tables
    if table not in tables:
        raise ValueError(
            f"`table` is {table!r}: expected one of {', '.join(map(repr, tables))}, the table of these blocks"
        )
    pairs = [groups[name] for name in tables[table].groups]
    (first, target), *_ = pairs
    dims = Dims(E=(first.pages.block_elements, "the elements of a block of `src`"))
    dims.check("data", data, "n E", (str(first.dtype),))
    rows = view_as(jnp.asarray(data), _bits(first))
    out = jnp.zeros((rows.shape[0], target.pages.block_elements), _bits(target))
    for old, new in pairs if rows.size else ():
        flat = rows.reshape(-1)
        entries = [read_entries(flat, inside, **place) for inside, place in _in_rows(rows, old.pages)]
        if len(old.pages.parts) != len(new.pages.parts):
            entries = _divided(old.entry, entries)
        for part, (inside, place) in zip(entries, _in_rows(out, new.pages), strict=True):
            part = view_as(part, _bits(new))
            out = write_entries(out.reshape(-1), inside, part, jnp.array(True), **place).reshape(out.shape)
    return view_as(lax.optimization_barrier(out), target.dtype)


def _bits(layout: CacheLayout):
    """The unsigned dtype as wide as the buffer's elements: on CPUs, moving floats can change the bits of NaNs."""
    return jnp.dtype(f"uint{8 * layout.itemsize}")


def pairs_of_groups(**layouts: CacheLayout | PackedLayout) -> dict[str, tuple[CacheLayout, CacheLayout]]:
    """The groups of two layouts, paired, by name; ValueError with the difference if they do not store the same."""
    groups, (src, dst) = [], layouts
    for name, layout in layouts.items():
        if not isinstance(layout, CacheLayout | PackedLayout):
            raise ValueError(f"`{name}` is {layout!r}: expected a CacheLayout or a PackedLayout")
        groups.append(layout if isinstance(layout, Mapping) else {"": layout})
    if set(groups[0]) != set(groups[1]):
        names = ["one group" if list(group) == [""] else f"groups {', '.join(sorted(group))}" for group in groups]
        raise ValueError(f"`{src}` has {names[0]} and `{dst}` {names[1]}: expected the same groups in both")
    for name in groups[0]:
        facts = [_facts(layout, name) for layout in layouts.values()]
        for what, one in facts[0].items():
            if one != (other := facts[1].get(what, one)):
                where = f" of group {name!r}" * bool(name)
                raise ValueError(
                    f"`{what}`{where} is {one} in `{src}` and {other} in `{dst}`: only order, strides, padding, dtype "
                    "and number of blocks may differ"
                )
    return {name: (old, groups[1][name]) for name, old in groups[0].items()}


def _facts(layout: CacheLayout | PackedLayout, name: str) -> dict[str, Any]:
    """What a layout, or group `name` of it, stores, by the names of the fields."""
    own = layout[name] if isinstance(layout, PackedLayout) else layout
    facts = {what: getattr(own, what) for what in ("entry", "num_layers", "num_heads", "block_size", "shards")}
    if isinstance(layout, PackedLayout):
        facts |= {what: getattr(layout.groups[name], what) for what in ("rate", "table", "window")}
    return facts


def _divided(entry: Entry, entries: list[jax.Array]) -> list[jax.Array]:
    """Whole entries from keys and values that lie apart, or these from whole entries, as bytes."""
    bytes_of = [view_as(part, jnp.uint8) for part in entries]
    return entry.to_planes(*bytes_of) if len(entries) == 1 else [entry.from_planes(bytes_of)]


def _in_rows(rows: jax.Array, pages: Pages) -> list[tuple[Pages, dict[str, jax.Array]]]:
    """Where the entries lie in `rows` [n, E], concatenated as a buffer of n blocks, and the indices of all entries.

    There is one such pair for each of `pages.parts`.  The indices are one array [n, L, H, N] per axis.
    """
    count, length = rows.shape
    counts = {"block": count, "layer": pages.num_layers, "head": pages.num_heads, "token": pages.block_size}
    grid = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in counts.values()), indexing="ij")
    index = dict(zip(counts, grid, strict=True))
    parts = pages.exported.parts
    return [(replace(part, num_blocks=count, block_stride=length, size=rows.size), index) for part in parts]


_IDS = array("int32", 3)


def _sample_write(cache):
    return (cache, _IDS, array(cache.layout.dtype, 3, cache.layout.pages.block_elements)), {}


_ANY = (MLAEntry, KVEntry, IndexerEntry, StateEntry)

OPERATIONS = (
    Operation(copy_blocks, lambda cache: ((cache, _IDS, _IDS), {}), entries=_ANY),
    Operation(read_blocks, lambda cache: ((cache, _IDS), {}), entries=_ANY),
    Operation(write_blocks, _sample_write, entries=_ANY),
)
