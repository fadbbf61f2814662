"""Computes the division by two small kernels.

    check       a CTA per request: whether the request needs a block that is not in the cache (an unknown block)
    divide      one CTA of a warpgroup: the division of all requests, in registers and shared memory

Timeline of `divide`.  It starts while `check` runs (programmatic dependent launch).

    load the lengths; sizes, running sums
    per chunk of candidate divisions: a search per boundary between partitions; loads and splits, reduced per candidate
    the candidate of least cost; begins, counts and first partitions of requests
    wait for `check`: steps that need no mask; all of these as tables
    per chunk of work tiles: search for the request of each, store columns; their partitions as a table
    per partition: search for its first work tile, store its columns; requests that are split

A batch-invariant plan has no candidates.

Barriers.  A table is written by all threads, which then wait for each other; every table has shared memory of its own.
Where a table is reused (`following`, and `warps` for running sums), all threads also wait after they have read it.
Budget.  Shared memory: 13 tables of requests and one of work tiles, 4 bytes per element, and 8 KiB for candidates: for
1,024 requests 66 KiB, or 92 KiB if the plan is batch-invariant.
Registers: `registers.CHUNK` / 128 per vector of candidates, requests / 128 per vector of requests.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing.slots import table_tokens
from jaxkv_kernels.mosaic_gpu.attention.planning.division import Division, Problem
from jaxkv_kernels.mosaic_gpu.attention.planning.interpreted import InterpretedRegisters
from jaxkv_kernels.mosaic_gpu.attention.planning.lanes import LANES, WARP, WARPS
from jaxkv_kernels.mosaic_gpu.attention.planning.registers import Registers, chunk, padded
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents, wait_for_previous

MOST_REQUESTS, MOST_TILES = 1024, 8192
"""What `divide` has registers and shared memory for."""
AT_ONCE = 512
"""The most work tiles, and columns of a block table, that are processed at once."""
OF_REQUESTS = (
    "sums", "with_gaps", "without_gaps", "before", "counts", "sizes", "begins", "first", "keys", "unmasked_end",
    "first_split", "origin", "after",
)  # fmt: skip
"""Names of tables."""


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
    requests, width = padded(problem.batch), problem.partitions + 1 + -(problem.partitions + 1) % WARP
    candidates = problem.partitions // 8 + 1 + chunk(width) // width
    at_once = min(padded(problem.tiles), AT_ONCE)
    chunks = -(-problem.tiles // at_once)
    most = table_tokens(block_tables, block_size)

    def body(lengths_ref, *refs, **scratch):
        *unknown_refs, partitions_ref, work_tiles_ref, split_requests_ref = refs
        vectors = (InterpretedRegisters if interpret else Registers)(scratch)
        lengths = jnp.clip(vectors.load(lengths_ref, problem.batch), 0, most)

        def unknown():
            if not unknown_refs:
                return jnp.zeros_like(lengths)
            wait_for_previous(interpret=interpret)
            return vectors.load(unknown_refs[0], problem.batch)

        division = Division(vectors, problem, lengths, unknown)
        ordered = scratch["ordered"]

        def tiles(n, _):
            start = n * at_once
            columns, partition, _ = division.work_tiles(vectors.iota(at_once) + start)
            vectors.store_rows(work_tiles_ref, columns, start)
            vectors.store(ordered, partition, start)
            return ()

        lax.fori_loop(0, chunks, tiles, ())
        partitions, first_tiles = division.partitions(ordered)
        vectors.store_rows(partitions_ref, partitions, jnp.int32(0))
        vectors.store_rows(split_requests_ref, division.split_requests(first_tiles), jnp.int32(0))

    def table(count):
        return plgpu.SMEM((padded(count),), jnp.int32)

    def rows(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return kernel(
        body,
        interpret=interpret,
        waits=bool(checked),
        reduction_bytes=4 * LANES,
        kernel_name="plan_divide",
        grid=(1,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        out_type=[rows(problem.partitions + 1, 8), rows(problem.tiles, 7), rows(problem.combined, 3)],
        scratch_types={
            **{name: table(requests) for name in OF_REQUESTS},
            "ordered": table(chunks * at_once),
            **{f"{what}_{kind}": table(candidates) for what in ("loads", "splits") for kind in OF_REQUESTS[1:3]},
            "following": table(chunk(width)),
            "warps": table(requests // LANES * WARPS),
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
