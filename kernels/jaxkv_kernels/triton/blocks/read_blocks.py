"""Reads whole blocks."""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.blocks.block_runs import WARPS, block_runs, chunk_of, in_cache, in_row
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames="pages")
def read_blocks(buffer, blocks, *, pages):
    """Returns blocks [n] as rows [n, block_elements]; rows of ids outside the cache are 0."""
    rows = jax.ShapeDtypeStruct((blocks.size, pages.block_elements), buffer.dtype)
    if not blocks.size:
        return jnp.zeros(rows.shape, rows.dtype)
    runs = block_runs(pages, buffer.dtype.itemsize)
    grid = (blocks.size * runs.count * runs.chunks,)
    return launch(_read_blocks, (buffer, blocks), (rows,), grid=grid, warps=WARPS, RUNS=runs)[0]


@triton.jit
def _read_blocks(buffer, blocks, rows, RUNS: tl.constexpr):
    i, run, word = chunk_of(RUNS)
    block = tl.load(blocks + i)
    if (block >= 0) & (block < RUNS.num_blocks):
        values = tl.load(in_cache(buffer, block, run, word, RUNS), mask=word < RUNS.length)
    else:
        values = tl.zeros(word.shape, RUNS.word)
    tl.store(in_row(rows, i, run, word, RUNS), values, mask=word < RUNS.length)
