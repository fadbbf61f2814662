"""Reading the entries of ragged runs of tokens."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.entry_rows import load_entries
from jaxkv_kernels.addressing.slots import ragged_slots


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """Returns kv_c [total, R] and k_pe [total, P] of `dtype`; rows without a token are 0."""
    slots = ragged_slots(block_tables, cu_seq_lens, total=total, block_size=pages.block_size, seq_starts=seq_starts)
    rows, valid = load_entries(buffer, pages, entry, slots, layer)
    parts = entry.decode(rows[:, 0], dtype, (kv_scale, kv_scale))
    return tuple(jnp.where(valid[:, None], part, 0) for part in parts)


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """Returns k [total, H, D] and v [total, H, Dv] of `dtype`; rows without a token are 0."""
    slots = ragged_slots(block_tables, cu_seq_lens, total=total, block_size=pages.block_size, seq_starts=seq_starts)
    rows, valid = load_entries(buffer, pages, entry, slots, layer)
    parts = entry.decode(rows, dtype, (k_scale, v_scale))
    return tuple(jnp.where(valid[:, None, None], part, 0) for part in parts)


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def gather_indexer_k(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype):
    """Returns k [total, head_dim] of `dtype`, dequantised; rows without a token are 0."""
    slots = ragged_slots(block_tables, cu_seq_lens, total=total, block_size=pages.block_size, seq_starts=seq_starts)
    rows, valid = load_entries(buffer, pages, entry, slots, layer)
    (k,) = entry.decode(rows[:, 0], dtype)
    return jnp.where(valid[:, None], k, 0)


@partial(jax.jit, static_argnames=("pages", "entry", "total"))
def gather_entries(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total):
    """Returns the bytes of entries, uint8 [total, (H,) nbytes]; rows without a token are 0."""
    slots = ragged_slots(block_tables, cu_seq_lens, total=total, block_size=pages.block_size, seq_starts=seq_starts)
    rows, valid = load_entries(buffer, pages, entry, slots, layer, dtype=jnp.uint8)
    found = jnp.where(valid[:, None, None], rows, 0)
    return found[:, 0] if entry.one_head else found
