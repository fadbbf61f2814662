"""Reads keys and values of ragged runs of tokens."""

from jaxkv_kernels.triton.load_entries import load_entries


def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """k [total, H, D], v [total, H, Dv] of `dtype`; rows without a token are 0."""
    runs, scales = (block_tables, cu_seq_lens, seq_starts), (k_scale, v_scale) if entry.codec.scaled else ()
    return tuple(load_entries(buffer, *runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype))
