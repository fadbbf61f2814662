"""Stores new entries: by bulk copies if their values stay as they are, otherwise encoded by lanes."""

from jaxkv_kernels.mosaic_gpu.bulk.store_entries import store_entries
from jaxkv_kernels.mosaic_gpu.entries.encode_entries import encode_entries
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.unsupported import copied


def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, *, pages, entry, interleaved):
    """Stores kv_c [T, R] and k_pe [T, P], rotated by cos_sin [T, P] (or None); returns the new buffer."""
    scales = (kv_scale,) if entry.codec.scaled else ()
    if cos_sin is not None:
        return encode_entries(
            buffer, (kv_c, k_pe), slot_mapping, layer, scales, cos_sin,
            pages=pages, entry=entry, interleaved=interleaved, interpret=bool(interpreting.value),
        )  # fmt: skip
    return _write(buffer, (kv_c, k_pe), slot_mapping, layer, scales, pages=pages, entry=entry)


def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """Stores k [T, H, D] and v [T, H, Dv] at slots [T] of a layer; returns the new buffer."""
    scales = (k_scale, v_scale) if entry.codec.scaled else ()
    return _write(buffer, (k, v), slot_mapping, layer, scales, pages=pages, entry=entry)


def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """Stores k [T, head_dim] at slots [T] of a layer; returns the new buffer."""
    return _write(buffer, (k,), slot_mapping, layer, (), pages=pages, entry=entry)


def _write(buffer, values, slots, layer, scales, *, pages, entry):
    interpret = bool(interpreting.value)
    if copied(entry, [value.dtype for value in values]):
        return store_entries(buffer, values, slots, layer, pages=pages, interpret=interpret)
    return encode_entries(buffer, values, slots, layer, scales, pages=pages, entry=entry, interpret=interpret)
