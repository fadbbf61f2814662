"""The counterparts of `topk_chunk.py` and `topk_sorting.py` for Pallas's interpreter: chunks are plain arrays."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.addressing import slots_for
from jaxkv_kernels.formats.bits import ordered_bits
from jaxkv_kernels.mosaic_gpu.ptx.block_tables import BlockTables
from jaxkv_kernels.mosaic_gpu.topk_chunk import BINS, EMPTY, INFINITY, NAN


def load_logits(ref, row, first, size: int):
    """Elements `first` to `first + size` of a row of logits: keys, EMPTY past the end, and places."""
    place = first + jnp.arange(size, dtype=jnp.int32)
    values = ref[row][jnp.minimum(place, ref.shape[1] - 1)]
    keys = jnp.where(jnp.isnan(values), NAN, ordered_bits(values))
    return jnp.where(place < ref.shape[1], keys, EMPTY), place


def load_kept(ref, row, first, size: int):
    """The same of a row that `collect` has stored."""
    length = ref.shape[1] // 2
    place = first + jnp.arange(size, dtype=jnp.int32)
    keys, places = (ref[row][half + jnp.minimum(place, length - 1)] for half in (0, length))
    return jnp.where(place < length, keys, EMPTY), places


def load_candidates(ref):
    """What `collect` has stored to shared memory: keys and places."""
    return ref[...].reshape(2, -1)


def clear(bins) -> None:
    """Nothing: `narrow` has a histogram of its own."""
    del bins


def narrow(counters, bins, keys, state):
    """Narrows a range of keys to the bin that has the last of the `wanted` largest, or else to the lowest bin."""
    del counters, bins
    low, extent, wanted, _ = state
    shift = jnp.maximum(33 - BINS.bit_length() - lax.clz(extent), 0)
    distance = (keys - low).astype(jnp.uint32)
    bin_ = jnp.where(distance <= extent.astype(jnp.uint32), distance >> shift.astype(jnp.uint32), BINS).astype(
        jnp.int32
    )
    held = jnp.zeros(BINS + 1, jnp.int32).at[bin_].add(1)[:BINS]
    from_bin = jnp.cumsum(held[::-1])[::-1]
    found = jnp.maximum((from_bin >= wanted).sum(dtype=jnp.int32) - 1, 0)
    above = from_bin[found] - held[found]
    return low + (found << shift), (1 << shift) - 1, wanted - above, held[found]


def narrow_places(counters, bins, keys, places, key, state):
    """The same for the complements of the places of keys that equal `key`."""
    return narrow(counters, bins, jnp.where(keys == key, ~places, EMPTY), state)


def extremes(counters, keys):
    """The smallest key other than EMPTY, and the largest of a finite value."""
    del counters
    low = jnp.where(keys == EMPTY, jnp.iinfo(jnp.int32).max, keys).min()
    return low, jnp.where(keys < INFINITY, keys, EMPTY).max()


def collect(counters, keys, places, least, ref, index, slots: int) -> None:
    """Stores the chosen keys and their places."""
    del counters
    chosen = keys >= least
    # Modulo, so that too many chosen keys give wrong results here as well.
    slot = jnp.where(chosen, (jnp.cumsum(chosen) - 1) % slots, slots)
    for half, (values, rest) in enumerate(((keys, EMPTY), (places, 0))):
        found = jnp.full(slots + 1, rest, jnp.int32).at[slot].set(values)[:slots]
        start = half * (ref.shape[-1] // 2)
        if index:
            ref[index[0], pl.ds(start + index[1] * slots, slots)] = found
        else:
            ref[pl.ds(start, slots)] = found


def store_sorted(refs, out_ref, row, k: int, tables: BlockTables | None) -> None:
    """Sorts keys and places, and stores the places of the first `k` to a row, or their slots; -1 for EMPTY."""
    keys, places = load_candidates(refs[0])
    order = jnp.lexsort((places, ~keys))
    found = jnp.where(keys[order] == EMPTY, -1, places[order])[:k]
    if tables is not None:
        table = tables.array[...][row // tables.rows]
        found = slots_for(table[None], found[None], block_size=tables.block_size)[0]
    out_ref[row] = found
