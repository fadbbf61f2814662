"""Rules of experts that all implementations share: their scores and weights, activations, and tokens by expert.

The tokens of each expert follow one another, and are divided into tiles.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

FEW = 2048
"""The most choices of which all pairs are compared."""
BLOCK = 512
"""With more choices, the size of the blocks in which all pairs are compared."""


SCORES = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}
"""The scores of experts, from their logits [T, E]."""


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

    def tiles(self, align: int) -> tuple[jax.Array, ...]:
        """Experts, first rows and sizes, int32 [M], in units of `align` rows, and the number of tiles, int32 [1]."""
        return self.experts, self.starts // align, self.sizes // align, self.count.reshape(1)


def groups_shape(choices: int, num_experts: int, *, tile: int, align: int) -> tuple[int, int]:
    """P and M of `expert_groups`."""
    used = min(num_experts, choices)
    num_rows = max(-(-(choices + used * (align - 1)) // align) * align, tile)
    return num_rows, min(choices, choices // tile + used)


def usual_rows(choices: int, num_experts: int, most: int) -> int:
    """The rows of an average expert plus two standard deviations of random choices, from 1 to `most`."""
    mean = choices / num_experts
    return max(math.ceil(min(mean + 2 * math.sqrt(mean), most)), 1)


@partial(jax.jit, static_argnames=("num_experts", "tile", "align"))
def expert_groups(experts: jax.Array, num_experts: int, *, tile: int, align: int = 1) -> Groups:
    """Sorts the choices `experts` [T, K], ids of experts, into groups of rows, one per expert that is chosen.

    Each group begins at a multiple of `align` rows, and is divided into tiles of up to `tile` rows, a multiple of
    `align`.  There are P rows, at least `tile`, and M tiles: as many as any choices may need.  Ids outside
    [0, num_experts) have no row.
    """
    num_rows, num_tiles = groups_shape(experts.size, num_experts, tile=tile, align=align)
    ids = experts.reshape(-1)
    known = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(known, ids, num_experts)
    ranks, sizes = _ranks(ids, num_experts)
    aligned = -(-sizes // align) * align
    starts = _sums_before(aligned)
    rows = jnp.where(known, starts[ids] + ranks, num_rows)
    tiles = -(-sizes // tile)
    first_tiles = _sums_before(tiles)
    number = jnp.arange(num_tiles, dtype=jnp.int32)
    expert = (first_tiles + tiles <= number[:, None]).sum(axis=1, dtype=jnp.int32)
    within = (number - first_tiles[expert]) * tile
    return Groups(
        rows.reshape(experts.shape), _tokens(rows, num_rows, experts.shape[1]), expert, starts[expert] + within,
        jnp.minimum(aligned[expert] - within, tile), tiles.sum(dtype=jnp.int32),
    )  # fmt: skip


# These sums are computed from comparisons of all pairs, in which a GPU takes fewer and faster kernels than to sort.


def _ranks(ids, num_experts: int):
    """For each choice, the number of earlier ones of the same expert, int32 [N], and all choices of each expert [E]."""
    size = BLOCK if ids.size > FEW else ids.size
    blocks = jnp.pad(ids, (0, -ids.size % size), constant_values=num_experts).reshape(-1, size)
    place = jnp.arange(size, dtype=jnp.int32)
    same = blocks[:, :, None] == blocks[:, None, :]
    ranks = (same & (place < place[:, None])).sum(axis=2, dtype=jnp.int32)
    counts = (blocks[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)).sum(axis=1, dtype=jnp.int32)
    if len(blocks) > 1:
        before = jnp.cumsum(counts, axis=0) - counts
        ranks = ranks + jnp.take_along_axis(before, jnp.minimum(blocks, num_experts - 1), axis=1)
    return ranks.reshape(-1)[: ids.size], counts.sum(axis=0)


def _sums_before(counts):
    """The sum of the counts before each one."""
    place = jnp.arange(counts.size, dtype=jnp.int32)
    return jnp.where(place < place[:, None], counts, 0).sum(axis=1, dtype=jnp.int32)


def _tokens(rows, num_rows: int, per_token: int):
    """The token of each row, given the row of each choice: the inverse; 0 for rows of no choice."""
    tokens = jnp.arange(rows.size, dtype=jnp.int32) // per_token
    if rows.size > FEW:
        return jnp.zeros(num_rows, jnp.int32).at[rows].set(tokens, mode="drop", unique_indices=True)
    return jnp.where(rows == jnp.arange(num_rows, dtype=jnp.int32)[:, None], tokens, 0).max(axis=1)


def weights_of(scores, experts, *, normalize, scale) -> jax.Array:
    """The weights [T, K] of experts [T, K], from the scores [T, E] of all."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * scale


def gated(gates, ups, limit, alpha) -> jax.Array:
    """The values before `down`, of the results of `gate` and `up`; `limit` and `alpha` as in `grouped_swiglu`."""
    if limit is not None:
        gates, ups = jnp.minimum(gates, limit), jnp.clip(ups, -limit, limit)
    return jax.nn.silu(gates) * ups if alpha is None else gates * jax.nn.sigmoid(alpha * gates) * (ups + 1)
