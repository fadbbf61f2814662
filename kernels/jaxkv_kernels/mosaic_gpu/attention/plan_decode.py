"""Split-KV: which CTA attends to which tokens, computed on the device from the lengths.

The tokens of a request come in steps: pairs of 64-token tiles, or tiles for MLA calls with few rows.  By default the
steps of all requests are laid end to end, with gaps for what starting and ending a request costs or without, and cut
into equal parts: as many as there are CTAs (or clusters), or somewhat fewer.  Of these layouts the one is taken whose
longest part takes the least time, the work on the pieces of requests that were cut included.  A batch-invariant plan
cuts a request by its own length alone.  What lies between two cuts is an item; the items of a request that was cut
leave pieces, which are combined afterwards.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.slots import lengths_in_table
from jaxkv_kernels.mosaic_gpu.attention.page_table import TILE
from jaxkv_kernels.mosaic_gpu.runtime.build import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.unsupported import FEW_ROWS

PAIR = 128
"""Tokens of two tiles."""
SPLITS, LEAST = 8, 1024
"""Batch-invariant: most pieces of a request, and the least tokens of a piece."""
UNIT = 256
"""What a step costs."""


@dataclass(frozen=True)
class Steps:
    """What kernels take the tokens of a request in, and what else costs them time."""

    tokens: int
    least: int
    """The least that a part is given, in steps: pieces are work as well."""
    overhead: int
    """What starting and ending a request costs, in steps."""
    combining: int
    """What combining costs at all, a step being UNIT."""
    piece: int
    """What a piece costs, likewise."""


PAIRS = Steps(PAIR, least=1, overhead=2, combining=256, piece=16)
TILES = Steps(TILE, least=2, overhead=0, combining=128, piece=2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """A schedule; arrays of int32."""

    starts: jax.Array
    """[parts + 1, 8]: the first item of each part, and its columns: a part begins with one load, not two in a row."""
    items: jax.Array
    """[items, 7]: request, first step, end of the steps, tokens of the request in sight, end of its steps that need no
    mask, the piece that the item leaves (-1: it is the whole request), the token where step 0 begins."""
    cuts: jax.Array
    """[cuts, 3]: a request that was cut (-1: none), its first piece, its number of pieces."""
    pieces: int = field(metadata={"static": True})
    """The most pieces that cut requests leave."""

    @property
    def parts(self) -> int:
        """CTAs or clusters that it is made for."""
        return self.starts.shape[0] - 1


def described(items, item):
    """The columns of an item, in a kernel's hands; past the last, those of the last."""
    item = jnp.minimum(item, items.shape[0] - 1)
    return tuple(items[item, column] for column in range(items.shape[1]))


def begun(starts, part):
    """The first item of a part, the end of its items, and the columns of the first, in a kernel's hands."""
    first, *told = described(starts, part)
    return first, starts[part + 1, 0], tuple(told)


