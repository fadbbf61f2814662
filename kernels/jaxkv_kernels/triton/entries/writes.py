"""Storing new entries: dispatches to the kernel of the format."""

from jaxkv_kernels.triton.entries.store_ds_mla import store_ds_mla
from jaxkv_kernels.triton.entries.store_entries import store_entries
from jaxkv_kernels.triton.entries.store_split import store_split


def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, *, pages, entry, interleaved):
    """Stores kv_c [T, R] and k_pe [T, P], rotated by cos_sin [T, P] (or None); returns the new buffer."""
    options = dict(pages=pages, entry=entry, interleaved=interleaved)
    if entry.format == "fp8_ds_mla":
        return store_ds_mla(buffer, kv_c, k_pe, slot_mapping, layer, cos_sin, **options)
    scales = (kv_scale, kv_scale) if entry.codec.scaled else ()
    return store_entries(buffer, (kv_c, k_pe), slot_mapping, layer, scales, cos_sin, **options)


def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """Stores k [T, H, D] and v [T, H, Dv] at slots [T] of a layer; returns the new buffer."""
    scales = (k_scale, v_scale) if entry.codec.scaled else ()
    return store_entries(buffer, (k, v), slot_mapping, layer, scales, pages=pages, entry=entry)


def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """Stores k [T, head_dim] at slots [T] of a layer; returns the new buffer."""
    if entry.split:
        return store_split(buffer, k, slot_mapping, layer, pages=pages, entry=entry)
    return store_entries(buffer, (k,), slot_mapping, layer, pages=pages, entry=entry)
