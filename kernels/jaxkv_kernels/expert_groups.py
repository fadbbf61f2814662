"""Tokens sorted by expert: the rows of each expert follow one another, and are divided into tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

FEW = 2048
"""Up to so many choices, ranks are found by comparing all pairs, which takes one kernel instead of a sort."""


class Groups(NamedTuple):
    """Where the choices of all tokens lie among the rows.  N = T * K choices; P and M as in `expert_groups`."""

    rows: jax.Array
    """int32 [T, K]: the row of each choice; P if its expert does not exist."""
    tokens: jax.Array
    """int32 [P]: the token of each row; 0 for rows between groups."""
    experts: jax.Array
    """int32 [M]: the expert of each tile."""
    starts: jax.Array
    """int32 [M]: the first row of each tile."""
    sizes: jax.Array
    """int32 [M]: the rows of each tile, a multiple of `align`; those of tiles from `count` on are undefined."""
    count: jax.Array
    """int32 []: how many tiles there are."""


def expert_groups(experts: jax.Array, num_experts: int, *, tile: int, align: int = 1) -> Groups:
    """Sorts the choices `experts` [T, K], ids of experts, into groups of rows, one per expert that is chosen.

    Each group begins at a multiple of `align` rows, and is divided into tiles of up to `tile` rows, a multiple of
    `align`.  There are P rows, at least `tile`, and M tiles: as many as any choices may need.  Ids outside
    [0, num_experts) have no row.
    """
    choices = experts.size
    used = min(num_experts, choices)
    num_rows = max(-(-(choices + used * (align - 1)) // align) * align, tile)
    num_tiles = min(choices, choices // tile + used)
    ids = experts.reshape(-1)
    known = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(known, ids, num_experts)
    sizes = (ids[:, None] == jnp.arange(num_experts, dtype=jnp.int32)).sum(axis=0, dtype=jnp.int32)
    aligned = -(-sizes // align) * align
    starts = jnp.cumsum(aligned) - aligned
    rows = jnp.where(known, starts[ids] + _ranks(ids, sizes), num_rows)
    token = jnp.arange(choices, dtype=jnp.int32) // experts.shape[1]
    tokens = jnp.zeros(num_rows, jnp.int32).at[rows].set(token, mode="drop", unique_indices=True)
    tiles = -(-sizes // tile)
    ends = jnp.cumsum(tiles)
    number = jnp.arange(num_tiles, dtype=jnp.int32)
    expert = (ends <= number[:, None]).sum(axis=1, dtype=jnp.int32)
    within = (number - (ends - tiles)[expert]) * tile
    return Groups(
        rows.reshape(experts.shape), tokens, expert, starts[expert] + within,
        jnp.minimum(aligned[expert] - within, tile), ends[-1],
    )  # fmt: skip


def _ranks(ids, sizes):
    """The number of earlier choices of the same expert, int32 [N]."""
    number = jnp.arange(ids.size, dtype=jnp.int32)
    if ids.size <= FEW:
        return ((ids[:, None] == ids) & (number < number[:, None])).sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    firsts = jnp.cumsum(sizes) - sizes
    return jnp.zeros_like(ids).at[order].set(number - firsts[ids[order]], unique_indices=True)
