"""Rows on the device that hold the tokens of a cache in host memory; callbacks of the host access that memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jaxkv_kernels.addressing import entry_runs, load_entries, slots_for, store_entries
from jaxkv_kernels.calls import CopyRows, FetchRows, LoadRows, StoreRows
from jaxkv_kernels.hot_rows import memory_at


@jax.jit
def fetch_rows(call: FetchRows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gives a row to each token, and copies tokens that had none from host memory (if `copied`) to their rows.

    Returns the buffer, the maps [L, B, hot.width] and the slots [B, N] of the rows; -1 for positions [B, N] outside the
    map, and for those without a slot in host memory, by block_tables [B, M].
    """
    pages, host_pages, entry, hot = call.pages, call.host_pages, call.entry, call.hot
    buffer, maps, positions, layer = call.buffer, call.maps, call.positions, call.layer
    host_slots = slots_for(call.block_tables, positions, block_size=host_pages.block_size)
    known = (layer >= 0) & (layer < pages.num_layers)
    at = jnp.where(known, layer, 0)
    live = known & (host_slots >= 0) & (host_slots < host_pages.num_slots)
    live &= (positions >= 0) & (positions < hot.positions)
    of_layer = lax.dynamic_index_in_dim(maps, at, keepdims=False)
    of_layer, row, target = jax.vmap(partial(_assign, hot=hot))(of_layer, jnp.where(live, positions, 0), live)
    maps = lax.dynamic_update_index_in_dim(maps, of_layer, at, 0)
    first = hot.rows * jnp.arange(len(positions), dtype=jnp.int32)[:, None]
    if call.copied:
        missing = target < hot.rows
        sources = jnp.where(missing, host_slots, -1)
        shape = jax.ShapeDtypeStruct((*positions.shape, 1, entry.nbytes), jnp.uint8)
        load = partial(_load, pages=host_pages, entry=entry, itemsize=buffer.dtype.itemsize)
        rows = jax.pure_callback(load, shape, call.address, call.writes, sources, at)
        buffer = store_entries(buffer, pages, entry, rows, jnp.where(missing, first + target, -1), at)
    return buffer, maps, jnp.where(live, first + row, -1)


def _assign(of_request, position, live, *, hot):
    """The new map of a request, the row of each position [N], and the row to which each is to be copied.

    The latter is `hot.rows` for tokens that already have a row, and for all but the first of equal positions.
    """
    place, held, order = hot.split(of_request)
    number = jnp.arange(len(position), dtype=jnp.int32)
    row = place[position]
    hit = live & (held[row] == position)
    miss = live & ~hit
    missing = jnp.where(miss, position, hot.positions)
    firsts = jnp.full(hot.positions, len(position), jnp.int32).at[missing].min(number, mode="drop")
    new = miss & (firsts[position] == number)
    used = jnp.zeros(hot.rows, bool).at[jnp.where(hit, row, hot.rows)].set(True, mode="drop")[order]
    rank = jnp.cumsum(~used) - 1
    evicted = ~used & (rank < new.sum())
    rows = jnp.zeros(len(position), jnp.int32).at[jnp.where(evicted, rank, len(position))].set(order, mode="drop")
    target = jnp.where(new, rows[jnp.cumsum(new) - 1], hot.rows)
    held = held.at[target].set(position, mode="drop")
    place = place.at[jnp.where(new, position, hot.positions)].set(target, mode="drop")
    order = order[jnp.argsort(used | evicted, stable=True)]
    return jnp.concatenate([place, held, order]), place[position], target


@jax.jit
def load_rows(call: LoadRows) -> jax.Array:
    """Copies entries at `host_slots` of host memory to `slots`; returns the buffer."""
    sources, layer = _host_places(call)
    shape = jax.ShapeDtypeStruct((call.slots.size, 1, call.entry.nbytes), jnp.uint8)
    load = partial(_load, pages=call.host_pages, entry=call.entry, itemsize=call.buffer.dtype.itemsize)
    rows = jax.pure_callback(load, shape, call.address, call.writes, sources, layer)
    slots = jnp.where(sources >= 0, call.slots, -1)
    return store_entries(call.buffer, call.pages, call.entry, rows, slots, call.layer)


@jax.jit
def store_rows(call: StoreRows) -> jax.Array:
    """Copies entries at `slots` to `host_slots` of host memory; returns `writes` plus 1."""
    rows, valid = load_entries(call.buffer, call.pages, call.entry, call.slots, call.layer, dtype=jnp.uint8)
    store = partial(_store, pages=call.host_pages, entry=call.entry, itemsize=call.buffer.dtype.itemsize)
    targets, layer = _host_places(call)
    counter = jax.ShapeDtypeStruct((1,), jnp.int32)
    return io_callback(store, counter, call.address, call.writes, jnp.where(valid, targets, -1), layer, rows)


def _host_places(call: CopyRows) -> tuple[jax.Array, jax.Array]:
    """The slots [N] in host memory, -1 for those outside it, and a layer of it."""
    pages, slots, layer = call.host_pages, call.host_slots, call.host_layer
    known = (layer >= 0) & (layer < pages.num_layers)
    inside = known & (slots >= 0) & (slots < pages.num_slots)
    return jnp.where(inside, slots, -1), jnp.where(known, layer, 0)


def _load(address, writes, slots, layer, *, pages, entry, itemsize) -> np.ndarray:
    """The bytes [..., 1, nbytes] of the entries at `slots` [...] of host memory; 0 at slots outside the cache."""
    del writes  # an operand only because the memory must be read after them
    memory, slots = memory_at(address).bytes, np.asarray(slots)
    good = (slots >= 0) & (slots < pages.num_slots)
    rows = np.zeros((*slots.shape, 1, entry.nbytes), np.uint8)
    first = 0
    for where, length in _places(pages, entry, itemsize, slots[good], layer):
        rows[good, 0, first : first + length] = memory[where]
        first += length
    return rows


def _store(address, writes, slots, layer, rows, *, pages, entry, itemsize) -> np.ndarray:
    """Stores the bytes [n, 1, nbytes] of entries at `slots` [n] of host memory."""
    memory, slots = memory_at(address).bytes, np.asarray(slots)
    good = (slots >= 0) & (slots < pages.num_slots)
    first = 0
    for where, length in _places(pages, entry, itemsize, slots[good], layer):
        memory[where] = np.asarray(rows)[good, 0, first : first + length]
        first += length
    return np.asarray(writes) + np.int32(1)


def _places(pages, entry, itemsize, slots, layer):
    """The bytes [n, length] of each run of the entries at slots [n], and their number per entry."""
    block, token = np.divmod(slots.astype(np.int64), pages.block_size)
    for run in entry_runs(pages, entry, itemsize):
        start = run.offset + int(layer) * run.layer_stride + block * run.block_stride + token * run.token_stride
        length = run.width * itemsize
        yield start[:, None] * itemsize + np.arange(length), length
