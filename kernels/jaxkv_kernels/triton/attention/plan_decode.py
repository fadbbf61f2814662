"""Split-KV: which program attends to which tokens of a request, computed on the device from the lengths.

All requests are cut into pieces of at most one size, a multiple of 64 tokens.  Of several sizes, that is taken which
promises the earliest end: large ones leave multiprocessors idle, small ones cost a start each, and the pieces must be
combined afterwards.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.slots import table_tokens
from jaxkv_kernels.triton.attention.decode_tiles import Tiles, latent_tiles, multiprocessors, pair_tiles

LEAST = 64
"""Tokens: pieces are multiples of it."""
START = 64
"""What a piece costs beside its tokens, in tokens."""
TURNS = 4
"""Sizes are tried that let every program slot take one piece, up to so many."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """A schedule; arrays of int32."""

    items: jax.Array
    """[items, 4]: request (-1: none), first token, end, whether it is a piece of a request that was cut."""
    cuts: jax.Array
    """[cuts, 3]: a request that was cut, its first item, its number of items; as many as there are, then others."""
    counts: jax.Array
    """[B]: items of each request."""
    number: jax.Array
    """[1]: how many requests were cut."""
    usual: int = field(metadata={"static": True})
    """Items of a request where all are alike, and every program slot takes one."""

    @property
    def cutting(self) -> bool:
        """Whether requests can be cut at all."""
        return self.items.shape[0] > self.counts.shape[0]


def plan_decode(buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window, batch_invariant) -> Plan:
    """The schedule for `heads` query heads and `tokens` query tokens per request."""
    del buffer, batch_invariant
    rows = tokens * (heads // pages.num_heads)
    tiles = (latent_tiles if entry.one_head else pair_tiles)(entry, rows, entry.dtype)
    return make_plan(
        seq_lens, tiles=tiles, groups=pages.num_heads * tiles.groups(rows), tokens=tokens, window=window,
        longest=table_tokens(block_tables, pages.block_size), processors=multiprocessors(),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("tiles", "groups", "tokens", "window", "longest", "processors"))
def make_plan(seq_lens, *, tiles: Tiles, groups: int, tokens: int, window: int | None, longest: int, processors: int):
    """The schedule for requests of `seq_lens` [B], clamped to 0 and `longest`, which `groups` programs share.

    With a window, requests begin with the first token in sight.
    """
    batch = seq_lens.size
    places = processors * tiles.programs
    ends = jnp.clip(seq_lens, 0, longest)
    begins = jnp.zeros_like(ends)
    if window is not None:
        begins = jnp.clip(ends - tokens + 1 - window, 0, ends)
    lengths = ends - begins

    most = jnp.maximum(lengths.max(), 1)
    share = jnp.maximum(lengths.sum(dtype=jnp.float32), 1) * groups / places  # tokens a slot, if all went even
    pieces = jnp.maximum(jnp.arange(1, TURNS + 1) * most // share, 1)
    sizes = jnp.ceil(most / pieces / LEAST).astype(jnp.int32) * LEAST
    counts = jnp.maximum(-(-lengths // sizes[:, None]), 1)
    turns = -(-counts.sum(axis=1) * groups // places)
    # However uneven the pieces are, work in order ends before either of the two.
    end = jnp.minimum(share + sizes, turns * sizes) + turns * START
    best = end.argmin()
    size, counts = sizes[best], counts[best]

    most_items = batch + max(batch, TURNS * places // groups)
    item = jnp.arange(min(most_items, batch * -(-longest // LEAST)), dtype=jnp.int32)
    after = jnp.cumsum(counts)
    first = after - counts
    request = jnp.searchsorted(after, item, side="right", method="compare_all").astype(jnp.int32)
    live, request = request < batch, jnp.minimum(request, batch - 1)
    begin = begins[request] + (item - first[request]) * size
    end = jnp.minimum(begin + size, ends[request])
    cut = counts > 1
    items = jnp.stack([jnp.where(live, request, -1), begin, end, cut[request].astype(jnp.int32)], axis=1)
    order = jnp.argsort(~cut, stable=True)
    cuts = jnp.stack([order.astype(jnp.int32), first[order], jnp.where(cut, counts, 0)[order]], axis=1)
    return Plan(items, cuts, counts, cut.sum(dtype=jnp.int32)[None], usual=places // (groups * batch))
