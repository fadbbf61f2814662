"""Reads indexer keys of ragged runs of tokens."""

from jaxkv_kernels.triton.load_entries import load_entries
from jaxkv_kernels.triton.load_split import load_split


def gather_indexer_k(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype):
    """k [total, head_dim] of `dtype`, dequantised; rows without a token are 0."""
    runs, options = (block_tables, cu_seq_lens, seq_starts), dict(pages=pages, entry=entry, total=total, dtype=dtype)
    if entry.split:
        return load_split(buffer, *runs, layer, **options)
    return load_entries(buffer, *runs, layer, **options)[0][:, 0]
