"""Reads latents and rotary keys of ragged runs of tokens."""

from jaxkv_kernels.mosaic_gpu.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.load_entries import load_entries


def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """kv_c [total, R], k_pe [total, P]; rows without a token are 0."""
    del kv_scale, dtype
    return load_entries(
        buffer, block_tables, cu_seq_lens, seq_starts, layer,
        pages=pages, entry=entry, total=total, interpret=bool(interpreting.value),
    )  # fmt: skip
