"""Storing new entries at slots of a layer, reading entries of ragged runs of tokens or at slots, and states."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Buffer, load_entries, ragged_slots, scale_at, store_entries
from jaxkv_kernels.calls import (
    CacheCall,
    GatherCall,
    GatherEntries,
    GatherIndexerK,
    GatherKV,
    GatherMLA,
    ReadIndexerK,
    ReadKV,
    ReadMLA,
    ReadState,
    WriteEntries,
    WriteIndexerK,
    WriteKV,
    WriteMLA,
    WriteState,
)
from jaxkv_kernels.rotary import rotated


@jax.jit
def write_mla(call: WriteMLA) -> Buffer:
    """The buffer with latents and rotary keys stored, these rotated by `cos_sin` unless that is None."""
    k_pe = call.k_pe
    if call.cos_sin is not None:
        k_pe = rotated(k_pe, call.cos_sin, interleaved=call.interleaved)
    return _stored(call, (call.kv_c, k_pe), call.slot_mapping, (call.kv_scale, call.kv_scale))


@jax.jit
def write_kv(call: WriteKV) -> Buffer:
    """The buffer with keys and values stored."""
    scales = (scale_at(scale, call.slot_mapping) for scale in (call.k_scale, call.v_scale))
    return _stored(call, (call.k, call.v), call.slot_mapping, tuple(scales))


@jax.jit
def write_indexer_k(call: WriteIndexerK) -> Buffer:
    """The buffer with indexer keys stored."""
    return _stored(call, (call.k,), call.slot_mapping)


@jax.jit
def write_entries(call: WriteEntries) -> Buffer:
    """The buffer with the bytes of entries stored."""
    return _placed(call, call.rows, call.slot_mapping)


@jax.jit
def write_state(call: WriteState) -> Buffer:
    """The buffer with states stored."""
    sizes = call.entry.named_sizes.items()
    return _stored(call, [call.states[name].reshape(call.slots.size, size) for name, size in sizes], call.slots)


def _stored(call: CacheCall, values: Sequence[jax.Array], slots: jax.Array, scales=(None, None)) -> Buffer:
    """The buffer with values [T, (H,) n_i] stored at slots [T] of the layer."""
    return _placed(call, call.entry.encode(values, scales), slots)


def _placed(call: CacheCall, rows: jax.Array, slots: jax.Array) -> Buffer:
    """The buffer with encoded entries [T, (H,) width] stored at slots [T] of the layer."""
    rows = rows[:, None] if call.entry.one_head else rows
    return store_entries(call.buffer, call.pages, call.entry, rows, slots, call.layer)


@jax.jit
def gather_mla(call: GatherMLA) -> tuple[jax.Array, jax.Array]:
    """Latents and rotary keys; rows without a token are 0."""
    return _latents(call, _slots_of(call))


@jax.jit
def read_mla(call: ReadMLA) -> tuple[jax.Array, jax.Array]:
    """Latents and rotary keys at slots."""
    return _latents(call, call.slots)


def _latents(call: GatherMLA | ReadMLA, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latents and rotary keys at `slots`; 0 outside the cache."""
    rows, valid = load_entries(call.buffer, call.pages, call.entry, slots, call.layer)
    kv_c, k_pe = call.entry.decode(rows[:, 0], call.dtype, (call.kv_scale, call.kv_scale))
    return jnp.where(valid[:, None], kv_c, 0), jnp.where(valid[:, None], k_pe, 0)


@jax.jit
def gather_kv(call: GatherKV) -> tuple[jax.Array, jax.Array]:
    """Keys and values; rows without a token are 0."""
    return _keys_and_values(call, _slots_of(call))


@jax.jit
def read_kv(call: ReadKV) -> tuple[jax.Array, jax.Array]:
    """Keys and values at slots."""
    return _keys_and_values(call, call.slots)


def _keys_and_values(call: GatherKV | ReadKV, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values at `slots`; 0 outside the cache."""
    rows, valid = load_entries(call.buffer, call.pages, call.entry, slots, call.layer)
    k, v = call.entry.decode(rows, call.dtype, (scale_at(call.k_scale, slots), scale_at(call.v_scale, slots)))
    return jnp.where(valid[:, None, None], k, 0), jnp.where(valid[:, None, None], v, 0)


@jax.jit
def gather_indexer_k(call: GatherIndexerK) -> jax.Array:
    """Indexer keys, dequantised; rows without a token are 0."""
    return _indexer_keys(call, _slots_of(call))


@jax.jit
def read_indexer_k(call: ReadIndexerK) -> jax.Array:
    """Indexer keys at slots, dequantised."""
    return _indexer_keys(call, call.slots)


def _indexer_keys(call: GatherIndexerK | ReadIndexerK, slots: jax.Array) -> jax.Array:
    """Indexer keys at `slots`; 0 outside the cache."""
    rows, valid = load_entries(call.buffer, call.pages, call.entry, slots, call.layer)
    (k,) = call.entry.decode(rows[:, 0], call.dtype)
    return jnp.where(valid[:, None], k, 0)


@jax.jit
def gather_entries(call: GatherEntries) -> jax.Array:
    """The bytes of entries; rows without a token are 0."""
    slots = _slots_of(call)
    rows, valid = load_entries(call.buffer, call.pages, call.entry, slots, call.layer, dtype=jnp.uint8)
    found = jnp.where(valid[:, None, None], rows, 0)
    return found[:, 0] if call.entry.one_head else found


@jax.jit
def read_state(call: ReadState) -> dict[str, jax.Array]:
    """States by name; those of slots outside the cache are 0."""
    rows, valid = load_entries(call.buffer, call.pages, call.entry, call.slots, call.layer)
    return call.entry.named([jnp.where(valid[:, None], x, 0) for x in call.entry.decode(rows[:, 0], None)])


def _slots_of(call: GatherCall) -> jax.Array:
    """Slots [total] of the tokens of runs; -1 in rows without a token."""
    return ragged_slots(
        call.block_tables,
        call.cu_seq_lens,
        total=call.total,
        block_size=call.pages.block_size,
        seq_starts=call.seq_starts,
    )
