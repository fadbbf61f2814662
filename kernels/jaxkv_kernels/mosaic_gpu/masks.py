"""Masks scores, and clears values that no row sees, because products still read them."""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.paged_tma import PageTable
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.registers import WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import zero_rows
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler import WorkTile

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


def seen_tokens(tile: WorkTile, in_cache, step: int, window: int | None):
    """The length of a work tile's request, and the steps (first, end) that need no mask; `step`: tokens per step.

    The length is 0 if the layer is not in the cache.
    """
    keys, unmasked_end = (jnp.where(in_cache, x, 0) for x in (tile.keys, tile.unmasked_end))
    if window is None:
        return keys, (None, unmasked_end)
    # In steps before the first, some row's window begins after the step's first key.
    unmasked_begin = floordiv(jnp.maximum(tile.keys - window, 0) + (step - 1), step)
    return jnp.where(in_cache, tile.origin + tile.keys, 0), (unmasked_begin, unmasked_end)


def is_masked(unmasked, step):
    """Whether a step needs a mask; `unmasked` is from `seen_tokens`."""
    begin, end = unmasked
    return step >= end if begin is None else (step < begin) | (step >= end)


def divided_by_masks(begin, end, unmasked):
    """Ranges of the steps from `begin` to `end`, with whether they need a mask; `unmasked` is from `seen_tokens`."""
    unmasked_begin, unmasked_end = unmasked
    last = jnp.clip(unmasked_end, begin, end)
    if unmasked_begin is None:
        return (begin, last, False), (last, end, True)
    first = jnp.clip(unmasked_begin, begin, last)
    return (begin, first, True), (first, last, False), (last, end, True)


def first_seen(length, tokens: int, window: int | None):
    """The first token that some query token of a request sees; None without a window."""
    return None if window is None else length - tokens - window + 1


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
