"""The buffer of a cache as NumPy arrays: what each of its elements belongs to, from the layout's strides alone.

If keys and values have an array each, these follow one another here, as if they were one buffer: the keys come first.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv_kernels.formats.format import Field


def cache_of(layout: jaxkv.CacheLayout, elements: Any) -> jaxkv.KVCache:
    """The elements of a buffer, [`elements_of`], as a cache."""
    size = layout.size
    return jaxkv.KVCache(elements if layout.value_size is None else (elements[:size], elements[size:]), layout)


def to_cache(layout: jaxkv.CacheLayout, buffer: np.ndarray) -> jaxkv.KVCache:
    """The bytes of a buffer, uint8 [nbytes], as a cache."""
    return jax.tree.map(jnp.asarray, cache_of(layout, buffer.view(layout.dtype)))


def to_bytes(cache: jaxkv.KVCache) -> np.ndarray:
    """The buffer of a cache as bytes, uint8 [nbytes]."""
    arrays = [np.asarray(array).view(np.uint8) for array in jax.tree.leaves(cache)]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def elements_of(layout: jaxkv.CacheLayout) -> int:
    """The number of elements of a cache."""
    return layout.size + (layout.value_size or 0)


def packed_twin(layout: jaxkv.CacheLayout, dtype: Any = None) -> jaxkv.CacheLayout:
    """The layout of a packed cache of one layer with the same blocks; `dtype` is by default that of the entry."""
    return jaxkv.CacheLayout(
        num_layers=1, num_blocks=layout.num_blocks, block_size=layout.block_size, num_heads=layout.num_heads,
        entry=layout.entry, order="LBNHC", dtype=dtype,
    )  # fmt: skip


def entry_bytes(layout: jaxkv.CacheLayout, buffer: np.ndarray) -> tuple[np.ndarray, ...]:
    """The entries of a buffer's bytes as writable views, uint8 [layers, blocks, heads, tokens, n].

    There is one view of whole entries, or two, of keys and of values, if these lie apart.
    """
    return tuple(view.view(np.uint8) for view in _strided(layout, buffer.view(f"V{layout.itemsize}")))


def get_entries(layout: jaxkv.CacheLayout, buffer: np.ndarray, layer: int) -> np.ndarray:
    """A copy of the entries of a layer, bytes [blocks, heads, tokens, nbytes], as in a packed cache."""
    parts = [view[layer] for view in entry_bytes(layout, buffer)]
    if len(parts) == 1:
        return parts[0].copy()
    entries = np.zeros((*parts[0].shape[:-1], layout.entry.nbytes), np.uint8)
    for part, places in zip(parts, _places(layout), strict=True):
        entries[..., places] = part
    return entries


def set_entries(layout: jaxkv.CacheLayout, buffer: np.ndarray, layer: int, entries: np.ndarray) -> None:
    """Stores what `get_entries` returns in a buffer's bytes."""
    for view, places in zip(entry_bytes(layout, buffer), _places(layout), strict=True):
        view[layer] = entries[..., places]


def stored_fields(layout: jaxkv.CacheLayout, buffer: np.ndarray) -> list[tuple[Field, np.ndarray]]:
    """Each field of the entries, with a writable view of it, [layers, blocks, heads, tokens, n].

    `buffer` has an item of any dtype per byte of the cache.  n is the number of bytes of the field.
    """
    runs = [(layout.strides, layout.offset * layout.itemsize, layout.entry.fields(layout.block_size))]
    if layout.value_strides is not None and layout.value_offset is not None:
        before = 0 if layout.value_size is None else layout.size
        key, value = layout.entry.planes
        runs = [(*runs[0][:2], key), (layout.value_strides, (before + layout.value_offset) * layout.itemsize, value)]
    found = []
    for strides, offset, fields in runs:
        for field in (field for field in fields if field.nbytes):
            steps = [layout.itemsize * step for step in (strides.layer, strides.block, strides.head, strides.token)]
            steps = [*steps[:3], steps[3] if field.step is None else field.step, 1]
            shape = layout.num_layers, layout.num_blocks, layout.num_heads, layout.block_size, field.nbytes
            steps = [buffer.itemsize * step for step in steps]
            found.append((field, np.lib.stride_tricks.as_strided(buffer[offset + field.offset :], shape, steps)))
    return found


class AddressMap(NamedTuple):
    """What each element of a cache's buffer belongs to; int32 arrays."""

    layer: np.ndarray
    """[size]: the layer of each element; -1 between entries."""
    place: np.ndarray
    """[size]: the index of the same element in a packed cache of one layer."""
    block: np.ndarray
    """[size]: the exported block that contains it; -1 for none."""
    place_in_block: np.ndarray
    """[size]: the index of the element in that block."""
    blocks: np.ndarray
    """[blocks, elements]: the indices in the buffer of the elements of each exported block."""


def address_map(layout: jaxkv.CacheLayout) -> AddressMap:
    """The address map of a layout."""
    size = elements_of(layout)
    elements = _strided(layout, np.arange(size, dtype=np.int32))
    blocks = [np.sort(part.swapaxes(0, 1).reshape(layout.num_blocks, -1)) for part in elements]
    blocks = np.concatenate(blocks, axis=1)
    if layout.blocks_are_runs:
        blocks = np.arange(size, dtype=np.int32).reshape(layout.num_blocks, -1)
    layer, place, block, place_in_block = (np.full(size, -1, np.int32) for _ in range(4))
    (twins,) = _strided(twin := packed_twin(layout, layout.dtype), np.arange(twin.size, dtype=np.int32))
    for part, places in zip(elements, _places(layout, layout.itemsize), strict=True):
        layer[part] = np.arange(layout.num_layers).reshape(-1, 1, 1, 1, 1)
        place[part] = twins[..., places]
    block[blocks], place_in_block[blocks] = np.indices(blocks.shape, np.int32)
    return AddressMap(layer, place, block, place_in_block, blocks)


def _places(layout: jaxkv.CacheLayout, itemsize: int = 1) -> list[np.ndarray]:
    """For each view of `entry_bytes`, which elements of `itemsize` bytes of an entry in a packed cache it has."""
    entry = layout.entry
    if layout.value_offset is None:
        return [np.arange(entry.nbytes // itemsize)]
    whole = {field.name: field.offset for field in entry.fields()}
    return [
        np.concatenate([whole[field.name] + np.arange(field.nbytes) for field in plane])[::itemsize] // itemsize
        for plane in entry.planes
    ]


def _strided(layout: jaxkv.CacheLayout, elements: np.ndarray) -> list[np.ndarray]:
    """Elements of a buffer [size] by the runs that they belong to: [layers, blocks, heads, tokens, width] each.

    A run is an entry, or a key, and a value, if these lie apart.
    """
    shape, item = (layout.num_layers, layout.num_blocks, layout.num_heads, layout.block_size), layout.itemsize
    runs = [(layout.strides, layout.offset)]
    if layout.value_strides is not None and layout.value_offset is not None:
        before = 0 if layout.value_size is None else layout.size
        runs.append((layout.value_strides, before + layout.value_offset))
    found = []
    for (strides, offset), places in zip(runs, _places(layout), strict=True):
        steps = [elements.itemsize * step for step in (strides.layer, strides.block, strides.head, strides.token, 1)]
        width = len(places) // item
        found.append(np.lib.stride_tricks.as_strided(elements[offset:], (*shape, width), steps))
    return found
