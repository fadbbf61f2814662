"""Whole blocks moved through shared memory in chunks of their runs, one bulk copy in and one out per chunk.

Work.  The chunks of all runs of all blocks are dealt to as many CTAs, of one warpgroup each, as the GPU holds at once.

Timeline of a CTA, for each of its chunks:

    fetch    bulk copy from device memory to the stage; wait for `full`
    send     bulk copy from the stage to device memory; wait until the stage has been read

Nothing overlaps within a CTA.  Six CTAs per multiprocessor keep loads and stores in flight at the same time.

Barriers.  full: the chunk has landed.
Budget.  Shared memory: 32 KiB per CTA, so that six fit.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Runs
from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS

CHUNK_BYTES = 32 * 1024
CTAS = 6 * MULTIPROCESSORS
"""Six per multiprocessor.  Twelve with half the chunk, or three with twice, are within 2 % (H200)."""
LINE = 128
"""Bytes.  Within a run, chunks begin at multiples of it."""
CLEARED = 1024
"""Elements that `clear` stores at once."""


def fetch(source, stage, full):
    """Copies a chunk to shared memory; it has landed on return."""
    plgpu.copy_gmem_to_smem(source, stage.at[pl.ds(0, source.shape[0])], full, oob_mode=IN_BOUNDS)
    plgpu.barrier_wait(full)


def clear(stage):
    """Fills the stage with zeros instead of a chunk."""

    def one(i, _):
        stage[pl.ds(i * CLEARED, CLEARED)] = jnp.zeros((CLEARED,), stage.dtype)
        return ()

    lax.fori_loop(0, stage.shape[0] // CLEARED, one, ())
    plgpu.commit_smem()


def send(stage, target):
    """Copies a chunk from shared memory to `target`; shared memory may be overwritten on return."""
    plgpu.copy_smem_to_gmem(stage.at[pl.ds(0, target.shape[0])], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def chunked(body, runs: Runs, blocks: int, dtype, *, interpret: bool, out_type: Any = ()):
    """A kernel in which `body(each_chunk, *refs, stage, full)` moves the chunks of `blocks` blocks.

    `each_chunk(move)` calls `move(i, run, start, size)` for each chunk of a CTA: `size` elements (a Python int) from
    element `start` of run `run` of the i-th block.
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
            number = i * ctas + lax.axis_index("cta")

            @pl.when(number < total)
            def _():
                run = floordiv(number, chunks)
                in_run = number - run * chunks
                block = floordiv(run, runs.count)
                place = block, run - block * runs.count, in_run * chunk
                lax.cond(in_run < chunks - 1, lambda: move(*place, chunk), lambda: move(*place, last))

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
        scratch_types=(plgpu.SMEM((-(-chunk // CLEARED) * CLEARED,), dtype), plgpu.Barrier()),
    )
