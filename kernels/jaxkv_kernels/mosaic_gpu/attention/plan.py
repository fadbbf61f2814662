"""Split-KV: which CTA (or cluster) attends to which tokens, computed on the device from the lengths.

The tokens of a request are counted in steps: pairs of 64-token tiles, or single tiles for MLA calls with few rows.  By
default, the steps of all requests are laid end to end, and the line is divided into equal partitions: as many as fill
the GPU, with a CTA for each partition, tile of rows and KV head.  Several divisions are compared: into as many
partitions as fill the GPU or somewhat fewer, with and without gaps between requests, which stand for the cost of
beginning and ending a request, and one that leaves all requests whole, if there are enough partitions.  The division
with the least estimated time is used: the time of its longest partition and of combining its splits.
A batch-invariant plan splits a request by its own length alone.

A work tile is the part of a request that lies in one partition.  The work tiles of a request that was divided store
splits, which `combine` merges.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import lengths_in_table
from jaxkv_kernels.mosaic_gpu.attention.config import (
    CTAS,
    FEW_ROWS,
    PAIR,
    TILE,
    FewRowsConfig,
    FewRowsQuantisedConfig,
    KVConfig,
    QuantisedWideConfig,
    SplitCosts,
    WideConfig,
    by_slots,
    kv_quantised_config,
    wide_config,
)
from jaxkv_kernels.mosaic_gpu.attention.planning import by_kernel as kernels
from jaxkv_kernels.mosaic_gpu.attention.planning.by_xla import divide
from jaxkv_kernels.mosaic_gpu.attention.planning.division import Problem
from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.tuning import configuration


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
    shared: bool = field(default=False, metadata={"static": True})
    """Whether two CTAs share the keys of each work tile; see `sharing.py`."""
    whole: bool = field(default=False, metadata={"static": True})
    """Whether it is known while tracing that no request is split."""

    @property
    def num_partitions(self) -> int:
        """Partitions; the CTAs of all tiles of rows, and of all KV heads, of a request walk the same one."""
        return self.partitions.shape[0] - 1


def plan_decode(
    buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window, batch_invariant, dtype=None
) -> Plan:
    """The schedule for `heads` query heads and `tokens` query tokens per request, in partitions that fill the GPU."""
    del buffer, dtype
    if by_slots(entry, tokens * heads):
        from jaxkv_kernels.mosaic_gpu.attention.decode_mla_by_slots import plan_by_slots

        by_token: Any = plan_by_slots(
            block_tables,
            seq_lens,
            pages=pages,
            entry=entry,
            heads=heads,
            tokens=tokens,
            window=window,
            batch_invariant=batch_invariant,
        )
        return by_token
    config = configuration(default_config(entry, tokens * heads // pages.num_heads))
    row_tiles = pages.num_heads * -(-tokens * (heads // pages.num_heads) // TILE)
    partitions = 4 if interpreting.value else max(MULTIPROCESSORS // row_tiles, 1)
    step = PAIR if isinstance(config, WideConfig | QuantisedWideConfig | KVConfig) else TILE
    costs, shared = config.split_costs, False
    # A batch-invariant plan must not depend on how many requests there are.
    if isinstance(config, WideConfig | FewRowsConfig) and row_tiles == 1 and not batch_invariant:
        shared = shares_keys(seq_lens.size, partitions)
    if shared:
        partitions, costs = partitions // CTAS, costs.of_shared_steps()
    plan = make_plan(
        seq_lens, block_tables, partitions=partitions, tokens=tokens, block_size=pages.block_size,
        num_blocks=pages.num_blocks, window=window, batch_invariant=batch_invariant,
        step=step, costs=costs,
        by_kernel=not interpreting.value,
    )  # fmt: skip
    return replace(plan, shared=shared)


def shares_keys(requests: int, partitions: int) -> bool:
    """Whether two CTAs share the keys of each work tile.

    They do if there are enough pairs of CTAs for each request to have one, but not two: with fewer requests, most are
    split among several pairs, and merging in pairs first takes longer: 0.0300 ms instead of 0.0281 for one request of
    65,536 tokens with 16 heads.  With 64 requests of 4,096 tokens, sharing takes 0.0777 ms instead of 0.0792.
    """
    return CTAS * requests <= partitions < 2 * CTAS * requests


def default_config(entry, rows: int) -> Any:
    """The default configuration of a `decode_mla` or `decode_kv` call: its class determines the schedule.

    `rows`: query tokens x query heads of a KV head.
    """
    if not entry.one_head:
        return kv_quantised_config(entry) if entry.quantised else KVConfig()
    if rows > FEW_ROWS:
        return QuantisedWideConfig() if entry.quantised else wide_config(rows)
    return FewRowsQuantisedConfig() if entry.quantised else FewRowsConfig()


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


@partial(
    jax.jit,
    static_argnames=(
        "partitions", "tokens", "block_size", "num_blocks", "window", "batch_invariant", "step", "costs", "by_kernel",
        "interpret",
    ),
)  # fmt: skip
def make_plan(
    seq_lens, block_tables, *, partitions: int, tokens: int, block_size: int, num_blocks: int | None, step: int,
    costs: SplitCosts, window: int | None = None, batch_invariant: bool = False, by_kernel: bool = False,
    interpret: bool = False,
) -> Plan:  # fmt: skip
    """The schedule of `partitions` for requests of `seq_lens` [B] with `tokens` query tokens each.

    A request without tokens has one step, all of it masked.  With a window, requests begin at the tile of the first key
    that some query sees.  Without `num_blocks`, no block is unknown, and only the shape of the tables matters.
    `by_kernel` computes the schedule by one or two kernels on a Hopper GPU (with `interpret`, in the interpreter) if
    they have room for it, otherwise by XLA, which takes several times as long.
    """
    problem = Problem(
        batch=seq_lens.size, partitions=partitions, tokens=tokens, step=step, costs=costs, window=window,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if by_kernel and kernels.fits(problem):
        divided = kernels.divide(
            seq_lens, block_tables, problem, block_size=block_size, num_blocks=num_blocks, interpret=interpret
        )
        return Plan(*divided, max_splits=problem.max_splits)
    lengths = lengths_in_table(seq_lens, block_tables, block_size)
    if num_blocks is None:
        return Plan(*divide(lengths, jnp.zeros_like(lengths), problem), max_splits=problem.max_splits)
    columns = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * block_size
    seen = (columns + block_size > problem.origin(lengths)[:, None]) & (columns < lengths[:, None])
    unknown = (((block_tables < 0) | (block_tables >= num_blocks)) & seen).any(axis=1).astype(jnp.int32)
    return Plan(*divide(lengths, unknown, problem), max_splits=problem.max_splits)
