"""Stores keys and values of all heads."""

from jaxkv_kernels.triton.store_entries import store_entries


def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """k [T, H, D], v [T, H, Dv] into slots [T] of a layer; the new buffer."""
    scales = (k_scale, v_scale) if entry.codec.scaled else ()
    return store_entries(buffer, (k, v), slot_mapping, layer, scales, pages=pages, entry=entry)
