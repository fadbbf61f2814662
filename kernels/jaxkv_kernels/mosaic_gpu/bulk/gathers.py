"""Reads entries of ragged runs of tokens by bulk copies."""

from jaxkv_kernels.mosaic_gpu.bulk.load_entries import load_entries
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting


def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """kv_c [total, R], k_pe [total, P]; rows without a token are 0."""
    del kv_scale, dtype
    return load_entries(
        buffer, block_tables, cu_seq_lens, seq_starts, layer,
        pages=pages, entry=entry, total=total, interpret=bool(interpreting.value),
    )  # fmt: skip


def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """k [total, H, D], v [total, H, Dv]; rows without a token are 0."""
    del k_scale, v_scale, dtype
    return load_entries(
        buffer, block_tables, cu_seq_lens, seq_starts, layer,
        pages=pages, entry=entry, total=total, interpret=bool(interpreting.value),
    )  # fmt: skip
