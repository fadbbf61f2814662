"""Storing new entries at slots of a layer."""

from functools import partial

import jax

from jaxkv_kernels.addressing.entry_rows import store_entries
from jaxkv_kernels.rotary import rotated


@partial(jax.jit, static_argnames=("pages", "entry", "interleaved"))
def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, *, pages, entry, interleaved):
    """Stores kv_c [T, R] and k_pe [T, P], rotated by cos_sin [T, P] (or None); returns the new buffer."""
    if cos_sin is not None:
        k_pe = rotated(k_pe, cos_sin, interleaved=interleaved)
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
