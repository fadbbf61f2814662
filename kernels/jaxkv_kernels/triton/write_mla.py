"""Stores latents and rotary keys."""

from jaxkv_kernels.triton.store_ds_mla import store_ds_mla
from jaxkv_kernels.triton.store_entries import store_entries


def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, *, pages, entry):
    """kv_c [T, R], k_pe [T, P] into slots [T] of a layer; the new buffer."""
    if entry.format == "fp8_ds_mla":
        return store_ds_mla(buffer, kv_c, k_pe, slot_mapping, layer, pages=pages, entry=entry)
    scales = (kv_scale, kv_scale) if entry.codec.scaled else ()
    return store_entries(buffer, (kv_c, k_pe), slot_mapping, layer, scales, pages=pages, entry=entry)
