"""Stores indexer keys; quantised ones into split pages."""

from jaxkv_kernels.triton.store_entries import store_entries
from jaxkv_kernels.triton.store_split import store_split


def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """k [T, head_dim] into slots [T] of a layer; the new buffer."""
    if entry.split:
        return store_split(buffer, k, slot_mapping, layer, pages=pages, entry=entry)
    return store_entries(buffer, (k,), slot_mapping, layer, pages=pages, entry=entry)
