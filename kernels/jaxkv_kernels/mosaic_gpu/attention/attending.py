"""What the attention kernels share: where tokens lie, masks, and what becomes of sums."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.page_table import TILE
from jaxkv_kernels.mosaic_gpu.runtime.build import MASKED, WGMMA
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT

PIECES, FINITE = jnp.float16, 1e37
"""Dtype of the pieces of cut requests, whose rows are divided by their largest value; and the most that may be."""
SLACK = 8
"""Powers of 2 by which weights may exceed 1 before what has been summed is rescaled."""


def results(batch: int, rows: int, plan, dtype, *, lse: int, pieces: int, scales: int) -> tuple[Any, ...]:
    """Values and log-sum-exps of whole requests; values, log-sum-exps (base 2) and scales of pieces.

    `lse`, `pieces`: how many rows there is room for of what is one value a row, of requests and of pieces.  A row of a
    piece has so many `scales`, each for an equal part of its values.
    """
    shape, a_row = jax.ShapeDtypeStruct, partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return (
        shape((batch, rows, LATENT), dtype),
        a_row((batch, lse)),
        shape((plan.pieces, rows, LATENT), dtype),
        a_row((plan.pieces, pieces)),
        a_row((plan.pieces, scales, pieces)),
    )


def tokens_of(kv_ref, view, table, layer, block, first_token, head=0):
    """Where the entries of a copy's tokens lie; in the first block, where `block` is none of the cache's."""
    in_block = lax.rem(first_token, jnp.int32(table.pages.block_size))
    index, row = view.index(layer, jnp.where(table.known(block), block, 0), in_block, head)
    return kv_ref.at[index, pl.ds(row, table.copy_rows)]


def without_hidden(s, table, b, first_token, row0, length, *, tokens, heads, keys: int, window: int | None = None):
    """Scores `s`, MASKED where a query does not see the key: keys along axis `keys`, rows along the other."""
    token = plgpu.broadcasted_iota(jnp.int32, s.shape, keys, layout=WGMMA) + first_token
    row = plgpu.broadcasted_iota(jnp.int32, s.shape, 1 - keys, layout=WGMMA) + row0
    own = length - tokens + row // heads
    s = jnp.where(token <= own, s, MASKED)
    if window is not None:
        s = jnp.where(token > own - window, s, MASKED)
    return table.without_unknown(b, first_token, token, s, MASKED)


def clear_values(values_ref, columns, table, b, first_token, length):
    """Zeroes the first `columns` of the rows of tokens that are not there: 0 x NaN is NaN."""
    token = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + first_token

    def clear(c, carry):  # a loop: were it unrolled, its registers would be spilled in the pairs before
        piece = values_ref.at[:, pl.ds(pl.multiple_of(c * TILE, TILE), TILE)]
        values = plgpu.load(piece, layout=WGMMA)
        values = jnp.where(token < length, values, jnp.zeros((), values.dtype))
        piece[...] = table.without_unknown(b, first_token, token, values, 0)
        return carry

    lax.fori_loop(0, columns // TILE, clear, 0)
    plgpu.commit_smem()


def ended(total, m):
    """What sums of values are to be multiplied by, and log-sum-exps (base 2), for total weights over reference `m`."""
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    return jnp.where(empty, 0.0, 1 / total), jnp.where(empty, -jnp.inf, m + jnp.log2(total))


def scale_of(most):
    """What the values of a piece's rows are divided by, `most` being the largest."""
    # Rows with infinities or NaN stay as they are.
    return jnp.where(most < FINITE, jnp.maximum(most, 1 / FINITE), 1.0)
