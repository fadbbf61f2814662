"""Reads keys and values of ragged runs of tokens."""

from jaxkv_kernels.mosaic_gpu.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.load_entries import load_entries


def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """k [total, H, D], v [total, H, Dv]; rows without a token are 0."""
    del k_scale, v_scale, dtype
    return load_entries(
        buffer, block_tables, cu_seq_lens, seq_starts, layer,
        pages=pages, entry=entry, total=total, interpret=bool(interpreting.value),
    )  # fmt: skip
