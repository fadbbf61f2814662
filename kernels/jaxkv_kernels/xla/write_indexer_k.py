"""Stores indexer keys."""

from functools import partial

import jax

from jaxkv_kernels.xla.entry_rows import store_entries


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """k [T, head_dim] into slots [T] of a layer; the new buffer."""
    rows = entry.encode((k,))[:, None]
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)