def plan_decode(buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window, batch_invariant) -> Plan:
    """The schedule for `heads` query heads and `tokens` query tokens per request, with as many parts as fit the GPU."""
    del buffer
    steps = TILES if entry.one_head and tokens * heads <= FEW_ROWS else PAIRS
    tiles = pages.num_heads * -(-tokens * (heads // pages.num_heads) // TILE)
    parts = 4 if interpreting.value else max(MULTIPROCESSORS // tiles, 1)
    return make_plan(
        seq_lens, block_tables, parts=parts, tokens=tokens, block_size=pages.block_size, num_blocks=pages.num_blocks,
        window=window, batch_invariant=batch_invariant, steps=steps,
    )  # fmt: skip


def _laid_out(sizes, parts: int, steps: Steps):
    """Where requests of `sizes` [B] begin, laid end to end, and how long the parts are that this is cut into; in steps.

    Of all layouts that are tried, the one with the least cost.
    """
    used = jnp.arange(parts - parts // 8, parts + 1, dtype=jnp.int32)  # parts that are left over stay empty
    gap = jnp.asarray([steps.overhead, 0], jnp.int32)[:, None]  # without gaps, requests of one length are cut alike
    ends = jnp.cumsum(sizes + gap, axis=1)
    begins = ends - sizes - gap
    payload = jnp.maximum(-(-ends[:, -1:] // used), steps.least)
    # [gap, used, part, request]
    low = (payload[..., None] * jnp.arange(parts, dtype=jnp.int32))[..., None]
    high = low + payload[..., None, None]
    begin = begins[:, None, None]
    taken = jnp.maximum(jnp.minimum(high, begin + sizes) - jnp.maximum(low, begin), 0)
    load = (taken + jnp.where(taken > 0, steps.overhead, 0)).sum(axis=3).max(axis=2)
    cuts = ((begins[:, None] + sizes - 1) // payload[..., None] - begins[:, None] // payload[..., None]).sum(axis=2)
    cost = UNIT * load + jnp.where(cuts > 0, steps.combining, 0) + steps.piece * cuts
    best = cost.argmin()
    return begins[best // used.size], payload.reshape(-1)[best]


@partial(jax.jit, static_argnames=("parts", "tokens", "block_size", "num_blocks", "window", "batch_invariant", "steps"))
def make_plan(
    seq_lens, block_tables, *, parts: int, tokens: int, block_size: int, num_blocks: int, window: int | None = None,
    batch_invariant: bool = False, steps: Steps = PAIRS,
) -> Plan:  # fmt: skip
    """The schedule of `parts` parts for requests of `seq_lens` [B] with `tokens` query tokens each.

    A request without tokens has one step too, all of it masked.  With a window, requests begin at the tile that holds
    the first key in sight.
    """
    batch = seq_lens.size
    lengths = lengths_in_table(seq_lens, block_tables, block_size)
    origin = jnp.zeros_like(lengths)
    if window is not None:
        origin = jnp.maximum(lengths - tokens + 1 - window, 0) // TILE * TILE
    seen = lengths - origin
    sizes = jnp.maximum(-(-seen // steps.tokens), 1)
    if batch_invariant:
        ends = jnp.cumsum(sizes + steps.overhead)
        begins = ends - sizes - steps.overhead
        payload = -(-ends[-1] // parts)
        counts = jnp.clip(sizes // (LEAST // steps.tokens), 1, SPLITS)
        first = jnp.zeros_like(counts)
    else:
        begins, payload = _laid_out(sizes, parts, steps)
        first = begins // payload
        counts = (begins + sizes - 1) // payload - first + 1
    after = jnp.cumsum(counts)
    cut = counts > 1
    piece = jnp.cumsum(jnp.where(cut, counts, 0)) - counts

    item = jnp.arange(batch * SPLITS if batch_invariant else batch + parts, dtype=jnp.int32)
    request = jnp.minimum(
        jnp.searchsorted(after, item, side="right", method="compare_all").astype(jnp.int32), batch - 1
    )
    nth = item - (after - counts)[request]
    live = item < after[-1]
    size = sizes[request]
    if batch_invariant:
        begin, end = (n * size // counts[request] for n in (nth, nth + 1))
        part = (begins[request] + begin) // payload
    else:
        part = first[request] + nth
        begin, end = (jnp.clip(p * payload - begins[request], 0, size) for p in (part, part + 1))
    ordered = jnp.where(live, part, parts)
    first_items = jnp.searchsorted(ordered, jnp.arange(parts + 1, dtype=jnp.int32), method="compare_all")
    first_items = first_items.astype(jnp.int32)

    columns = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * block_size
    in_sight = (columns + block_size > origin[:, None]) & (columns < lengths[:, None])
    bad = ((block_tables < 0) | (block_tables >= num_blocks)) & in_sight
    clear = jnp.where(bad.any(axis=1), 0, jnp.maximum(seen - tokens + 1, 0) // steps.tokens)
    left = jnp.where(cut[request], piece[request] + nth, -1)
    items = jnp.stack([request, begin, end, seen[request], clear[request], left, origin[request]], axis=1)

    if batch <= parts or batch_invariant:
        ending, whole = jnp.arange(batch, dtype=jnp.int32), ~cut
    else:  # a cut request ends with the first item of a part
        starting = jnp.minimum(first_items[:-1], item.size - 1)
        ending = request[starting]
        whole = ~cut[ending] | ~live[starting] | (nth[starting] != counts[ending] - 1)
    cuts = jnp.stack([jnp.where(whole, -1, ending), piece[ending], counts[ending]], axis=1)
    described_first = items[jnp.minimum(first_items, item.size - 1)]
    starts = jnp.concatenate([first_items[:, None], described_first], axis=1)
    return Plan(starts, items, cuts, pieces=item.size if batch_invariant else min(item.size, 2 * parts))
