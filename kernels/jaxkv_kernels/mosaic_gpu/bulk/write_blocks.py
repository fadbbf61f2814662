"""Writes whole blocks."""

from functools import partial

import jax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.bulk.block_chunks import chunked, fetch, send
from jaxkv_kernels.mosaic_gpu.bulk.block_runs import block_runs
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze


def write_blocks(buffer, blocks, data, *, pages):
    """Writes rows [n, block_elements] to blocks [n]; ids outside the cache are skipped."""
    return _write(buffer, blocks, data, pages=pages, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("pages", "interpret"))
def _write(buffer, blocks, data, *, pages, interpret):
    if not blocks.size:
        return buffer
    runs = block_runs(pages)
    ref = jax.new_ref(buffer.reshape(runs.view.shape))
    write_into(ref, blocks, data, runs, pages=pages, interpret=interpret)
    return freeze(ref).reshape(buffer.shape)


def write_into(ref, blocks, data, runs, *, pages, interpret):
    """Writes rows to blocks of `ref`, the buffer in the view of `runs`."""

    def write_blocks(each_chunk, data_ref, block_ref, cache_ref, stage, full):
        def move(i, run, start, size):
            block = block_ref[i]

            @pl.when((block >= 0) & (block < pages.num_blocks))
            def _():
                *row, column = runs.index(block, run)
                fetch(data_ref.at[i, pl.ds(run * runs.length + start, size)], stage, full)
                send(stage, cache_ref.at[*row, pl.ds(column + start, size)])

        each_chunk(move)

    chunked(write_blocks, runs, blocks.size, data.dtype, interpret=interpret)(data, blocks, ref)
