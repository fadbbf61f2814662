"""Reads latents and rotary keys of ragged runs of tokens."""

from jaxkv_kernels.triton.load_ds_mla import load_ds_mla
from jaxkv_kernels.triton.load_entries import load_entries


def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """kv_c [total, R], k_pe [total, P] of `dtype`; rows without a token are 0."""
    runs, options = (block_tables, cu_seq_lens, seq_starts), dict(pages=pages, entry=entry, total=total, dtype=dtype)
    if entry.format == "fp8_ds_mla":
        return load_ds_mla(buffer, *runs, layer, **options)
    scales = (kv_scale, kv_scale) if entry.codec.scaled else ()
    return tuple(part[:, 0] for part in load_entries(buffer, *runs, layer, scales, **options))
