"""Plans of `decode_mla` and `decode_kv` calls: which kernel attends, and how the tile scheduler divides its work."""

from dataclasses import replace
from typing import Any

from jaxkv_kernels.mosaic_gpu.attention.config import (
    FEW_ROWS,
    FewRowsConfig,
    FewRowsQuantisedConfig,
    KVConfig,
    QuantisedWideConfig,
    WideConfig,
    by_slots,
    kv_quantised_config,
    wide_config,
)
from jaxkv_kernels.mosaic_gpu.mla_sparse import plan_by_slots
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler import CTAS, Plan, make_plan, most_partitions, shares_keys
from jaxkv_kernels.tuning import configuration


def plan_decode(
    buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window, batch_invariant, dtype=None
) -> Plan:
    """The schedule for `heads` query heads and `tokens` query tokens per request, in partitions that fill the GPU."""
    del buffer, dtype
    if by_slots(entry, tokens * heads):
        return plan_by_slots(
            block_tables,
            seq_lens,
            pages=pages,
            entry=entry,
            heads=heads,
            tokens=tokens,
            window=window,
            batch_invariant=batch_invariant,
        )
    config = configuration(default_config(entry, tokens * heads // pages.num_heads))
    row_tiles = pages.num_heads * -(-tokens * (heads // pages.num_heads) // TILE)
    partitions = most_partitions(row_tiles)
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
