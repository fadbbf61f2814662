"""Walking the pages of requests in chunks of a bounded number of tokens."""

import jax
import jax.numpy as jnp

from jaxkv_kernels.slots import slots_for

CHUNK_TOKENS = 512
"""Keys a step, at least: what bounds the temporaries of a decode."""


def chunk_tokens(block_size: int, block_tables: jax.Array) -> int:
    """Tokens a chunk: whole blocks, at least `CHUNK_TOKENS` where the table is that long."""
    return block_size * min(block_tables.shape[1], -(-CHUNK_TOKENS // block_size))


def live_lengths(block_tables: jax.Array, seq_lens: jax.Array, block_size: int) -> jax.Array:
    """`seq_lens` within 0 and what the table can hold."""
    return jnp.clip(seq_lens, 0, block_tables.shape[1] * block_size)


def chunk_slots(block_tables: jax.Array, i, *, chunk: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Positions [S] of chunk i and their slots [B, S] (-1 past the table)."""
    positions = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
    wide = jnp.broadcast_to(positions, (block_tables.shape[0], chunk))
    return positions, slots_for(block_tables, wide, block_size=block_size)
