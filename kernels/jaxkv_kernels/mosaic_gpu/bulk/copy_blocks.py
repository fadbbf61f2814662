"""Copies whole blocks within a cache, all read before any is written.

Pairs whose destination is no other pair's source are copied directly.  The other blocks are first copied to an array
beside the cache.  A second kernel, which starts when every source has been read, writes them to their destinations.
The array has room for all pairs, because only the device knows which of them have to wait.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.bulk.block_chunks import chunked, fetch, send
from jaxkv_kernels.mosaic_gpu.bulk.block_runs import block_runs
from jaxkv_kernels.mosaic_gpu.bulk.write_blocks import write_into
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze


def copy_blocks(buffer, src, dst, *, pages):
    """Copies blocks `src` [n] to blocks `dst` [n], all read before any is written.

    Pairs with an id outside the cache are skipped.
    """
    return _copy(buffer, src, dst, pages=pages, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("pages", "interpret"))
def _copy(buffer, src, dst, *, pages, interpret):
    if not src.size:
        return buffer
    runs = block_runs(pages)
    good = (src >= 0) & (src < pages.num_blocks) & (dst >= 0) & (dst < pages.num_blocks)
    awaited = (dst[:, None] == src).any(axis=1)
    now, later = jnp.where(good & ~awaited, dst, -1), jnp.where(good & awaited, dst, -1)

    def copy_blocks(each_chunk, src_ref, now_ref, later_ref, cache_ref, held_ref, stage, full):
        def move(i, run, start, size):
            target, held = now_ref[i], later_ref[i] >= 0

            def part_of(block):
                *row, column = runs.index(block, run)
                return cache_ref.at[*row, pl.ds(column + start, size)]

            @pl.when((target >= 0) | held)
            def _():
                fetch(part_of(src_ref[i]), stage, full)
                whole = held_ref.at[i, pl.ds(run * runs.length + start, size)]
                lax.cond(held, lambda: send(stage, whole), lambda: send(stage, part_of(target)))

        each_chunk(move)

    ref = jax.new_ref(buffer.reshape(runs.view.shape))
    rows = jax.ShapeDtypeStruct((src.size, pages.block_elements), buffer.dtype)
    held = chunked(copy_blocks, runs, src.size, buffer.dtype, interpret=interpret, out_type=rows)(src, now, later, ref)
    write_into(ref, later, held, runs, pages=pages, interpret=interpret)
    return freeze(ref).reshape(buffer.shape)
