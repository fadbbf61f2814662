"""Writes and reads states: the chunks of each of their arrays, as those of blocks (`block_chunks.py`)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.addressing import Runs, row_view
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.mosaic_gpu.bulk.block_chunks import chunked, clear, fetch, send
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze


def write_state(buffer, states, slots, layer, *, pages, entry):
    """Stores states, by name [T, ...], at slots [T] of a layer; returns the new buffer."""
    return _write(buffer, states, slots, layer, pages=pages, entry=entry, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("pages", "entry", "interpret"))
def _write(buffer, states, slots, layer, *, pages, entry, interpret):
    if not slots.size:
        return buffer
    view = row_view(pages)
    ref = jax.new_ref(buffer.reshape(view.shape))
    for name, dtype, first, length in _arrays(entry, buffer.dtype):
        rows = view_as(states[name].astype(dtype).reshape(slots.size, -1), buffer.dtype)

        def write_state(each_chunk, row_ref, slot_ref, layer_ref, cache_ref, stage, full, first=first):
            def move(i, run, start, size):
                live, (*row, column) = _place(view, pages, slot_ref[i], layer_ref[0])

                @pl.when(live)
                def _():
                    fetch(row_ref.at[i, pl.ds(start, size)], stage, full)
                    send(stage, cache_ref.at[*row, pl.ds(column + first + start, size)])

            each_chunk(move)

        moved = chunked(write_state, Runs((), length, 0), slots.size, buffer.dtype, interpret=interpret)
        moved(rows, slots, jnp.reshape(layer, (1,)), ref)
    return freeze(ref).reshape(buffer.shape)


def read_state(buffer, slots, layer, *, pages, entry):
    """Returns the states, by name [T, ...], at slots [T] of a layer; those of slots outside the cache are 0."""
    return _read(buffer, slots, layer, pages=pages, entry=entry, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("pages", "entry", "interpret"))
def _read(buffer, slots, layer, *, pages, entry, interpret):
    if not slots.size:
        return {name: jnp.zeros((0, *shape), dtype) for name, shape, dtype in entry.arrays}
    view, found = row_view(pages), []
    for _, dtype, first, length in _arrays(entry, buffer.dtype):

        def read_state(each_chunk, cache_ref, slot_ref, layer_ref, out_ref, stage, full, first=first):
            def move(i, run, start, size):
                live, (*row, column) = _place(view, pages, slot_ref[i], layer_ref[0])
                source = cache_ref.at[*row, pl.ds(column + first + start, size)]
                lax.cond(live, lambda: fetch(source, stage, full), lambda: clear(stage))
                send(stage, out_ref.at[i, pl.ds(start, size)])

            each_chunk(move)

        rows = jax.ShapeDtypeStruct((slots.size, length), buffer.dtype)
        read = chunked(read_state, Runs((), length, 0), slots.size, buffer.dtype, interpret=interpret, out_type=rows)
        found.append(view_as(read(buffer.reshape(view.shape), slots, jnp.reshape(layer, (1,))), dtype))
    return entry.named(found)


def _arrays(entry, dtype):
    """(name, dtype, first element, length) of each array of a state, in elements of `dtype`, the buffer's."""
    return [
        (part.name, jnp.dtype(part.dtype), part.offset // dtype.itemsize, part.nbytes // dtype.itemsize)
        for part in entry.fields()
    ]


def _place(view, pages, slot, layer):
    """Whether a slot is in the cache, and where its state begins: an index per leading axis of the view, the column."""
    live = (slot >= 0) & (slot < pages.num_slots) & (layer >= 0) & (layer < pages.num_layers)
    slot, layer = jnp.where(live, slot, 0), jnp.where(live, layer, 0)
    block = floordiv(slot, pages.block_size)
    return live, view.index(layer=layer, block=block, head=0, token=slot - block * pages.block_size)
