"""Copies whole blocks within a cache.  All blocks are read before any is overwritten.

If the destination of a pair is not the source of any pair, the first kernel copies it directly.  It reads the sources
of the other pairs into a temporary array, and a second kernel writes these to their destinations, after every source
has been read.  The array has room for all pairs, because only the device knows which ones it has to hold.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.blocks.block_runs import WARPS, block_runs, chunk_of, in_cache, in_row
from jaxkv_kernels.triton.blocks.write_blocks import write_blocks
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames="pages")
def copy_blocks(buffer, src, dst, *, pages):
    """Copies blocks `src` [n] over blocks `dst` [n]; pairs with an id outside the cache are skipped."""
    if not src.size:
        return buffer
    runs = block_runs(pages, buffer.dtype.itemsize)
    good = (src >= 0) & (src < pages.num_blocks) & (dst >= 0) & (dst < pages.num_blocks)
    awaited = (dst[:, None] == src).any(axis=1)
    now, later = jnp.where(good & ~awaited, dst, -1), jnp.where(good & awaited, dst, -1)
    rows = jax.ShapeDtypeStruct((src.size, pages.block_elements), buffer.dtype)
    grid = (src.size * runs.count * runs.chunks,)
    operands = src, now, later
    buffer, held = launch(_copy_blocks, operands, (rows,), updated=(buffer,), grid=grid, warps=WARPS, RUNS=runs)
    return write_blocks(buffer, later, held, pages=pages)


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
