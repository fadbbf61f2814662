"""Copies, reads and writes of whole blocks and of states, by bulk copies through shared memory.

Blocks, and the arrays of states, move in chunks of their runs, with one bulk copy in and one out per chunk.

Work.  The chunks of all runs of all blocks are dealt to as many CTAs, of one warpgroup each, as the GPU holds at once.

Timeline of a CTA, for each of its chunks:

    fetch    bulk copy from device memory to the stage; wait for `full`
    send     bulk copy from the stage to device memory; wait until the stage has been read

Nothing overlaps within a CTA.  Six CTAs per multiprocessor keep loads and stores in flight at the same time.

Barriers.  full: the chunk has landed.
Budget.  Shared memory: 32 KiB per CTA, so that six fit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import (
    Buffer,
    Pages,
    RowView,
    Runs,
    arrays_of,
    dtype_of,
    in_views,
    row_view,
    row_views,
    runs_of,
)
from jaxkv_kernels.calls import BlocksCall, CopyBlocks, ReadBlocks, ReadState, WriteBlocks, WriteState
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.mosaic_gpu.layout_reasons import steps, unaligned
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze, kernel, thaw
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS

CHUNK_BYTES = 32 * 1024
CTAS = 6
"""CTAs per multiprocessor.  Twelve with half the chunk, or three with twice, are within 2 % (H200)."""
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


@dataclass(frozen=True)
class Chunks:
    """The chunks of the runs of `blocks` blocks: `per_run` chunks of `size` elements, of which the last has `last`."""

    runs: Runs
    blocks: int
    per_run: int
    size: int
    last: int

    @staticmethod
    def of(runs: Runs, blocks: int, itemsize: int) -> "Chunks":
        """Chunks of equal length, at most CHUNK_BYTES and a multiple of LINE."""
        chunks, line = -(-runs.length * itemsize // CHUNK_BYTES), LINE // itemsize
        size = min(-(-runs.length // (chunks * line)) * line, runs.length)
        chunks = -(-runs.length // size)
        return Chunks(runs, blocks, chunks, size, runs.length - (chunks - 1) * size)

    @property
    def total(self) -> int:
        """The chunks of all blocks."""
        return self.blocks * self.runs.count * self.per_run


def chunked(body, parts: Sequence[Runs], blocks: int, dtype, *, out_type: Any = ()):
    """A kernel in which `body(each_chunk, *refs, stage, full)` moves the chunks of `blocks` blocks.

    `each_chunk(move)` calls `move(runs, i, run, start, size)` for each chunk of a CTA: `size` elements (a Python int)
    from element `start` of run `run` of the i-th block, where `runs` is one of `parts`.
    """
    interpret = bool(interpreting.value)
    every = [Chunks.of(runs, blocks, dtype.itemsize) for runs in parts]
    ctas = min(max(chunks.total for chunks in every), 4 if interpret else CTAS * multiprocessors())
    stage = max(chunks.size for chunks in every)

    def each_chunk(move: Callable[..., None]):
        for chunks in every:

            def one(i, _, chunks=chunks):
                number = i * ctas + lax.axis_index("cta")

                @pl.when(number < chunks.total)
                def _():
                    run = floordiv(number, chunks.per_run)
                    in_run = number - run * chunks.per_run
                    block = floordiv(run, chunks.runs.count)
                    place = chunks.runs, block, run - block * chunks.runs.count, in_run * chunks.size
                    whole, rest = (partial(move, *place, size) for size in (chunks.size, chunks.last))
                    lax.cond(in_run < chunks.per_run - 1, whole, rest)

                return ()

            lax.fori_loop(0, -(-chunks.total // ctas), one, ())

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
        scratch_types=(plgpu.SMEM((-(-stage // CLEARED) * CLEARED,), dtype), plgpu.Barrier()),
    )


@dataclass(frozen=True)
class BlockRuns(Runs):
    """The runs of a block, in a view of the buffer, or of one of its two arrays."""

    view: RowView
    number: int
    """The index of these runs among the parts of a block."""
    first: int
    """The element of an exported block at which the first run begins."""

    def in_row(self, run, start):
        """The element of an exported block at which element `start` of a run lies."""
        place = run * self.length + start
        return place + self.first if self.first else place

    def index(self, block, run):
        """Where a run begins: an index per leading axis of the view, then the column."""
        indices = {}
        for axis, count, _ in reversed(self.axes):
            indices[axis] = lax.rem(run, run.dtype.type(count))
            run = floordiv(run, count)
        return self.view.index(block=block, **indices)

    def part_of(self, cache_ref, place, start, size):
        """The `size` elements from element `start` on of the run that begins at `place`, an `index`."""
        *row, column = place
        return arrays_of(cache_ref, self.number + 1)[self.number].at[*row, pl.ds(column + start, size)]


def block_runs(pages: Pages) -> tuple[BlockRuns, ...]:
    """The runs of the blocks of `pages`; ValueError where a row of the view is too long for int32."""
    views = row_views(pages.whole_blocks if pages.blocks_are_runs else pages)
    found, first = [], 0
    for number, (runs, view) in enumerate(zip(runs_of(pages), views, strict=False)):
        if any(axis == "part" for axis, *_ in runs.axes):  # both views, which differ in their origins
            step = tuple(value - key for key, value in zip(views[0].origin, views[1].origin, strict=True))
            view = replace(view, steps=view.steps | {"part": step})
        found.append(BlockRuns(runs.axes, runs.length, runs.offset, runs.block_stride, view, number, first))
        first += runs.count * runs.length
    return tuple(found)


def blocks_unsupported_reasons(call: BlocksCall) -> Iterator[str]:
    """Reasons against a call that moves whole blocks."""
    pages, itemsize = call.pages, dtype_of(call.buffer).itemsize
    if pages.block_elements >= 2**31:
        yield f"blocks of {pages.block_elements} elements: supports fewer than 2**31"
    try:
        parts = block_runs(pages)
    except ValueError as error:
        yield str(error)
        return
    axes = {axis for runs in parts for axis, *_ in runs.axes}
    strides = {} if pages.blocks_are_runs else steps(pages, axes)
    for runs in parts:
        yield from unaligned({"run of a block": runs.length}, itemsize)
    yield from unaligned(strides, itemsize)


@jax.jit
def read_blocks(call: ReadBlocks) -> jax.Array:
    """Blocks [n] as rows [n, block_elements]; rows of zeros for ids outside the cache."""
    buffer, blocks, pages = call.buffer, call.blocks, call.pages
    rows = jax.ShapeDtypeStruct((blocks.shape[0], pages.block_elements), dtype_of(buffer))
    if not blocks.size:
        return jnp.zeros(rows.shape, rows.dtype)
    parts = block_runs(pages)

    def read_blocks(each_chunk, cache_ref, block_ref, out_ref, stage, full):
        def move(runs, i, run, start, size):
            block = block_ref[i]
            source = runs.part_of(cache_ref, runs.index(block, run), start, size)
            good = (block >= 0) & (block < pages.num_blocks)
            lax.cond(good, lambda: fetch(source, stage, full), lambda: clear(stage))
            send(stage, out_ref.at[i, pl.ds(runs.in_row(run, start), size)])

        each_chunk(move)

    read = chunked(read_blocks, parts, blocks.size, rows.dtype, out_type=rows)
    return read(in_views(buffer, [runs.view for runs in parts]), blocks)


@jax.jit
def write_blocks(call: WriteBlocks) -> Buffer:
    """Writes rows [n, block_elements] to blocks [n]; ids outside the cache are skipped."""
    buffer, blocks, pages = call.buffer, call.blocks, call.pages
    if not blocks.size:
        return buffer
    parts = block_runs(pages)
    ref = thaw(in_views(buffer, [runs.view for runs in parts]))
    _write_into(ref, blocks, call.data, parts, pages)
    return jax.tree.map(jnp.ravel, freeze(ref))


def _write_into(ref, blocks, data, parts, pages):
    """Writes rows to blocks of `ref`, the buffer in the view of `parts`, or two arrays in those of each."""

    def write_blocks(each_chunk, data_ref, block_ref, cache_ref, stage, full):
        def move(runs, i, run, start, size):
            block = block_ref[i]

            @pl.when((block >= 0) & (block < pages.num_blocks))
            def _():
                place = runs.index(block, run)
                fetch(data_ref.at[i, pl.ds(runs.in_row(run, start), size)], stage, full)
                send(stage, runs.part_of(cache_ref, place, start, size))

        each_chunk(move)

    chunked(write_blocks, parts, blocks.size, data.dtype)(data, blocks, ref)


@jax.jit
def copy_blocks(call: CopyBlocks) -> Buffer:
    """Copies blocks `src` [n] to blocks `dst` [n], all read before any is written.

    Pairs with an id outside the cache are skipped.

    Pairs whose destination is no other pair's source are copied directly.  The other blocks are first copied to an
    array beside the cache.  A second kernel, which starts when every source has been read, writes them to their
    destinations.  The array has room for all pairs, because only the device knows which of them have to wait.
    """
    buffer, pages, src, dst = call.buffer, call.pages, call.src, call.dst
    if not src.size:
        return buffer
    parts = block_runs(pages)
    good = (src >= 0) & (src < pages.num_blocks) & (dst >= 0) & (dst < pages.num_blocks)
    awaited = (dst[:, None] == src).any(axis=1)
    now, later = jnp.where(good & ~awaited, dst, -1), jnp.where(good & awaited, dst, -1)

    def copy_blocks(each_chunk, src_ref, now_ref, later_ref, cache_ref, held_ref, stage, full):
        def move(runs, i, run, start, size):
            target, held = now_ref[i], later_ref[i] >= 0

            def part_of(block):
                return runs.part_of(cache_ref, runs.index(block, run), start, size)

            @pl.when((target >= 0) | held)
            def _():
                fetch(part_of(src_ref[i]), stage, full)
                whole = held_ref.at[i, pl.ds(runs.in_row(run, start), size)]
                lax.cond(held, lambda: send(stage, whole), lambda: send(stage, part_of(target)))

        each_chunk(move)

    ref = thaw(in_views(buffer, [runs.view for runs in parts]))
    rows = jax.ShapeDtypeStruct((src.size, pages.block_elements), dtype_of(buffer))
    held = chunked(copy_blocks, parts, src.size, rows.dtype, out_type=rows)(src, now, later, ref)
    _write_into(ref, later, held, parts, pages)
    return jax.tree.map(jnp.ravel, freeze(ref))


def states_unsupported_reasons(call: WriteState | ReadState) -> Iterator[str]:
    """Reasons against a call that moves states."""
    sizes = {f"array {part.name!r}": part.nbytes for part in call.entry.fields() if part.name != "padding"}
    yield from unaligned(sizes, 1)
    yield from unaligned(steps(call.pages, ("layer", "token")), call.buffer.dtype.itemsize)
    try:
        row_view(call.pages)
    except ValueError as error:
        yield str(error)


@jax.jit
def write_state(call: WriteState) -> jax.Array:
    """Stores states, by name [T, ...], at slots [T] of a layer; returns the new buffer."""
    buffer, pages, slots = call.buffer, call.pages, call.slots
    if not slots.size:
        return buffer
    view = row_view(pages)
    ref = thaw(buffer.reshape(view.shape))
    for name, dtype, first, length in _state_arrays(call.entry, buffer.dtype):
        rows = view_as(call.states[name].astype(dtype).reshape(slots.size, -1), buffer.dtype)

        def write_state(each_chunk, row_ref, slot_ref, layer_ref, cache_ref, stage, full, first=first):
            def move(runs, i, run, start, size):
                live, (*row, column) = _state_place(view, pages, slot_ref[i], layer_ref[0])

                @pl.when(live)
                def _():
                    fetch(row_ref.at[i, pl.ds(start, size)], stage, full)
                    send(stage, cache_ref.at[*row, pl.ds(column + first + start, size)])

            each_chunk(move)

        moved = chunked(write_state, (Runs((), length, 0, 0),), slots.size, buffer.dtype)
        moved(rows, slots, jnp.reshape(call.layer, (1,)), ref)
    return freeze(ref).reshape(buffer.shape)


@jax.jit
def read_state(call: ReadState) -> dict[str, jax.Array]:
    """Returns the states, by name [T, ...], at slots [T] of a layer; those of slots outside the cache are 0."""
    buffer, pages, entry, slots = call.buffer, call.pages, call.entry, call.slots
    if not slots.size:
        return {name: jnp.zeros((0, *shape), dtype) for name, shape, dtype in entry.arrays}
    view, found = row_view(pages), []
    for _, dtype, first, length in _state_arrays(entry, buffer.dtype):

        def read_state(each_chunk, cache_ref, slot_ref, layer_ref, out_ref, stage, full, first=first):
            def move(runs, i, run, start, size):
                live, (*row, column) = _state_place(view, pages, slot_ref[i], layer_ref[0])
                source = cache_ref.at[*row, pl.ds(column + first + start, size)]
                lax.cond(live, lambda: fetch(source, stage, full), lambda: clear(stage))
                send(stage, out_ref.at[i, pl.ds(start, size)])

            each_chunk(move)

        rows = jax.ShapeDtypeStruct((slots.size, length), buffer.dtype)
        read = chunked(read_state, (Runs((), length, 0, 0),), slots.size, buffer.dtype, out_type=rows)
        found.append(view_as(read(buffer.reshape(view.shape), slots, jnp.reshape(call.layer, (1,))), dtype))
    return entry.named(found)


def _state_arrays(entry, dtype):
    """(name, dtype, first element, length) of each array of a state, in elements of `dtype`, the buffer's."""
    return [
        (part.name, jnp.dtype(part.dtype), part.offset // dtype.itemsize, part.nbytes // dtype.itemsize)
        for part in entry.fields()
    ]


def _state_place(view, pages, slot, layer):
    """Whether a slot is in the cache, and where its state begins: an index per leading axis of the view, the column."""
    live = (slot >= 0) & (slot < pages.num_slots) & (layer >= 0) & (layer < pages.num_layers)
    slot, layer = jnp.where(live, slot, 0), jnp.where(live, layer, 0)
    block = floordiv(slot, pages.block_size)
    return live, view.index(layer=layer, block=block, head=0, token=slot - block * pages.block_size)
