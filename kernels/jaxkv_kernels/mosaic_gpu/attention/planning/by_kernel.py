"""Computes the division by two small kernels.

    check       a CTA per request: whether the request needs a block that is not in the cache (an unknown block)
    divide      one CTA of four warpgroups: the division of all requests, in registers and shared memory

Timeline of `divide`.  It starts while `check` runs (programmatic dependent launch).

    load the lengths; sizes, running sums
    per boundary between partitions of a candidate division, 1,024 at once: search for the request that it lies in,
      compute the load and the splits of the partition, reduce them per candidate
    find the candidate of least cost; begins, counts and first partitions of requests
    wait for `check`; steps that need no mask; store all of these as tables
    per work tile, 512 at once: search for its request, store its columns; store its partition and request as tables
    per partition: search for its first work tile, store its columns; requests that are split

A batch-invariant plan has no candidates.  To keep the code short, most vectors have one register per thread, and both
searches and the evaluation of candidates are loops.  A plan of 128 requests and 66 partitions takes 4.3 us on an H200;
a single warpgroup with longer vectors and unrolled loops took 7.0.

Barriers.  All threads write a table, and then wait for each other.  Every table and every running sum has its own
shared memory.
Budget.  Shared memory: 12 tables of requests, two of work tiles, three of candidates and one of sums, 4 bytes per
element: for 1,024 requests 68 KiB, or 120 KiB if the plan is batch-invariant.
Registers: requests / 512 per vector of requests, and at most 128 per thread.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import table_tokens
from jaxkv_kernels.mosaic_gpu.attention.planning.division import Division, Problem
from jaxkv_kernels.mosaic_gpu.attention.planning.interpreted import InterpretedRegisters
from jaxkv_kernels.mosaic_gpu.attention.planning.lanes import LANES, WARPS
from jaxkv_kernels.mosaic_gpu.attention.planning.registers import SUMS, Registers, at_once, padded
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents, wait_for_previous

MOST_REQUESTS, MOST_TILES = 1024, 8192
"""The most requests and work tiles for which `divide` has registers and shared memory."""
AT_ONCE = 512
"""The most work tiles, and columns of a block table, that are processed at once."""
WARPGROUPS = 4
"""Warpgroups of `divide`."""
OF_REQUESTS = (
    "sums", "without_gaps", "before", "counts", "sizes", "begins", "first", "keys", "unmasked_end", "first_split",
    "origin", "after",
)  # fmt: skip
"""Names of the tables of requests."""


def fits(problem: Problem) -> bool:
    """Whether the kernels have room for a plan."""
    return problem.batch <= MOST_REQUESTS and problem.tiles <= MOST_TILES


def divide(
    seq_lens, block_tables, problem: Problem, *, block_size: int, num_blocks: int | None, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partitions`, `work_tiles` and `split_requests` of a plan; see `make_plan`."""
    checked = []
    if num_blocks is not None:
        check = partial(_check, block_size=block_size, num_blocks=num_blocks, interpret=interpret)
        checked.append(check(seq_lens, block_tables, problem))
    warpgroups = 1 if interpret else WARPGROUPS  # the interpreter's vectors are arrays of one thread
    threads = warpgroups * LANES
    requests = padded(problem.batch, threads)
    boundaries = problem.candidates * problem.boundaries
    candidates = -(-padded(boundaries, at_once(boundaries, threads)) // problem.boundaries)
    step = min(padded(problem.tiles, threads), AT_ONCE)
    chunks = -(-problem.tiles // step)
    most = table_tokens(block_tables, block_size)

    def body(lengths_ref, *refs, **scratch):
        *unknown_refs, partitions_ref, work_tiles_ref, split_requests_ref = refs
        vectors = (InterpretedRegisters if interpret else Registers)(scratch, warpgroups)
        lengths = jnp.clip(vectors.load(lengths_ref, problem.batch), 0, most)

        def unknown():
            if not unknown_refs:
                return jnp.zeros_like(lengths)
            wait_for_previous(interpret=interpret)
            return vectors.load(unknown_refs[0], problem.batch)

        division = Division(vectors, problem, lengths, unknown)

        def tiles(n, _):
            start = n * step
            columns, partition, _ = division.work_tiles(vectors.iota(step) + start)
            vectors.store_rows(work_tiles_ref, columns, start)
            vectors.store(start, (scratch["ordered"], partition), (scratch["requests"], columns[0]))
            return ()

        lax.fori_loop(0, chunks, tiles, ())
        partitions, last = division.partitions(scratch["ordered"], scratch["requests"])
        vectors.store_rows(partitions_ref, partitions, jnp.int32(0))
        vectors.store_rows(split_requests_ref, division.split_requests(partitions[1], last), jnp.int32(0))

    def table(count):
        return plgpu.SMEM((padded(count, threads),), jnp.int32)

    def rows(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return kernel(
        body,
        interpret=interpret,
        waits=bool(checked),
        kernel_name="plan_divide",
        grid=(1,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        out_type=[rows(problem.partitions + 1, 8), rows(problem.tiles, 7), rows(problem.combined, 3)],
        scratch_types={
            **{name: table(requests) for name in OF_REQUESTS},
            **{name: table(chunks * step) for name in ("ordered", "requests")},
            **{name: table(candidates) for name in ("lengths", "loads", "splits")},
            "warps": table(SUMS * requests // threads * WARPS * warpgroups),
        },
    )(seq_lens, *checked)


def _check(seq_lens, block_tables, problem: Problem, *, block_size: int, num_blocks: int, interpret: bool) -> jax.Array:
    """int32 [B]: 1 for requests that need a block that is not in the cache, 0 for others."""
    most = table_tokens(block_tables, block_size)

    def body(lengths_ref, table_ref, unknown_ref):
        pdl_launch_dependents(lengths_ref, interpret=interpret)
        vectors, request = (InterpretedRegisters if interpret else Registers)({}), lax.axis_index("request")
        length = jnp.clip(lengths_ref[request], 0, most)
        origin = problem.origin(length)

        def columns(n, unknown):
            start = n * AT_ONCE
            block = vectors.load(table_ref, AT_ONCE, request, start=start)
            first = (vectors.iota(AT_ONCE) + start) * block_size
            seen = (first > origin - block_size) & (first < length)
            return jnp.where(seen & ((block < 0) | (block >= num_blocks)), 1, unknown)

        none = jnp.zeros_like(vectors.iota(AT_ONCE))
        needed = lax.div(jnp.maximum(length, 1) - 1, jnp.int32(block_size * AT_ONCE)) + 1
        unknown_ref[request] = jnp.max(lax.fori_loop(0, needed, columns, none))

    out: Any = jax.ShapeDtypeStruct((problem.batch,), jnp.int32)
    return kernel(
        body,
        interpret=interpret,
        reduction_bytes=4 * LANES,
        kernel_name="plan_check",
        grid=(problem.batch,),
        grid_names=("request",),
        num_threads=1,
        thread_name="wg",
        out_type=out,
    )(seq_lens, block_tables)
