"""The buffer of a cache as NumPy arrays: what each of its elements belongs to, from the layout's strides alone."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jaxkv


def to_cache(layout: jaxkv.CacheLayout, buffer: np.ndarray) -> jaxkv.KVCache:
    """The bytes of a buffer, uint8 [nbytes], as a cache."""
    return jaxkv.KVCache(jnp.asarray(buffer.view(layout.dtype)), layout)


def to_bytes(cache: jaxkv.KVCache) -> np.ndarray:
    """The buffer of a cache as bytes, uint8 [nbytes]."""
    return np.asarray(cache.buffer).view(np.uint8)


def packed_twin(layout: jaxkv.CacheLayout, dtype: Any = None) -> jaxkv.CacheLayout:
    """The layout of a packed cache of one layer with the same blocks; `dtype` is by default that of the entry."""
    return jaxkv.CacheLayout(
        num_layers=1, num_blocks=layout.num_blocks, block_size=layout.block_size, num_heads=layout.num_heads,
        entry=layout.entry, order="LBNHC", dtype=dtype,
    )  # fmt: skip


def entry_bytes(layout: jaxkv.CacheLayout, buffer: np.ndarray) -> np.ndarray:
    """The entries of a buffer's bytes as a writable view, uint8 [layers, blocks, heads, tokens, nbytes].

    If keys and values lie apart, the view is [layers, blocks, heads, tokens, 2, nbytes / 2].
    """
    return _strided(layout, buffer.view(f"V{layout.itemsize}")).view(np.uint8)


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
    entries = _elements(layout)
    blocks = np.sort(entries.swapaxes(0, 1).reshape(layout.num_blocks, -1))
    if layout.blocks_are_runs:
        blocks = np.arange(layout.size, dtype=np.int32).reshape(layout.num_blocks, -1)
    layer, place, block, place_in_block = (np.full(layout.size, -1, np.int32) for _ in range(4))
    layer[entries] = np.arange(layout.num_layers).reshape(-1, 1, 1, 1, 1)
    place[entries] = _elements(packed_twin(layout, layout.dtype))
    block[blocks], place_in_block[blocks] = np.indices(blocks.shape, np.int32)
    return AddressMap(layer, place, block, place_in_block, blocks)


def _elements(layout: jaxkv.CacheLayout) -> np.ndarray:
    """The indices in the buffer of the elements of each entry, [layers, blocks, heads, tokens, width]."""
    found = _strided(layout, np.arange(layout.size, dtype=np.int32))
    return found.reshape(*found.shape[:4], layout.width)


def _strided(layout: jaxkv.CacheLayout, elements: np.ndarray) -> np.ndarray:
    """Elements of a buffer [size] by the entries that they belong to: [layers, blocks, heads, tokens, width].

    If keys and values lie apart, the result is [layers, blocks, heads, tokens, 2, width / 2].
    """
    strides, shape = layout.strides, (layout.num_layers, layout.num_blocks, layout.num_heads, layout.block_size)
    steps = strides.layer, strides.block, strides.head, strides.token
    parts, part_steps = ((2, layout.width // 2), (strides.part, 1)) if strides.part else ((layout.width,), (1,))
    steps = [elements.itemsize * step for step in (*steps, *part_steps)]
    return np.lib.stride_tricks.as_strided(elements[layout.offset :], (*shape, *parts), steps)
