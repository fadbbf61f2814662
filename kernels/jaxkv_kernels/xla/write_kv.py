"""Stores keys and values of all heads."""

from functools import partial

import jax

from jaxkv_kernels.xla.entry_rows import store_entries


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """k [T, H, D], v [T, H, Dv] into slots [T] of a layer; the new buffer."""
    rows = entry.encode((k, v), (k_scale, v_scale))
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)
