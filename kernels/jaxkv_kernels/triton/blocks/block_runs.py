"""Copying whole blocks as runs of memory, in chunks.

A run is a contiguous part of a block in the cache.  Concatenated, the runs of a block are the exported block.  A
program moves one chunk of a run, at most CHUNK bytes.  Within a launch, no program reads what another one writes.

What bounds it: memory bandwidth.  A chunk is 64 bytes per thread, 16 registers, and takes no shared memory.
"""

from dataclasses import dataclass
from math import gcd, prod

import triton
import triton.language as tl

from jaxkv_kernels.addressing.block_runs import runs_of
from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.triton.entries.addresses import in_bytes

CHUNK, WARPS = 8192, 4

WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@dataclass(frozen=True)
class BlockRuns:
    """The places of a block's runs, in bytes.  Kernels receive it as a constant."""

    num_blocks: int
    block_stride: int
    offset: int
    axes: tuple[tuple[int, int], ...]
    """Three of (count, stride), outermost in memory first."""
    length: int
    """Words per run."""
    word: tl.dtype
    """The widest type to whose size all addresses are aligned."""
    word_bytes: int

    @property
    def count(self) -> int:
        """Runs per block."""
        return prod(count for count, _ in self.axes)

    @property
    def chunk(self) -> int:
        """The number of words that a program moves, a power of two."""
        return min(CHUNK // self.word_bytes, triton.next_power_of_2(self.length))

    @property
    def chunks(self) -> int:
        """Chunks per run."""
        return triton.cdiv(self.length, self.chunk)


def block_runs(pages: Pages, itemsize: int) -> BlockRuns:
    """The fewest runs that the strides allow, for a buffer whose elements have `itemsize` bytes."""
    pages = in_bytes(pages, itemsize)
    runs = runs_of(pages)
    axes = [(1, 0)] * (3 - len(runs.axes)) + [(count, stride) for _, count, stride in runs.axes]
    word = gcd(8, runs.length, runs.offset, pages.block_stride, *(stride for _, stride in axes))
    length = runs.length // word
    return BlockRuns(pages.num_blocks, pages.block_stride, runs.offset, tuple(axes), length, WORDS[word], word)


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
    for axis in tl.static_range(2, -1, -1):
        address += (run % RUNS.axes[axis][0]).to(tl.int64) * RUNS.axes[axis][1]
        run = run // RUNS.axes[axis][0]
    return (buffer.to(tl.pointer_type(tl.uint8)) + address).to(tl.pointer_type(RUNS.word)) + word


@triton.jit
def in_row(rows, i, run, word, RUNS: tl.constexpr):
    """Pointers to the words of a run in row `i` of an array of exported blocks."""
    start = (i.to(tl.int64) * RUNS.count + run) * RUNS.length
    return rows.to(tl.pointer_type(RUNS.word)) + start + word
