"""Masks scores, and clears values that no row sees, because products still read them."""

import math
from functools import partial
from typing import Any, NamedTuple

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


class Ends(NamedTuple):
    """Where the tokens of a work tile's request end."""

    seen: Any
    """The position after the last token that some query token sees; 0 if the layer is not in the cache."""
    queries: Any
    """The position after the last query token, if the layer is in the cache."""


def apply_mask(
    scores, table: PageTable, request, first_token, first_row, ends: Ends, *, tokens, heads, keys: int,
    window: int | None = None, ahead: int | None = 0, tile: plgpu.Layout = WGMMA,
):  # fmt: skip
    """`scores` with MASKED where a row does not see the key.

    A row sees keys in valid blocks, up to `ahead` tokens after its own and, with a window, the last `window` up to its
    own.  Keys lie along axis `keys`, rows along the other one.  Each of the `tokens` query tokens has `heads`
    consecutive rows.  `tile` is the layout of the scores.
    """
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, keys, layout=tile) + first_token
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1 - keys, layout=tile) + first_row
    own = ends.queries - tokens + row // heads
    if ahead is not None:
        scores = jnp.where((token - ahead if ahead else token) <= own, scores, MASKED)
    if ahead != 0:
        scores = jnp.where(token < ends.seen, scores, MASKED)
    if window is not None:
        scores = jnp.where(token > own - window, scores, MASKED)
    return table.mask_unknown(request, first_token, token, scores, MASKED)


def ends_of(tile: WorkTile, seen) -> Ends:
    """The ends of a work tile, by the one of what is seen."""
    return Ends(seen, seen if tile.beyond is None else seen - tile.beyond)


def seen_tokens(tile: WorkTile, in_cache, step: int, window: int | None):
    """The ends of a work tile, and the steps (first, end) that need no mask; `step`: tokens per step."""
    keys, unmasked_end = (jnp.where(in_cache, x, 0) for x in (tile.keys, tile.unmasked_end))
    if window is None:
        return ends_of(tile, keys), (None, unmasked_end)
    unmasked_begin = first_unmasked(tile, step, window)
    return ends_of(tile, jnp.where(in_cache, tile.origin + tile.keys, 0)), (unmasked_begin, unmasked_end)


def first_unmasked(tile: WorkTile, step: int, window: int):
    """The first step that needs no mask: in those before it, some row's window begins after the step's first key."""
    keys = tile.keys if tile.beyond is None else tile.keys - tile.beyond
    return floordiv(jnp.maximum(keys - window, 0) + (step - 1), step)


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


def first_seen(ends: Ends, tokens: int, window: int | None):
    """The first token that some query token of a request sees; None without a window."""
    return None if window is None else ends.queries - tokens - window + 1


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
