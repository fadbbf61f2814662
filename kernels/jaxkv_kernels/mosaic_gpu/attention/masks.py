"""Masks scores, and clears values that no row sees, because products still read them."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.paging.page_table import PageTable
from jaxkv_kernels.mosaic_gpu.runtime.registers import WGMMA

MASKED = -math.inf
"""The score of a masked key."""


def apply_mask(
    scores, table: PageTable, request, first_token, first_row, length, *, tokens, heads, keys: int,
    window: int | None = None,
):  # fmt: skip
    """`scores` with MASKED where a row does not see the key.

    A row sees keys in valid blocks, up to its own token (causal) and within `length` and the window.

    Keys lie along axis `keys`, rows along the other one.  The `tokens` query tokens are the last tokens of the request,
    which has `length` tokens.  Each query token has `heads` consecutive rows.
    """
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, keys, layout=WGMMA) + first_token
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1 - keys, layout=WGMMA) + first_row
    own = length - tokens + row // heads
    scores = jnp.where(token <= own, scores, MASKED)
    if window is not None:
        scores = jnp.where(token > own - window, scores, MASKED)
    return table.mask_unknown(request, first_token, token, scores, MASKED)


def clear_values(
    values_ref, first_column: int, columns: int, table: PageTable, request, first_token, length, *, first_seen=None
):
    """Zeroes, in shared memory, the values of tokens that no row sees.  Their weights are 0, but 0 * NaN is NaN.

    These are the tokens from `length` on, those before `first_seen`, and those in blocks outside the cache.
    """
    token = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + first_token

    def clear(c, carry):  # a loop, because unrolled code would spill registers even in tiles without a mask
        part = values_ref.at[:, pl.ds(pl.multiple_of(first_column + c * TILE, TILE), TILE)]
        values = plgpu.load(part, layout=WGMMA)
        zero = jnp.zeros((), values.dtype)
        values = jnp.where(token < length, values, zero)
        if first_seen is not None:
            values = jnp.where(token >= first_seen, values, zero)
        part[...] = table.mask_unknown(request, first_token, token, values, 0)
        return carry

    lax.fori_loop(0, columns // TILE, clear, 0)
    plgpu.commit_smem()
