"""Storing new entries at slots of a layer."""

from functools import partial

import jax

from jaxkv_kernels.addressing.entry_rows import store_entries


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, *, pages, entry):
    """Stores kv_c [T, R] and k_pe [T, P] at slots [T] of a layer; returns the new buffer."""
    rows = entry.encode((kv_c, k_pe), (kv_scale, kv_scale))[:, None]
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """Stores k [T, H, D] and v [T, H, Dv] at slots [T] of a layer; returns the new buffer."""
    rows = entry.encode((k, v), (k_scale, v_scale))
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """Stores k [T, head_dim] at slots [T] of a layer; returns the new buffer."""
    rows = entry.encode((k,))[:, None]
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)
