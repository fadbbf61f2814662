"""Reads whole blocks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.bulk.block_chunks import chunked, clear, fetch, send
from jaxkv_kernels.mosaic_gpu.bulk.block_runs import block_runs
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting


def read_blocks(buffer, blocks, *, pages):
    """Blocks [n] as rows [n, block_elements]; rows of zeros for ids outside the cache."""
    return _read(buffer, blocks, pages=pages, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("pages", "interpret"))
def _read(buffer, blocks, *, pages, interpret):
    rows = jax.ShapeDtypeStruct((blocks.shape[0], pages.block_elements), buffer.dtype)
    if not blocks.size:
        return jnp.zeros(rows.shape, rows.dtype)
    runs = block_runs(pages)

    def read_blocks(each_chunk, cache_ref, block_ref, out_ref, stage, full):
        def move(i, run, start, size):
            block = block_ref[i]
            *row, column = runs.index(block, run)
            source = cache_ref.at[*row, pl.ds(column + start, size)]
            good = (block >= 0) & (block < pages.num_blocks)
            lax.cond(good, lambda: fetch(source, stage, full), lambda: clear(stage))
            send(stage, out_ref.at[i, pl.ds(run * runs.length + start, size)])

        each_chunk(move)

    kernel = chunked(read_blocks, runs, blocks.size, buffer.dtype, interpret=interpret, out_type=rows)
    return kernel(buffer.reshape(runs.view.shape), blocks)
