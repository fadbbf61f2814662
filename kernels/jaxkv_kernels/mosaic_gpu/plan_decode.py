"""Plans of `decode_mla` and `decode_kv` calls: which kernel attends, and how the tile scheduler divides its work."""

from dataclasses import replace
from typing import Any

from jaxkv_kernels.calls import PlanDecode
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


def plan_decode(call: PlanDecode) -> Plan:
    """The schedule of a decode call, in partitions that fill the GPU."""
    rows, kv_heads = call.q_len * call.heads, call.pages.num_heads
    if by_slots(call.entry, rows):
        return plan_by_slots(call)
    config = configuration(default_config(call.entry, rows // kv_heads))
    row_tiles = kv_heads * -(-rows // kv_heads // TILE)
    partitions = most_partitions(row_tiles)
    step = PAIR if isinstance(config, WideConfig | QuantisedWideConfig | KVConfig) else TILE
    costs, shared = config.split_costs, False
    # A batch-invariant plan must not depend on how many requests there are.
    if isinstance(config, WideConfig | FewRowsConfig) and row_tiles == 1 and not call.batch_invariant:
        shared = shares_keys(call.seq_lens.size, partitions)
    if shared:
        partitions, costs = partitions // CTAS, costs.of_shared_steps()
    plan = make_plan(
        call.seq_lens,
        call.block_tables,
        partitions=partitions,
        tokens=call.q_len,
        block_size=call.pages.block_size,
        num_blocks=call.pages.num_blocks,
        window=call.window,
        batch_invariant=call.batch_invariant,
        step=step,
        costs=costs,
        by_kernel=not interpreting.value,
    )
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
        PlanDecode(
            buffer=buffer,
            block_tables=block_tables,
            seq_lens=seq_lens,
            pages=pages,
            entry=entry,
            heads=heads,
            q_len=tokens,
            window=window,
            dtype=entry.input_dtype,
            batch_invariant=False,
        )
    )
