"""The counterparts of `topk_chunk.py` and `topk_sorting.py` for Pallas's interpreter: chunks are plain arrays."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.addressing import slots_for
from jaxkv_kernels.formats.bits import ordered_bits
from jaxkv_kernels.mosaic_gpu.ptx.block_tables import BlockTables
from jaxkv_kernels.mosaic_gpu.topk_chunk import EMPTY, NAN


def load(ref, row, first, size: int, *, logits: bool):
    """Elements `first` to `first + size` of a row."""
    place = first + jnp.arange(size, dtype=jnp.int32)
    values = ref[row][jnp.minimum(place, ref.shape[1] - 1)]
    if logits:
        values = jnp.where(jnp.isnan(values), NAN, ordered_bits(values))
    return jnp.where(place < ref.shape[1], values, EMPTY)


def places(first, size: int):
    """The positions of the elements of a chunk."""
    return first + jnp.arange(size, dtype=jnp.int32)


def between(low, high, share):
    """The key of the value at fraction `share` between the values of `low` and `high`; EMPTY if that is not finite."""
    start, end = (lax.bitcast_convert_type(_ordered(key), jnp.float32) for key in (low, high))
    found = start + (end - start) * share + 0.0
    usable = jnp.abs(found) < jnp.inf
    return jnp.where(usable, _ordered(lax.bitcast_convert_type(found, jnp.int32)), EMPTY)


def _ordered(bits):
    """float32 bits in the order of the values, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def count(counters, step, keys, least):
    """How many keys are `least` or more."""
    del counters, step
    return (keys >= least).sum(dtype=jnp.int32)


def count_before(counters, step, keys, places, key, end):
    """How many keys equal `key` at places before `end`."""
    del counters, step
    return ((keys == key) & (places < end)).sum(dtype=jnp.int32)


def extremes(counters, keys):
    """The smallest key other than EMPTY, and the largest key."""
    del counters
    return jnp.where(keys == EMPTY, jnp.iinfo(jnp.int32).max, keys).min(), keys.max()


def collect(counters, keys, places, least, end, refs, index, slots: int) -> None:
    """Stores the chosen keys and their places."""
    del counters
    chosen = (keys > least) | ((keys == least) & (places < end))
    # Modulo, so that too many chosen keys give wrong results here as well.
    slot = jnp.where(chosen, (jnp.cumsum(chosen) - 1) % slots, slots)
    for ref, values, rest in zip(refs, (keys, places), (EMPTY, 0), strict=True):
        found = jnp.full(slots + 1, rest, jnp.int32).at[slot].set(values)[:slots]
        if index:
            ref[index[0], pl.ds(index[1] * slots, slots)] = found
        else:
            ref[...] = found


def store_sorted(refs, out_ref, row, k: int, tables: BlockTables | None) -> None:
    """Sorts keys and places, and stores the places of the first `k` to a row, or their slots; -1 for EMPTY."""
    keys, places = (ref[...] for ref in refs[:2])
    order = jnp.lexsort((places, ~keys))
    found = jnp.where(keys[order] == EMPTY, -1, places[order])[:k]
    if tables is not None:
        table = tables.array[...][row // tables.rows]
        found = slots_for(table[None], found[None], block_size=tables.block_size)[0]
    out_ref[row] = found
