"""Copying, reading and writing whole blocks as runs of memory, in chunks.

A run is a contiguous part of a block in the cache.  Concatenated, the runs of a block are the exported block.  A
program moves one chunk of a run, at most CHUNK bytes.  Within a launch, no program reads what another one writes.

`copy_blocks` reads all blocks before any is overwritten.  If the destination of a pair is not the source of any pair,
the first kernel copies it directly.  It reads the sources of the other pairs into a temporary array, and a second
kernel writes these to their destinations, after every source has been read.  The array has room for all pairs, because
only the device knows which ones it has to hold.

What bounds them: memory bandwidth.  A chunk is 64 bytes per thread, 16 registers, and takes no shared memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import gcd, prod

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Buffer, Pages, arrays_of, dtype_of, runs_of, updated
from jaxkv_kernels.calls import BlocksCall, CopyBlocks, ReadBlocks, WriteBlocks
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import launch
from jaxkv_kernels.triton.tiles import in_bytes

CHUNK, WARPS = 8192, 4

RUN_LIMIT = 2**31 - 2**13
"""The most elements of a block.  Kernels count them in int32, in chunks of at most 2**13."""

WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def unsupported_reasons(call: BlocksCall) -> Iterator[str]:
    """Reasons against a call that moves whole blocks."""
    if call.pages.block_elements > RUN_LIMIT:
        yield f"blocks of {call.pages.block_elements} elements: supports at most {RUN_LIMIT}"


@dataclass(frozen=True)
class BlockRuns:
    """The places of a block's runs, in bytes.  Kernels receive it as a constant."""

    num_blocks: int
    block_stride: int
    offset: int
    axes: tuple[tuple[int, int], ...]
    """At least three of (count, stride), outermost first."""
    length: int
    """Words per run."""
    word: tl.dtype
    """The widest type to whose size all addresses are aligned."""
    word_bytes: int

    @property
    def num_axes(self) -> int:
        """How many axes enumerate the runs."""
        return len(self.axes)

    @property
    def count(self) -> int:
        """Runs per block."""
        return prod(count for count, _ in self.axes)

    def elements(self, itemsize: int) -> int:
        """The elements of `itemsize` bytes in all runs."""
        return self.count * self.length * self.word_bytes // itemsize

    @property
    def chunk(self) -> int:
        """The number of words that a program moves, a power of two."""
        return min(CHUNK // self.word_bytes, triton.next_power_of_2(self.length))

    @property
    def chunks(self) -> int:
        """Chunks per run."""
        return triton.cdiv(self.length, self.chunk)


def block_runs(pages: Pages, itemsize: int) -> tuple[BlockRuns, ...]:
    """The fewest runs that the strides allow, for a buffer whose elements have `itemsize` bytes.

    Keys and values that lie apart with strides of their own have runs of their own, and take a kernel each.
    """
    found = []
    for runs in runs_of(in_bytes(pages, itemsize)):
        axes = [(1, 0)] * (3 - len(runs.axes)) + [(count, stride) for _, count, stride in runs.axes]
        word = gcd(8, runs.length, runs.offset, runs.block_stride, *(stride for _, stride in axes))
        length = runs.length // word
        found.append(
            BlockRuns(pages.num_blocks, runs.block_stride, runs.offset, tuple(axes), length, WORDS[word], word)
        )
    return tuple(found)


@triton.jit
def chunk_of(RUNS: tl.constexpr):
    """The chunk of this program: the position of its block in the call's ids, its run, and its words of the run."""
    chunk = tl.program_id(0)
    run = chunk // RUNS.chunks
    return run // RUNS.count, run % RUNS.count, chunk % RUNS.chunks * RUNS.chunk + tl.arange(0, RUNS.chunk)


@triton.jit
def in_cache(buffer, block, run, word, RUNS: tl.constexpr):
    """Pointers to the words of a run of a block of the cache."""
    address = RUNS.offset + block.to(tl.int64) * RUNS.block_stride
    for axis in tl.static_range(RUNS.num_axes - 1, -1, -1):
        address += (run % RUNS.axes[axis][0]).to(tl.int64) * RUNS.axes[axis][1]
        run = run // RUNS.axes[axis][0]
    return (buffer.to(tl.pointer_type(tl.uint8)) + address).to(tl.pointer_type(RUNS.word)) + word


@triton.jit
def in_row(rows, i, run, word, RUNS: tl.constexpr):
    """Pointers to the words of a run in row `i` of an array of exported blocks."""
    start = (i.to(tl.int64) * RUNS.count + run) * RUNS.length
    return rows.to(tl.pointer_type(RUNS.word)) + start + word


@jax.jit
def read_blocks(call: ReadBlocks) -> jax.Array:
    """Blocks as rows [n, block_elements]; rows of ids outside the cache are 0."""
    dtype, found = dtype_of(call.buffer), []
    parts = block_runs(call.pages, dtype.itemsize)
    for array, runs in zip(arrays_of(call.buffer, len(parts)), parts, strict=True):
        rows = jax.ShapeDtypeStruct((call.blocks.size, runs.elements(dtype.itemsize)), dtype)
        if not call.blocks.size:
            found.append(jnp.zeros(rows.shape, rows.dtype))
            continue
        grid = (call.blocks.size * runs.count * runs.chunks,)
        found += launch(_read_blocks, (array, call.blocks), (rows,), grid=grid, warps=WARPS, RUNS=runs)
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)


