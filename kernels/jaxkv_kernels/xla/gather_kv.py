"""Reads keys and values of ragged runs of tokens."""

from functools import partial

import jax

from jaxkv_kernels.bits import view_as
from jaxkv_kernels.slots import ragged_slots
from jaxkv_kernels.xla.rows import read_slots


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """k [total, H, D], v [total, H, Dv] of `dtype`; rows without a token are 0."""
    slots = ragged_slots(block_tables, cu_seq_lens, total=total, block_size=pages.block_size, seq_starts=seq_starts)
    rows, _ = read_slots(buffer, pages, slots, layer)
    return tuple(entry.decode(view_as(rows, entry.dtype), dtype, (k_scale, v_scale)))
