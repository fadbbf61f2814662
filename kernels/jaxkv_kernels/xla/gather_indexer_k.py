"""Reads indexer keys of ragged runs of tokens."""

from functools import partial

import jax

from jaxkv_kernels.slots import ragged_slots
from jaxkv_kernels.xla.split_page import read_keys


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def gather_indexer_k(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype):
    """k [total, head_dim] of `dtype`, dequantised; rows without a token are 0."""
    slots = ragged_slots(block_tables, cu_seq_lens, total=total, block_size=pages.block_size, seq_starts=seq_starts)
    rows, _ = read_keys(buffer, pages, entry, slots, layer)
    (k,) = entry.decode(rows, dtype)
    return k
