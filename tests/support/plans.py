"""Plans by comparing everything with everything: what the division of `mosaic_gpu` must agree with."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import lengths_in_table
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler import SPLIT_COST_UNIT, Plan, SplitCosts

INVARIANT_SPLITS, INVARIANT_TOKENS = 8, 1024


def _lay_out(sizes, partitions: int, costs: SplitCosts):
    """The division of least cost: where requests of `sizes` [B] begin, and the length of a partition, both in steps."""
    used = jnp.arange(partitions - partitions // 8, partitions + 1, dtype=jnp.int32)  # the others stay empty
    gap = jnp.asarray([costs.overhead, 0], jnp.int32)[:, None]  # without gaps, equal requests are split alike
    ends = jnp.cumsum(sizes + gap, axis=1)
    begins = ends - sizes - gap
    length = jnp.maximum(-(-ends[:, -1:] // used), costs.least)
    # [gap, used, partition, request]
    low = (length[..., None] * jnp.arange(partitions, dtype=jnp.int32))[..., None]
    high = low + length[..., None, None]
    begin = begins[:, None, None]
    taken = jnp.maximum(jnp.minimum(high, begin + sizes) - jnp.maximum(low, begin), 0)
    load = (taken + jnp.where(taken > 0, costs.overhead, 0)).sum(axis=3).max(axis=2)
    splits = ((begins[:, None] + sizes - 1) // length[..., None] - begins[:, None] // length[..., None]).sum(axis=2)
    cost = SPLIT_COST_UNIT * load + jnp.where(splits > 0, costs.combining, 0) + costs.split * splits
    best = cost.argmin()
    begins, length, least = begins[best // used.size], length.reshape(-1)[best], cost.min()
    if sizes.size > partitions:
        return begins, length
    # Or each request in a partition of its own, if none is so long that dividing it would be faster.
    whole = SPLIT_COST_UNIT * (sizes.max() + costs.overhead) < least
    apart = jnp.arange(sizes.size, dtype=jnp.int32) * sizes.max()
    return jnp.where(whole, apart, begins), jnp.where(whole, sizes.max(), length)


@partial(
    jax.jit,
    static_argnames=(
        *("partitions", "tokens", "block_size", "num_blocks", "window", "ahead", "batch_invariant", "step", "costs"),
    ),
)
def make_plan(
    seq_lens, block_tables, trailing=None, *, partitions: int, tokens: int, block_size: int, num_blocks: int, step: int,
    costs: SplitCosts, window: int | None = None, ahead: int | None = 0, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """The schedule of `partitions` for requests of `seq_lens` [B] with `tokens` query tokens each.

    A request without tokens has one step, all of it masked.  With a window, requests begin at the tile of the first key
    that some query sees.
    """
    batch = seq_lens.size
    lengths = lengths_in_table(seq_lens, block_tables, block_size)
    after_queries = lengths if trailing is None else lengths - trailing
    after_first = after_queries - tokens + 1
    first_end = lengths  # of what the first query token sees
    if ahead is not None:
        first_end, lengths = jnp.minimum(after_first + ahead, lengths), jnp.clip(after_queries + ahead, 0, lengths)
    origin = jnp.zeros_like(lengths)
    if window is not None:
        origin = jnp.maximum(after_first - window, 0) // TILE * TILE
    keys = lengths - origin
    sizes = jnp.maximum(-(-keys // step), 1)
    if batch_invariant:
        ends = jnp.cumsum(sizes + costs.overhead)
        begins = ends - sizes - costs.overhead
        length = -(-ends[-1] // partitions)
        counts = jnp.clip(sizes // (INVARIANT_TOKENS // step), 1, INVARIANT_SPLITS)
        first = jnp.zeros_like(counts)
    else:
        begins, length = _lay_out(sizes, partitions, costs)
        first = begins // length
        counts = (begins + sizes - 1) // length - first + 1
    after = jnp.cumsum(counts)
    is_split = counts > 1
    first_split = jnp.cumsum(jnp.where(is_split, counts, 0)) - counts

    tile = jnp.arange(batch * INVARIANT_SPLITS if batch_invariant else batch + partitions, dtype=jnp.int32)
    request = jnp.minimum(
        jnp.searchsorted(after, tile, side="right", method="compare_all").astype(jnp.int32), batch - 1
    )
    nth = tile - (after - counts)[request]
    live = tile < after[-1]
    size = sizes[request]
    if batch_invariant:
        begin, end = (n * size // counts[request] for n in (nth, nth + 1))
        partition = (begins[request] + begin) // length
    else:
        partition = first[request] + nth
        begin, end = (jnp.clip(p * length - begins[request], 0, size) for p in (partition, partition + 1))
    ordered = jnp.where(live, partition, partitions)
    first_tiles = jnp.searchsorted(ordered, jnp.arange(partitions + 1, dtype=jnp.int32), method="compare_all")
    first_tiles = first_tiles.astype(jnp.int32)

    columns = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * block_size
    seen = (columns + block_size > origin[:, None]) & (columns < lengths[:, None])
    unknown = ((block_tables < 0) | (block_tables >= num_blocks)) & seen
    unmasked_end = jnp.where(unknown.any(axis=1), 0, jnp.maximum(first_end - origin, 0) // step)
    split = jnp.where(is_split[request], first_split[request] + nth, -1)
    beyond = [] if trailing is None else [(lengths - after_queries)[request]]
    work_tiles = jnp.stack(
        [request, begin, end, keys[request], unmasked_end[request], split, origin[request], *beyond], axis=1
    )  # the order of WorkTile

    if batch <= partitions or batch_invariant:
        ending, whole = jnp.arange(batch, dtype=jnp.int32), ~is_split
    else:  # the last split of a request is the first work tile of a partition
        starting = jnp.minimum(first_tiles[:-1], tile.size - 1)
        ending = request[starting]
        whole = ~is_split[ending] | ~live[starting] | (nth[starting] != counts[ending] - 1)
    split_requests = jnp.stack([jnp.where(whole, -1, ending), first_split[ending], counts[ending]], axis=1)
    first_columns = work_tiles[jnp.minimum(first_tiles, tile.size - 1)]
    max_splits = tile.size if batch_invariant else min(tile.size, 2 * partitions)
    return Plan(jnp.concatenate([first_tiles[:, None], first_columns], axis=1), work_tiles, split_requests, max_splits)
