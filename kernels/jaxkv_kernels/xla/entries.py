"""Storing new entries at slots of a layer, reading the entries of ragged runs of tokens, and states of requests."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import load_entries, ragged_slots, store_entries
from jaxkv_kernels.rotary import rotated


@partial(jax.jit, static_argnames=("pages", "entry", "interleaved"))
def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, *, pages, entry, interleaved):
    """Stores kv_c [T, R] and k_pe [T, P], rotated by cos_sin [T, P] (or None); returns the new buffer."""
    if cos_sin is not None:
        k_pe = rotated(k_pe, cos_sin, interleaved=interleaved)
    rows = entry.encode((kv_c, k_pe), (kv_scale, kv_scale))[:, None]
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """Stores k [T, H, D] and v [T, H, Dv] at slots [T] of a layer; returns the new buffer."""
    rows = entry.encode((k, v), (k_scale, v_scale))
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """Stores k [T, head_dim] at slots [T] of a layer; returns the new buffer."""
    rows = entry.encode((k,))[:, None]
    return store_entries(buffer, pages, entry, rows, slot_mapping, layer)


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


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_state(buffer, states, slots, layer, *, pages, entry):
    """Stores states, by name [T, ...], at slots [T] of a layer; returns the new buffer."""
    values = [states[name].reshape(slots.size, size) for name, size in entry.named_sizes.items()]
    return store_entries(buffer, pages, entry, entry.encode(values)[:, None], slots, layer)


@partial(jax.jit, static_argnames=("pages", "entry"))
def read_state(buffer, slots, layer, *, pages, entry):
    """Returns the states, by name [T, ...], at slots [T] of a layer; those of slots outside the cache are 0."""
    rows, valid = load_entries(buffer, pages, entry, slots, layer)
    return entry.named([jnp.where(valid[:, None], x, 0) for x in entry.decode(rows[:, 0], None)])
