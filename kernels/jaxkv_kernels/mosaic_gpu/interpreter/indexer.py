"""The counterparts of `indexer_lanes.py` for Pallas's interpreter, by plain loops and arrays."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.indexer_lanes import WINDOW
from jaxkv_kernels.mosaic_gpu.indexer_work import TILE, Share, Tiles
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.registers import LANE_COLUMNS


def find_share(lengths_ref, cta, ctas: int, tiles: Tiles, in_cache, *, filled: bool) -> Share:
    """The share of a CTA of all tiles that are computed, or with `filled` of those that are filled."""

    def count(request):
        computed = tiles.computed(jnp.where(in_cache, lengths_ref[request], 0))
        return tiles.per_request - computed if filled else computed

    requests = lengths_ref.shape[0]
    total = lax.fori_loop(0, requests, lambda request, sum: sum + count(request), jnp.int32(0))
    each, rest = floordiv(total, ctas), lax.rem(total, jnp.int32(ctas))
    first = cta * each + jnp.minimum(cta, rest)
    last = first + each + (cta < rest)

    def find(tile, request, carry):
        begin, found, at = carry
        end = begin + count(request)
        here = (begin <= tile) & (tile < end)
        return end, jnp.where(here, request, found), jnp.where(here, tile - begin, at)

    empty = jnp.int32(0), jnp.int32(-1), jnp.int32(0)
    _, first_request, first_tile = lax.fori_loop(0, requests, partial(find, first), empty)
    _, last_request, last_tile = lax.fori_loop(0, requests, partial(find, last - 1), empty)
    found = (first_request, 0), (first_tile, 0), (last_request, -1), (last_tile + 1, 0)
    return Share(*(jnp.where(first < last, value, empty) for value, empty in found))


def load_window(table_ref, request, window):
    """What `block_of` needs of a window."""
    del table_ref
    return request, window


def block_of(table_ref, window, i):
    """Block number `i` of a window; -1 past the end of the table."""
    request, number = window
    column = number * WINDOW + i
    inside = column < table_ref.shape[1]
    return jnp.where(inside, table_ref[request, jnp.where(inside, column, 0)], -1)


def weigh(partial, scores, weights):
    """The sum over heads of relu(score) * weight, in eight parts: [64, 8]."""
    weighted = jnp.maximum(scores, 0.0) * weights
    added = weighted.reshape(TILE, -1, LANE_COLUMNS).sum(axis=1)
    return added if partial is None else partial + added


def store_logits(out_ref, row, first, end, known, part: int, partial, scale, *, skipped=None) -> None:
    """Stores a whole tile of logits of one or two query tokens."""
    token = jnp.arange(TILE, dtype=jnp.int32)
    for n, sums in enumerate(partial):
        seen = (first + token < end + n) & ((known >> token // part & 1) > 0)
        logits = jnp.where(seen, sums.sum(axis=1) * (1 if scale is None else scale), -jnp.inf)

        @pl.when(n >= (0 if skipped is None else skipped))
        def _(n=n, logits=logits):
            out_ref[row + n, pl.ds(first, TILE)] = logits


def fill(out_ref, row, first, last) -> None:
    """Stores -inf to whole tiles."""

    def fill_tile(i, _):
        out_ref[row, pl.ds(first + i * TILE, TILE)] = jnp.full(TILE, -jnp.inf, jnp.float32)

    lax.fori_loop(0, floordiv(jnp.maximum(last - first, 0) + (TILE - 1), TILE), fill_tile, None)
