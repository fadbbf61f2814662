"""Stores keys and values of all heads."""

from jaxkv_kernels.mosaic_gpu.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.store_entries import store_entries


def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """k [T, H, D], v [T, H, Dv] into slots [T] of a layer; the new buffer."""
    del k_scale, v_scale, entry
    return store_entries(buffer, (k, v), slot_mapping, layer, pages=pages, interpret=bool(interpreting.value))
