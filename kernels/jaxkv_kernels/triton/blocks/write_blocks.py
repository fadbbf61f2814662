"""Writes whole blocks."""

from functools import partial

import jax
import triton
import triton.language as tl

from jaxkv_kernels.triton.blocks.block_runs import WARPS, block_runs, chunk_of, in_cache, in_row
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames="pages")
def write_blocks(buffer, blocks, data, *, pages):
    """Overwrites blocks [n] with rows [n, block_elements]; ids outside the cache are skipped."""
    if not blocks.size:
        return buffer
    runs = block_runs(pages, buffer.dtype.itemsize)
    grid = (blocks.size * runs.count * runs.chunks,)
    return launch(_write_blocks, (data, blocks), updated=(buffer,), grid=grid, warps=WARPS, RUNS=runs)[0]


@triton.jit
def _write_blocks(rows, blocks, buffer, RUNS: tl.constexpr):
    i, run, word = chunk_of(RUNS)
    block = tl.load(blocks + i)
    if (block >= 0) & (block < RUNS.num_blocks):
        values = tl.load(in_row(rows, i, run, word, RUNS), mask=word < RUNS.length)
        tl.store(in_cache(buffer, block, run, word, RUNS), values, mask=word < RUNS.length)
