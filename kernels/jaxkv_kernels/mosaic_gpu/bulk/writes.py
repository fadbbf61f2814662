"""Stores new entries by bulk copies."""

from jaxkv_kernels.mosaic_gpu.bulk.store_entries import store_entries
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting


def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, *, pages, entry):
    """kv_c [T, R], k_pe [T, P] into slots [T] of a layer; the new buffer."""
    del kv_scale, entry
    return store_entries(buffer, (kv_c, k_pe), slot_mapping, layer, pages=pages, interpret=bool(interpreting.value))


def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """k [T, H, D], v [T, H, Dv] into slots [T] of a layer; the new buffer."""
    del k_scale, v_scale, entry
    return store_entries(buffer, (k, v), slot_mapping, layer, pages=pages, interpret=bool(interpreting.value))
