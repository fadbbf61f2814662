"""Where the tokens of ragged runs lie: the device-side `ragged_slots` (`addressing.py`), computed per warp."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing import table_tokens
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv

PROBES = 15
"""Independent loads per round of the search for a row's request: 15 requests take one round, 255 take two."""


class Place(NamedTuple):
    """Where a token lies; for a row without a token, somewhere in the cache."""

    live: Any
    """Whether the row has a token."""
    block: Any
    token: Any
    """Position in the block."""


def places_of(first, count, table_ref, cu_ref, start_ref, *, pages) -> list[Place]:
    """Places of the tokens of `count` rows from row `first`, by tables [B, M], running sums [B + 1] and starts [B]."""
    requests, rows = table_ref.shape[0], [first + i for i in range(count)]
    request = _passed(first, cu_ref, requests)
    several = (request < requests) & (cu_ref[jnp.minimum(request + 1, requests)] <= rows[-1])
    passed = lax.cond(
        several, lambda: [_passed(row, cu_ref, requests) for row in rows], lambda: [request for _ in rows]
    )
    return [_place(row, n, table_ref, cu_ref, start_ref, pages) for row, n in zip(rows, passed, strict=True)]


def place_of(row, table_ref, cu_ref, start_ref, *, pages) -> Place:
    """The place of the token of one row, without branches."""
    return _place(row, _passed(row, cu_ref, table_ref.shape[0]), table_ref, cu_ref, start_ref, pages)


def _place(row, request, table_ref, cu_ref, start_ref, pages):
    requests = table_ref.shape[0]
    inside = request < requests
    request = jnp.where(inside, request, 0)
    position = row - cu_ref[request]
    if start_ref is not None:
        position = position + start_ref[request]
    inside = inside & (position >= 0) & (position < table_tokens(table_ref, pages.block_size))
    position = jnp.where(inside, position, 0)
    column = floordiv(position, pages.block_size)
    block = table_ref[request, column]
    live = inside & (block >= 0) & (block < pages.num_blocks)
    return Place(live, jnp.where(live, block, 0), position - column * pages.block_size)


def _passed(row, cu_ref, requests):
    """How many requests end at or before `row`."""
    # The answer is at least `passed`, and at most `passed + left`.
    passed, left = jnp.int32(0), requests
    while left:
        step = -(-(left + 1) // (PROBES + 1))
        found = jnp.int32(0)
        for ahead in range(step, left + 1, step):
            i = passed + ahead
            ended = (i <= requests) & (cu_ref[jnp.minimum(i, requests)] <= row)
            found = found + jnp.where(ended, step, 0)
        passed, left = passed + found, step - 1
    return passed
