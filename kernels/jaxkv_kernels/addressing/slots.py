"""Index arithmetic on block tables.  A slot is `block * block_size + offset`; negative numbers are not slots."""

import jax
import jax.numpy as jnp

MAX_SLOTS = 2**31 - 1
"""The number of slots that int32 can address."""


def table_tokens(block_tables: jax.Array, block_size: int) -> int:
    """The capacity of block tables [B, M] in tokens per request."""
    return min(block_tables.shape[1] * block_size, MAX_SLOTS)


def lengths_in_table(seq_lens: jax.Array, block_tables: jax.Array, block_size: int) -> jax.Array:
    """`seq_lens` [B] clamped to the range from 0 to the capacity of the tables, as in every operation."""
    return jnp.clip(seq_lens, 0, table_tokens(block_tables, block_size))


def slots_for(block_tables: jax.Array, positions: jax.Array, *, block_size: int) -> jax.Array:
    """Slots of `positions` [B, ...], looked up in the tables [B, M]; -1 for positions without a slot."""
    batch = jnp.arange(block_tables.shape[0], dtype=jnp.int32)
    request = jnp.broadcast_to(batch.reshape(-1, *[1] * (positions.ndim - 1)), positions.shape)
    return _lookup(block_tables, request, positions, block_size)


def ragged_slots(
    block_tables: jax.Array,
    cu_seq_lens: jax.Array,
    *,
    total: int,
    block_size: int,
    seq_starts: jax.Array | None = None,
) -> jax.Array:
    """Slots [total] of runs of tokens, one run per request, concatenated; -1 where there is no slot.

    `cu_seq_lens` [B + 1] must not fall.
    """
    row = jnp.arange(total, dtype=jnp.int32)
    request = jnp.searchsorted(cu_seq_lens[1:], row, side="right").astype(jnp.int32)
    live = request < block_tables.shape[0]
    request = jnp.where(live, request, 0)
    position = row - cu_seq_lens[request]
    if seq_starts is not None:
        position = position + seq_starts[request]
    return _lookup(block_tables, request, jnp.where(live, position, -1), block_size)


def _lookup(block_tables, request, positions, block_size):
    block = block_tables[request, jnp.clip(positions // block_size, 0, block_tables.shape[1] - 1)]
    inside = (positions >= 0) & (positions < table_tokens(block_tables, block_size))
    # An invalid entry must not wrap around into a valid slot.
    inside &= (block >= 0) & (block < MAX_SLOTS // block_size)
    return jnp.where(inside, block * block_size + positions % block_size, -1)
