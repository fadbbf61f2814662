"""Split-KV: which CTA attends to which tokens, computed on the device from the lengths.

The tokens of all requests, in pairs of 64-token tiles, are laid end to end, each request followed by a fixed cost for
its epilogue, and cut into as many equal parts as there are CTAs (or clusters).  A part begins somewhere in a request
and ends somewhere in the same or a later one; a request that lies in several parts is combined afterwards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PAIR = 128
"""Tokens a step: two tiles of 64."""
OVERHEAD = 2
"""What starting and ending a request costs, in pairs."""


class Plan(NamedTuple):
    """A schedule; arrays of int32."""

    bounds: jax.Array
    """[parts + 1, 2]: (request, pair) where each part begins; the last row is (requests, 0)."""
    requests: jax.Array
    """[requests, 4]: tokens, pairs that need no mask, first part, last part."""


def make_plan(seq_lens, block_tables, *, parts: int, tokens: int, block_size: int, num_blocks: int) -> Plan:
    """The schedule of `parts` parts for requests of `seq_lens` [B] with `tokens` query tokens each."""
    lengths = jnp.clip(seq_lens, 0, block_tables.shape[1] * block_size)
    pairs = -(-lengths // PAIR)
    ends = jnp.cumsum(pairs + OVERHEAD)
    begins = ends - pairs - OVERHEAD
    payload = -(-ends[-1] // parts)
    cut = jnp.arange(parts + 1, dtype=jnp.int32) * payload
    request = jnp.minimum((ends[None] <= cut[:, None]).sum(axis=1, dtype=jnp.int32), lengths.size - 1)
    pair = cut - begins[request]
    done = (pair > 0) & (pair >= pairs[request])  # in the fixed cost: the next request begins the part
    bounds = jnp.stack([request + done, jnp.where(done, 0, pair)], axis=1)
    bounds = jnp.where((cut >= ends[-1])[:, None], jnp.asarray([lengths.size, 0], jnp.int32), bounds)

    def part_of(pair):
        """The part that holds `pair` [B] of each request."""
        b = jnp.arange(lengths.size, dtype=jnp.int32)[:, None]
        before = (bounds[:, 0] < b) | ((bounds[:, 0] == b) & (bounds[:, 1] <= pair[:, None]))
        return before.sum(axis=1, dtype=jnp.int32) - 1

    columns = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * block_size
    bad = ((block_tables < 0) | (block_tables >= num_blocks)) & (columns < lengths[:, None])
    clear = jnp.where(bad.any(axis=1), 0, jnp.maximum(lengths - tokens + 1, 0) // PAIR)
    requests = jnp.stack([lengths, clear, part_of(jnp.zeros_like(pairs)), part_of(jnp.maximum(pairs - 1, 0))], axis=1)
    return Plan(bounds, requests)
