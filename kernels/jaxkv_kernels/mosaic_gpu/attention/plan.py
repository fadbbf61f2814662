"""Split-KV: which CTA (or cluster) attends to which tokens, computed on the device from the lengths.

The tokens of a request are counted in steps: pairs of 64-token tiles, or single tiles for MLA calls with few rows.  By
default, the steps of all requests are laid end to end, and the line is divided into equal partitions: as many as fill
the GPU, with a CTA for each partition, tile of rows and KV head.  Several divisions are compared: with and without gaps
between requests, for the cost of beginning and ending one, and into as many partitions as fill the GPU or somewhat
fewer.  The division with the least estimated time is used: that of its longest partition, and of combining its splits.
A batch-invariant plan splits a request by its own length alone.

A work tile is the part of a request that lies in one partition.  The work tiles of a request that was divided store
splits, which `combine` merges.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.slots import lengths_in_table
from jaxkv_kernels.mosaic_gpu.attention.config import (
    FEW_ROWS,
    PAIR,
    SPLIT_COST_UNIT,
    TILE,
    FewRowsConfig,
    FewRowsQuantisedConfig,
    KVConfig,
    QuantisedWideConfig,
    SplitCosts,
    WideConfig,
)
from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.tuning import configuration

INVARIANT_SPLITS, INVARIANT_TOKENS = 8, 1024
"""Of a batch-invariant plan: the most splits of a request, and the fewest tokens of a split."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """A schedule; arrays of int32."""

    partitions: jax.Array
    """[partitions + 1, 8]: the first work tile of each, and its columns, so that a CTA begins with one load instead of
    two dependent ones."""
    work_tiles: jax.Array
    """[work tiles, 7]: see `WorkTile`."""
    split_requests: jax.Array
    """[requests, 3]: a request that was split (-1: none), its first split, its number of splits."""
    max_splits: int = field(metadata={"static": True})
    """The most splits of all requests together."""

    @property
    def num_partitions(self) -> int:
        """Partitions; the CTAs of all tiles of rows, and of all KV heads, of a request walk the same one."""
        return self.partitions.shape[0] - 1


def plan_decode(buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window, batch_invariant) -> Plan:
    """The schedule for `heads` query heads and `tokens` query tokens per request, with a partition per CTA."""
    del buffer
    if by_slots(entry, tokens * heads):
        from jaxkv_kernels.mosaic_gpu.attention.decode_mla_by_slots import plan_by_slots

        by_token: Any = plan_by_slots(
            block_tables, seq_lens, pages=pages, heads=heads, tokens=tokens, batch_invariant=batch_invariant
        )
        return by_token
    few_rows = entry.one_head and tokens * heads <= FEW_ROWS
    config = configuration(mla_config(entry, tokens * heads) if entry.one_head else KVConfig())
    row_tiles = pages.num_heads * -(-tokens * (heads // pages.num_heads) // TILE)
    partitions = 4 if interpreting.value else max(MULTIPROCESSORS // row_tiles, 1)
    return make_plan(
        seq_lens, block_tables, partitions=partitions, tokens=tokens, block_size=pages.block_size,
        num_blocks=pages.num_blocks, window=window, batch_invariant=batch_invariant,
        step=TILE if few_rows else PAIR, costs=config.split_costs,
    )  # fmt: skip


def by_slots(entry, rows: int) -> bool:
    """Whether calls with so many rows per request run as sparse attention to all slots of a request."""
    return entry.format == "fp8_ds_mla" and rows > FEW_ROWS


def mla_config(entry, rows: int) -> FewRowsConfig | FewRowsQuantisedConfig | WideConfig | QuantisedWideConfig:
    """The default configuration of a `decode_mla` call with so many rows per request: its class is the schedule."""
    quantised = not jnp.issubdtype(entry.dtype, jnp.floating)
    if rows > FEW_ROWS:
        return QuantisedWideConfig() if quantised else WideConfig()
    return FewRowsQuantisedConfig() if quantised else FewRowsConfig()


def plan_or_default(
    plan: Plan | None, buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window=None
) -> Plan:
    """`plan`, or else the default plan of a decode call."""
    if plan is not None:
        return plan
    return plan_decode(
        buffer, block_tables, seq_lens,
        pages=pages, entry=entry, heads=heads, tokens=tokens, window=window, batch_invariant=False,
    )  # fmt: skip


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
    return begins[best // used.size], length.reshape(-1)[best]


@partial(
    jax.jit,
    static_argnames=("partitions", "tokens", "block_size", "num_blocks", "window", "batch_invariant", "step", "costs"),
)
def make_plan(
    seq_lens, block_tables, *, partitions: int, tokens: int, block_size: int, num_blocks: int, step: int,
    costs: SplitCosts, window: int | None = None, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """The schedule of `partitions` for requests of `seq_lens` [B] with `tokens` query tokens each.

    A request without tokens has one step, all of it masked.  With a window, requests begin at the tile of the first key
    that some query sees.
    """
    batch = seq_lens.size
    lengths = lengths_in_table(seq_lens, block_tables, block_size)
    origin = jnp.zeros_like(lengths)
    if window is not None:
        origin = jnp.maximum(lengths - tokens + 1 - window, 0) // TILE * TILE
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
    unmasked_end = jnp.where(unknown.any(axis=1), 0, jnp.maximum(keys - tokens + 1, 0) // step)
    split = jnp.where(is_split[request], first_split[request] + nth, -1)
    work_tiles = jnp.stack(
        [request, begin, end, keys[request], unmasked_end[request], split, origin[request]], axis=1
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
