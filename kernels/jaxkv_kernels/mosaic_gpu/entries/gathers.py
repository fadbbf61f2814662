"""Reads entries of ragged runs of tokens: by bulk copies if values stay as they are, otherwise decoded by lanes."""

from jaxkv_kernels.mosaic_gpu.bulk.entry_bytes import EntryBytes
from jaxkv_kernels.mosaic_gpu.bulk.load_entries import load_entries
from jaxkv_kernels.mosaic_gpu.entries.decode_entries import decode_entries
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.unsupported import copied


def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """Returns kv_c [total, R] and k_pe [total, P] of `dtype`; rows without a token are 0."""
    scales = (kv_scale,) if entry.codec.scaled else ()
    runs = block_tables, cu_seq_lens, seq_starts
    return _gather(buffer, runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype)


def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """Returns k [total, H, D] and v [total, H, Dv] of `dtype`; rows without a token are 0."""
    scales = (k_scale, v_scale) if entry.codec.scaled else ()
    runs = block_tables, cu_seq_lens, seq_starts
    return _gather(buffer, runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype)


def gather_indexer_k(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype):
    """Returns k [total, head_dim] of `dtype`; rows without a token are 0."""
    runs = block_tables, cu_seq_lens, seq_starts
    return _gather(buffer, runs, layer, (), pages=pages, entry=entry, total=total, dtype=dtype)[0]


def gather_entries(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total):
    """Returns the bytes of entries, uint8 [total, (H,) nbytes]; rows without a token are 0."""
    runs, copied_entry = (block_tables, cu_seq_lens, seq_starts), EntryBytes(entry.nbytes, entry.one_head)
    return load_entries(
        buffer, *runs, layer, pages=pages, entry=copied_entry, total=total, interpret=bool(interpreting.value)
    )[0]


def _gather(buffer, runs, layer, scales, *, pages, entry, total, dtype):
    interpret = bool(interpreting.value)
    if copied(entry, [dtype]):
        return load_entries(buffer, *runs, layer, pages=pages, entry=entry, total=total, interpret=interpret)
    return decode_entries(
        buffer, *runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype, interpret=interpret
    )
