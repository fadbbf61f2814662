"""Stores latents and rotary keys."""

from jaxkv_kernels.triton.store_entries import store_entries


def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, *, pages, entry):
    """kv_c [T, R], k_pe [T, P] into slots [T] of a layer; the new buffer."""
    del kv_scale
    return store_entries(buffer, (kv_c, k_pe), slot_mapping, layer, pages=pages, entry=entry)