@triton.jit
def _read_blocks(buffer, blocks, rows, RUNS: tl.constexpr):
    i, run, word = chunk_of(RUNS)
    block = tl.load(blocks + i)
    if (block >= 0) & (block < RUNS.num_blocks):
        values = tl.load(in_cache(buffer, block, run, word, RUNS), mask=word < RUNS.length)
    else:
        values = tl.zeros(word.shape, RUNS.word)
    tl.store(in_row(rows, i, run, word, RUNS), values, mask=word < RUNS.length)


@jax.jit
def write_blocks(call: WriteBlocks) -> Buffer:
    """The buffer with blocks overwritten by rows; ids outside the cache are skipped."""
    itemsize, rows = dtype_of(call.buffer).itemsize, [call.data]
    parts = block_runs(call.pages, itemsize)
    if len(parts) > 1:
        rows = jnp.split(call.data, [*accumulate(runs.elements(itemsize) for runs in parts)][:-1], axis=1)
    return updated(call.buffer, partial(_written, call.blocks), rows, parts)


def _written(blocks: jax.Array, array: jax.Array, rows: jax.Array, runs: BlockRuns) -> jax.Array:
    """The array with these runs of blocks overwritten by rows."""
    if not blocks.size:
        return array
    grid = (blocks.size * runs.count * runs.chunks,)
    return launch(_write_blocks, (rows, blocks), updated=(array,), grid=grid, warps=WARPS, RUNS=runs)[0]


@triton.jit
def _write_blocks(rows, blocks, buffer, RUNS: tl.constexpr):
    i, run, word = chunk_of(RUNS)
    block = tl.load(blocks + i)
    if (block >= 0) & (block < RUNS.num_blocks):
        values = tl.load(in_row(rows, i, run, word, RUNS), mask=word < RUNS.length)
        tl.store(in_cache(buffer, block, run, word, RUNS), values, mask=word < RUNS.length)


@jax.jit
def copy_blocks(call: CopyBlocks) -> Buffer:
    """The buffer with blocks `src` copied over blocks `dst`; pairs with an id outside the cache are skipped."""
    buffer, src, dst, pages = call.buffer, call.src, call.dst, call.pages
    if not src.size:
        return buffer
    good = (src >= 0) & (src < pages.num_blocks) & (dst >= 0) & (dst < pages.num_blocks)
    awaited = (dst[:, None] == src).any(axis=1)
    now, later = jnp.where(good & ~awaited, dst, -1), jnp.where(good & awaited, dst, -1)
    dtype = dtype_of(buffer)

    def copied(array, runs):
        rows = jax.ShapeDtypeStruct((src.size, runs.elements(dtype.itemsize)), dtype)
        grid = (src.size * runs.count * runs.chunks,)
        operands = src, now, later
        array, held = launch(_copy_blocks, operands, (rows,), updated=(array,), grid=grid, warps=WARPS, RUNS=runs)
        return _written(later, array, held, runs)

    return updated(buffer, copied, block_runs(pages, dtype.itemsize))


@triton.jit
def _copy_blocks(src, now, later, buffer, held, RUNS: tl.constexpr):
    i, run, word = chunk_of(RUNS)
    target, waits = tl.load(now + i), tl.load(later + i) >= 0
    if (target >= 0) | waits:
        values = tl.load(in_cache(buffer, tl.load(src + i), run, word, RUNS), mask=word < RUNS.length)
        if waits:
            tl.store(in_row(held, i, run, word, RUNS), values, mask=word < RUNS.length)
        else:
            tl.store(in_cache(buffer, target, run, word, RUNS), values, mask=word < RUNS.length)
