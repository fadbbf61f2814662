"""Masks scores, and clears values that no row sees, because products still read them."""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.paging.page_table import PageTable
from jaxkv_kernels.mosaic_gpu.runtime.registers import WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import zero_rows

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
    keys_ref, place: tuple[Any, ...], first_column: int, columns: int, table: PageTable, request, first_token, length,
    *, first_seen=None, interpret: bool,
):  # fmt: skip
    """Zeroes, in shared memory, the values of tokens that no row sees.  Their weights are 0, but 0 * NaN is NaN.

    These are the tokens from `length` on, those before `first_seen`, and those in blocks outside the cache.  The values
    are `columns` columns, from `first_column` on, of the tile `keys_ref[place]` [64, keys and values].
    """
    clear = partial(zero_rows, keys_ref, place, first_column, columns, interpret=interpret)
    clear(length - first_token, jnp.int32(TILE))
    if first_seen is not None:
        clear(jnp.int32(0), first_seen - first_token)
    for low, known in table.known_copies(request, first_token):
        clear(jnp.int32(low), jnp.where(known, 0, low + table.copy_rows))
    plgpu.commit_smem()
