"""Moving runs of blocks through shared memory in chunks, each a bulk copy in and a bulk copy out.

Who does what.  A grid of CTAs of one warpgroup each, as many as the GPU holds at once, takes the chunks of all blocks
in turn.  A CTA fetches a chunk, waits for it, sends it on, and waits until shared memory has been read before it
fetches the next: six of them on a multiprocessor keep loads and stores going at the same time.

Barriers.  full: the chunk has landed.
Budget.  Shared memory: 32 KiB, so that six CTAs fit.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.bulk.block_runs import BlockRuns
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS

CHUNK_BYTES = 32 * 1024
CTAS = 6 * 132
"""Twelve CTAs a multiprocessor with half the chunk, or three with twice, are within 2 % (H200)."""
LINE = 128
"""Bytes: chunks begin at multiples of it within a run."""
PIECE = 1024
"""Elements that are cleared at once."""


def fetch(source, stage, full):
    """Brings a chunk to shared memory."""
    plgpu.copy_gmem_to_smem(source, stage.at[pl.ds(0, source.shape[0])], full, oob_mode=IN_BOUNDS)
    plgpu.barrier_wait(full)


def clear(stage):
    """Zeros for a chunk."""

    def one(i, _):
        stage[pl.ds(i * PIECE, PIECE)] = jnp.zeros((PIECE,), stage.dtype)
        return ()

    lax.fori_loop(0, stage.shape[0] // PIECE, one, ())
    plgpu.commit_smem()


def send(stage, target):
    """Sends a chunk on; shared memory may be filled anew on return."""
    plgpu.copy_smem_to_gmem(stage.at[pl.ds(0, target.shape[0])], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def chunked(body, runs: BlockRuns, blocks: int, dtype, *, interpret: bool, out_type: Any = ()):
    """A kernel in which `body(each_chunk, *refs, stage, full)` moves the chunks of `blocks` blocks.

    `each_chunk(move)` calls `move(i, run, start, size)` for those of a CTA: `size` elements, a Python int, from `start`
    on of a run of the i-th block.
    """
    chunks = -(-runs.length * dtype.itemsize // CHUNK_BYTES)
    line = LINE // dtype.itemsize
    chunk = min(-(-runs.length // (chunks * line)) * line, runs.length)
    chunks = -(-runs.length // chunk)
    last = runs.length - (chunks - 1) * chunk
    total = blocks * runs.count * chunks
    ctas = min(total, 4 if interpret else CTAS)

    def each_chunk(move: Callable[..., None]):
        def one(i, _):
            item = i * ctas + lax.axis_index("cta")

            @pl.when(item < total)
            def _():
                run = floordiv(item, chunks)
                number = item - run * chunks
                block = floordiv(run, runs.count)
                place = block, run - block * runs.count, number * chunk
                lax.cond(number < chunks - 1, lambda: move(*place, chunk), lambda: move(*place, last))

            return ()

        lax.fori_loop(0, -(-total // ctas), one, ())

    @wraps(body)
    def with_chunks(*refs):
        body(each_chunk, *refs)

    return kernel(
        with_chunks,
        interpret=interpret,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((-(-chunk // PIECE) * PIECE,), dtype), plgpu.Barrier()),
    )
