"""Reading the entries of ragged runs of tokens: dispatches to the kernel of the format."""

from jaxkv_kernels.triton.entries.load_bytes import load_bytes
from jaxkv_kernels.triton.entries.load_ds_mla import load_ds_mla
from jaxkv_kernels.triton.entries.load_entries import load_entries
from jaxkv_kernels.triton.entries.load_split import load_split


def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """Returns kv_c [total, R] and k_pe [total, P] of `dtype`; rows without a token are 0."""
    runs, options = (block_tables, cu_seq_lens, seq_starts), dict(pages=pages, entry=entry, total=total, dtype=dtype)
    if entry.format == "fp8_ds_mla":
        return load_ds_mla(buffer, *runs, layer, **options)
    scales = (kv_scale, kv_scale) if entry.codec.scaled else ()
    return tuple(part[:, 0] for part in load_entries(buffer, *runs, layer, scales, **options))


def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """Returns k [total, H, D] and v [total, H, Dv] of `dtype`; rows without a token are 0."""
    runs, scales = (block_tables, cu_seq_lens, seq_starts), (k_scale, v_scale) if entry.codec.scaled else ()
    return tuple(load_entries(buffer, *runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype))


def gather_indexer_k(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype):
    """Returns k [total, head_dim] of `dtype`, dequantised; rows without a token are 0."""
    runs, options = (block_tables, cu_seq_lens, seq_starts), dict(pages=pages, entry=entry, total=total, dtype=dtype)
    if entry.split:
        return load_split(buffer, *runs, layer, **options)
    return load_entries(buffer, *runs, layer, **options)[0][:, 0]


def gather_entries(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total):
    """Returns the bytes of entries, uint8 [total, (H,) nbytes]; rows without a token are 0."""
    found = load_bytes(buffer, block_tables, cu_seq_lens, seq_starts, layer, pages=pages, entry=entry, total=total)
    return found[:, 0] if entry.one_head else found
