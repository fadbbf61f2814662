"""Rows on the device that hold tokens of a cache in host memory, which kernels access by its address.

`fetch_rows` gives a row to each selected token, and copies tokens that had none from host memory.  Several programs
share the tokens of one request.  All of them look up all tokens, and copy a part of the missing ones.  The map
(`HotMap`) is updated in place by the one that arrives last, when the others have read it.  They count arrivals in an
array of zeros of their own, so that every launch has a last one, whatever happened to earlier launches:

    look up the row of each token, and which token that row holds: hits and misses
    barrier
    mark the rows of hits;  of equal misses, find the first
    barrier
    number the misses
    barrier
    arrive;  request the words of the first misses from the host
    in the order of use, the rows without a mark are evicted, one per miss
    barrier
    the last program: each miss takes the row of its number;  used rows move to the end of the order
    store the words;  copy the other misses

What bounds it: the link to the host, after the latency of four dependent loads and a prefix sum.  What is indexed by
rows is read as a whole, and elements are taken from shared memory.

`load_rows` and `store_rows` copy entries from and to host memory.  In all of them, a warp copies one entry at a time,
in words as wide as the alignment of its addresses allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Pages, entry_runs
from jaxkv_kernels.calls import CopyRows, FetchRows, HotRowsCall, LoadRows, StoreRows
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import launch
from jaxkv_kernels.triton.tiles import in_bytes, slots_of, token_address

FETCH_WARPS = 16
"""Warps of a program: each copies one entry at a time."""
PROGRAMS = 128
"""Programs of all requests, as many as a GPU runs at once."""


MOST_ROWS = 2**15


def unsupported_reasons(call: FetchRows) -> Iterator[str]:
    """Reasons against a call of `fetch_rows`."""
    if call.hot.rows > MOST_ROWS:
        yield f"{call.hot.rows} rows per request: supports at most {MOST_ROWS}, which are a tile of one program"
    if not call.positions.size:
        yield "`positions` of no values: a kernel would have nothing to do"


@jax.jit
def fetch_rows(call: FetchRows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The buffer, the maps and the slots [B, N] of the rows of tokens; see the function of `xla`.

    `writes` is an operand only because host memory must be read after them.
    """
    positions, hot = call.positions, call.hot
    requests, count = positions.shape
    shares = max(1, min(PROGRAMS // requests, triton.cdiv(count, FETCH_WARPS))) if call.copied else 1
    first, second = (*copy_runs(call), None)[:2]

    def result(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((requests, *shape), dtype)

    scratch = result(shares, count), result(shares, count), result(shares, hot.rows, dtype=jnp.uint8)
    buffer, maps, _, slots, *_ = launch(
        _fetch_rows,
        (call.address, call.writes, positions, call.block_tables, jnp.reshape(call.layer, (1,))),
        (result(count), *scratch),
        updated=(call.buffer, call.maps, jnp.zeros(requests, jnp.int32)),
        grid=(requests, shares),
        warps=FETCH_WARPS,
        HOT=hot,
        COUNT=count,
        TABLE=call.block_tables.shape[1],
        HOST_PAGES=call.host_pages,
        FIRST=first,
        SECOND=second,
        COPIED=call.copied,
        TOKENS=_tile(count),
        COLUMNS=_tile(hot.rows),
        TILE=FETCH_WARPS,
    )
    return buffer, maps, slots


def _tile(count: int) -> int:
    """Elements of a tile: at least one per thread, because threads with copies would repeat what others do."""
    return max(triton.next_power_of_2(count), 32 * FETCH_WARPS)


@triton.jit
def _fetch_rows(
    address, writes, positions, block_tables, layers, buffer, maps, arrivals, slots, sources, evicted, marks,
    HOT: tl.constexpr, COUNT: tl.constexpr, TABLE: tl.constexpr, HOST_PAGES: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, COPIED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    layer = tl.load(layers)
    known = (layer >= 0) & (layer < HOST_PAGES.num_layers)
    of_layer = tl.where(known, layer, 0).to(tl.int64)
    place = maps + (of_layer * tl.num_programs(0) + request) * HOT.width
    held = place + HOT.positions
    order = held + HOT.rows
    own = request.to(tl.int64) * shares + share
    sources, evicted, marks = sources + own * COUNT, evicted + own * COUNT, marks + own * HOT.rows
    # All tiles have one layout if Triton does not know this 0: then no load or store is of vectors, and no barriers
    # are needed between layouts.
    zero = tl.minimum(request, 0)
    n = tl.arange(0, TOKENS) ^ zero
    j = tl.arange(0, COLUMNS) ^ zero
    here = request.to(tl.int64) * COUNT + n
    position = tl.load(positions + here, mask=n < COUNT, other=-1)
    holds = tl.load(held + j, mask=j < HOT.rows, other=-1)
    old = tl.load(order + j, mask=j < HOT.rows, other=0)
    tl.store(marks + j, tl.zeros_like(j).to(tl.uint8), mask=j < HOT.rows)
    inside = (position >= 0) & (position < tl.where(known, HOT.positions, 0))
    column = position // HOST_PAGES.block_size
    block = tl.load(block_tables + request.to(tl.int64) * TABLE + column, mask=inside & (column < TABLE), other=-1)
    row = tl.load(place + position, mask=inside, other=0)
    live = (block >= 0) & (block < HOST_PAGES.num_blocks)
    # Another program may already have written the number of a miss, which is larger than those of rows.
    hit = live & (row < HOT.rows) & (tl.gather(holds, tl.minimum(row, HOT.rows - 1), 0) == position)
    miss = live & (hit == 0)
    tl.debug_barrier()
    tl.store(marks + row, tl.full(n.shape, 1, tl.uint8), mask=hit)
    # Among equal misses the first has the largest of these numbers, which are larger than those of rows.
    tl.atomic_max(place + position, HOT.rows + TOKENS - n, mask=miss, sem="relaxed")
    tl.debug_barrier()
    first = tl.where(miss, HOT.rows + TOKENS - tl.load(place + position, mask=miss, other=0), n)
    used = tl.load(marks + j, mask=j < HOT.rows, other=1)
    new = miss & (first == n)
    rank, count = _ranks(new, n, TOKENS)
    slot = block * HOST_PAGES.block_size + position % HOST_PAGES.block_size
    tl.store(sources + rank, slot, mask=new)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + request + tl.zeros_like(n), 1, mask=n == 0, sem="release")
    host, tile, copies = host_memory(address), share * TILE, count if COPIED else 0
    words, column = _load(host, layer, sources, tile, copies, FIRST, TILE)
    free = (j < HOT.rows) & (tl.gather(used, old, 0) == 0)
    free_rank, free_count = _ranks(free, j, COLUMNS)
    leaves = free & (free_rank < count)
    tl.store(evicted + free_rank, old, mask=leaves)
    tl.debug_barrier()
    first_row = request * HOT.rows
    if tl.max(tl.where(n == 0, arrived, 0), 0) == shares - 1:
        taken = tl.load(evicted + rank, mask=new, other=0)
        tl.store(held + taken, position, mask=new)
        tl.store(place + position, taken, mask=new)
        # In the new order, rows that are kept come first.
        before = tl.maximum(free_rank - count, 0)  # kept rows before a used one
        moved = tl.where(free & (leaves == 0), free_rank - count, free_count - count + j - before)
        tl.store(order + moved, old, mask=j < HOT.rows)
        found = tl.where(hit, row, tl.gather(taken, first, 0))
        tl.store(slots + here, tl.where(live, first_row + found, -1), mask=n < COUNT)
    _store(words, column, buffer, layer, evicted, first_row, tile, copies, FIRST, TILE)
    _copy(host, buffer, layer, sources, evicted, first_row, tile + shares * TILE, copies, FIRST, TILE)
    if SECOND is not None:
        _copy(host, buffer, layer, sources, evicted, first_row, tile, copies, SECOND, TILE)


@triton.jit
def _load(host, layer, sources, tile, count, RUN: tl.constexpr, TILE: tl.constexpr):
    """Loads a run of TILE missing tokens of `count`: the words, and their columns."""
    n = tile + tl.arange(0, TILE)
    host_pages: tl.constexpr = RUN.host_pages  # Triton 3.6 cannot pass attributes on
    source = tl.load(sources + n, mask=n < count, other=0)
    return load_words(token_address(host, layer, source, 0, host_pages), n < count, RUN)


@triton.jit
def _store(words, column, buffer, layer, evicted, first_row, tile, count, RUN: tl.constexpr, TILE: tl.constexpr):
    """Stores what `_load` has loaded."""
    n = tile + tl.arange(0, TILE)
    pages: tl.constexpr = RUN.pages
    target = first_row + tl.load(evicted + n, mask=n < count, other=0)
    store_words(token_address(buffer, layer, target, 0, pages), words, column, n < count, RUN)


@triton.jit
def _copy(host, buffer, layer, sources, evicted, first_row, tile, count, RUN: tl.constexpr, TILE: tl.constexpr):
    """Copies a run of this program's tokens, from `tile` on."""
    for at in range(tile, count, tl.num_programs(1) * TILE):
        words, column = _load(host, layer, sources, at, count, RUN, TILE)
        _store(words, column, buffer, layer, evicted, first_row, at, count, RUN, TILE)


@triton.jit
def _ranks(chosen, at, SIZE: tl.constexpr):
    """How many elements before each one are chosen, and how many of all; `at` has the numbers of the elements.

    A prefix sum over all elements would combine 32 elements at a time with those of each earlier warp.
    """
    chosen = chosen.to(tl.int32)
    rows = tl.reshape(chosen, [SIZE // 32, 32])  # a row is in one warp
    within = tl.reshape(tl.cumsum(rows, 1), [SIZE])
    sums = tl.gather(tl.sum(rows, 1), tl.arange(0, SIZE // 32), 0)
    before = tl.cumsum(sums, 0) - sums
    return within - chosen + tl.gather(before, at // 32, 0), tl.sum(sums, 0)


COPY_WARPS = 4
WIDEST = 16
"""Bytes of the widest load or store of a thread."""
LINE = tl.constexpr(128)
"""Bytes of a cache line.  A warp reads parts of as few lines as possible, each of which is a request to the host."""
WORDS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}
"""By bytes."""


@dataclass(frozen=True)
class CopyRun:
    """A run of bytes of an entry, on the device and in host memory.  Kernels receive it as a constant."""

    pages: Pages
    """In bytes, as `host_pages`."""
    host_pages: Pages

    @property
    def alignment(self) -> int:
        """Bytes to which all addresses are aligned, at most `WIDEST`."""
        both = self.pages, self.host_pages
        steps = ((x.width, x.offset, x.layer_stride, x.block_stride, x.token_stride) for x in both)
        return gcd(WIDEST, *sum(steps, ()))

    @property
    def word_bytes(self) -> int:
        """Bytes of a word, of which a thread copies several in a row."""
        return min(self.alignment, 4)

    @property
    def word(self) -> tl.dtype:
        """The type of a word."""
        return WORDS[self.word_bytes]

    @property
    def words(self) -> int:
        """The number of words."""
        return self.pages.width // self.word_bytes

    @property
    def columns(self) -> int:
        """The words of the lines that it may touch, as a power of two."""
        return triton.next_power_of_2((self.pages.width + LINE.value - self.alignment) // self.word_bytes)


def copy_runs(call: HotRowsCall) -> list[CopyRun]:
    """The runs of bytes that an entry consists of, one or two."""
    itemsize = call.buffer.dtype.itemsize
    runs = (entry_runs(pages, call.entry, itemsize) for pages in (call.pages, call.host_pages))
    return [CopyRun(in_bytes(here, itemsize), in_bytes(host, itemsize)) for here, host in zip(*runs, strict=True)]


@jax.jit
def load_rows(call: LoadRows) -> jax.Array:
    """Copies entries from `host_slots` of host memory to `slots` of the buffer, which it returns.

    `writes` is an operand only because host memory must be read after them.
    """
    buffer = call.buffer
    for run in copy_runs(call):
        (buffer,) = _copied(_load_rows, call, (*_places(call), call.writes), buffer, run)
    return buffer


@jax.jit
def store_rows(call: StoreRows) -> jax.Array:
    """Copies entries from `slots` of the buffer to `host_slots` of host memory; returns `writes`, increased.

    XLA does not know that the memory changes.  Later kernels that read it are ordered by `writes`.
    """
    writes = call.writes
    for run in copy_runs(call):
        (writes,) = _copied(_store_rows, call, (*_places(call), call.buffer), writes, run)
    return writes


def _places(call: CopyRows) -> tuple[jax.Array, ...]:
    """The operands of both kernels: addresses, slots, and both layers."""
    return call.address, call.slots, call.host_slots, jnp.stack([call.layer, call.host_layer])


def _copied(kernel, call: CopyRows, operands: tuple[jax.Array, ...], updated: jax.Array, run: CopyRun):
    """Launches a kernel that copies one run of the entries."""
    count = call.slots.size
    constants = {"RUN": run, "COUNT": count, "TILE": COPY_WARPS}
    grid = (triton.cdiv(count, COPY_WARPS),)
    return launch(kernel, operands, updated=(updated,), grid=grid, warps=COPY_WARPS, **constants)


@triton.jit
def _load_rows(
    address, slots, host_slots, layers, writes, buffer, RUN: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr
):
    here, host, keep = _addresses(address, slots, host_slots, layers, buffer, RUN, COUNT, TILE)
    words, column = load_words(host, keep, RUN)
    store_words(here, words, column, keep, RUN)


@triton.jit
def _store_rows(
    address, slots, host_slots, layers, buffer, writes, RUN: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr
):
    here, host, keep = _addresses(address, slots, host_slots, layers, buffer, RUN, COUNT, TILE)
    words, column = load_words(here, keep, RUN)
    store_words(host, words, column, keep, RUN)
    if tl.program_id(0) == 0:
        tl.store(writes, tl.load(writes) + 1)


@triton.jit
def _addresses(address, slots, host_slots, layers, buffer, RUN: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The addresses [TILE] of this program's entries on the device and in host memory, and which are copied."""
    pages: tl.constexpr = RUN.pages  # Triton 3.6 cannot pass attributes on
    host_pages: tl.constexpr = RUN.host_pages
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    layer, host_layer = tl.load(layers), tl.load(layers + 1)
    slot = tl.load(slots + n, mask=n < COUNT, other=-1)
    host_slot = tl.load(host_slots + n, mask=n < COUNT, other=-1)
    keep = (slot >= 0) & (slot < slots_of(layer, pages))
    keep &= (host_slot >= 0) & (host_slot < slots_of(host_layer, host_pages))
    here = token_address(buffer, layer, slot, 0, pages)
    return here, token_address(host_memory(address), host_layer, host_slot, 0, host_pages), keep


@triton.jit
def host_memory(address):
    """An address, given as two int32, as int64."""
    return (tl.load(address + 1).to(tl.int64) << 32) | (tl.load(address).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def load_words(start, keep, RUN: tl.constexpr):
    """The words of runs at the addresses `start` [n], where `keep` [n] holds, and their numbers: both [n, columns]."""
    before = (start.to(tl.int64) % LINE).to(tl.int32) // RUN.word_bytes  # words of the first line
    together: tl.constexpr = RUN.alignment // RUN.word_bytes
    before = tl.multiple_of(before, together)
    column = tl.arange(0, RUN.columns)[None, :] - before[:, None]
    return tl.load(_words(start, RUN)[:, None] + column, mask=_within(column, keep, RUN)), column


@triton.jit
def store_words(end, words, column, keep, RUN: tl.constexpr):
    """Stores the words with numbers `column` of runs at the addresses `end` [n], where `keep` [n] holds."""
    tl.store(_words(end, RUN)[:, None] + column, words, mask=_within(column, keep, RUN))


@triton.jit
def _words(place, RUN: tl.constexpr):
    """Addresses [n] as pointers to words."""
    alignment: tl.constexpr = RUN.alignment
    return tl.multiple_of(place.to(tl.pointer_type(RUN.word)), alignment)


@triton.jit
def _within(column, keep, RUN: tl.constexpr):
    return keep[:, None] & (column >= 0) & (column < RUN.words)
