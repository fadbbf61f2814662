"""Picks the kernel of a dense decode call on sm_90, and that of its plan; runs it, and then `combine` for splits."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu import gqa, mla_dense, mla_dense_swap_ab, quantised_swap_ab
from jaxkv_kernels.mosaic_gpu.combine import combine
from jaxkv_kernels.mosaic_gpu.gqa import GQAConfig
from jaxkv_kernels.mosaic_gpu.mla_dense import MLADenseConfig, QuantisedMLADenseConfig
from jaxkv_kernels.mosaic_gpu.mla_dense_swap_ab import MLASwapABConfig
from jaxkv_kernels.mosaic_gpu.mla_sparse import decode_by_slots, plan_by_slots
from jaxkv_kernels.mosaic_gpu.paged_tma import in_entries_dtype
from jaxkv_kernels.mosaic_gpu.quantised_swap_ab import QuantisedSwapABConfig, tiles_of
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler import CTAS, Plan, make_plan, most_partitions, shares_keys
from jaxkv_kernels.tuning import configuration

SWAP_AB_ROWS = 16
"""Rows (query tokens x heads of a request) up to which `decode_mla` runs a kernel with swapped operands.

At 16 rows it is memory-bound.  32 rows would fit, with half of the query stages, but took 6 % longer than the kernel
whose tiles have 64 rows.
"""
GATHERED = ("fp8_v4", "nvfp4_ds_mla", "mxfp4_ds_mla")
"""Formats of latents that only the kernel of sparse attention decodes."""


def by_slots(entry, rows: int) -> bool:
    """Whether dense calls with `rows` rows per request run as sparse attention to all slots of the request."""
    return entry.format in GATHERED or (entry.format == "fp8_ds_mla" and rows > SWAP_AB_ROWS)


def default_config(entry, rows: int) -> Any:
    """The default configuration of a `decode_mla` or `decode_kv` call: its class determines the kernel.

    `rows`: query tokens x query heads of a KV head.
    """
    if not entry.one_head:
        return quantised_swap_ab.gqa_config(entry) if entry.quantised else GQAConfig()
    if rows > SWAP_AB_ROWS:
        return QuantisedMLADenseConfig() if entry.quantised else mla_dense.default_config(rows)
    return QuantisedSwapABConfig() if entry.quantised else MLASwapABConfig()


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
    step = PAIR if isinstance(config, MLADenseConfig | QuantisedMLADenseConfig | GQAConfig) else TILE
    costs, shared = config.split_costs, False
    # A batch-invariant plan must not depend on how many requests there are.
    if isinstance(config, MLADenseConfig | MLASwapABConfig) and row_tiles == 1 and not batch_invariant:
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


def decode_mla(
    q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, kv_scale, plan, *, pages, entry, logit_cap, window
):
    """Maps q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    _, tokens, heads, _ = q_latent.shape
    if by_slots(entry, tokens * heads):
        return decode_by_slots(
            q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, plan,
            pages=pages, entry=entry, logit_cap=logit_cap, window=window,
        )  # fmt: skip
    plan = plan_or_default(
        plan, buffer, block_tables, seq_lens, pages=pages, entry=entry, heads=heads, tokens=tokens, window=window
    )
    buffer, pages = in_entries_dtype(buffer, pages, entry.dtype)
    config = configuration(default_config(entry, tokens * heads))
    return _decode_mla(
        q_latent, q_pe, buffer, block_tables, layer, scale, kv_scale, plan,
        pages=pages, entry=entry, logit_cap=logit_cap, window=window, config=config,
        interpret=bool(interpreting.value),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window", "config", "interpret"))
def _decode_mla(
    q_latent, q_pe, buffer, block_tables, layer, scale, kv_scale, plan,
    *, pages, entry, logit_cap, window, config, interpret,
):  # fmt: skip
    batch, tokens, heads, latent = q_latent.shape
    rows = tokens * heads
    # TMA copies tiles of 8 rows.  It fills tiles past the last row with zeros, and does not store them.
    pad = ((0, 0), (0, -rows % 8), (0, 0))
    q_latent, q_pe = (
        jnp.pad(q.reshape(batch, rows, q.shape[-1]), pad) if q.shape[-1] else None for q in (q_latent, q_pe)
    )
    if isinstance(config, QuantisedSwapABConfig):
        scales = () if kv_scale is None else (jnp.reshape(kv_scale, (1,)),) * 2
        found = quantised_swap_ab.attend(
            (q_latent, q_pe), buffer, block_tables, layer, scale, scales, plan,
            tiles=tiles_of(entry, interpret=interpret), tokens=tokens, group=heads, pages=pages,
            logit_cap=logit_cap, window=window, config=config, interpret=interpret,
        )  # fmt: skip
    else:
        attend: Any = mla_dense_swap_ab.attend if isinstance(config, MLASwapABConfig) else mla_dense.attend
        if isinstance(config, QuantisedMLADenseConfig):
            attend = partial(mla_dense.attend, kv_scale=kv_scale)
        found = attend(
            q_latent, q_pe, buffer, block_tables, layer, scale, plan,
            tokens=tokens, heads=heads, pages=pages, logit_cap=logit_cap, window=window, config=config,
            interpret=interpret,
        )  # fmt: skip
    out, lse, split_out, split_lse, split_scale = found
    out, lse = combine(out, lse, split_out, split_lse, split_scale, plan, rows=rows, interpret=interpret)
    return out[:, :rows].reshape(batch, tokens, heads, latent), lse[:, :rows].reshape(batch, tokens, heads)


def decode_kv(
    q, buffer, block_tables, seq_lens, layer, scale, k_scale, v_scale, plan, *, pages, entry, logit_cap, window
):
    """Maps q [B, Q, Hq, D] to out [B, Q, Hq, Dv], float32 lse [B, Q, Hq]; query head i reads KV head i // (Hq / H)."""
    _, tokens, heads, _ = q.shape
    config = configuration(default_config(entry, tokens * heads // pages.num_heads))
    scales = () if k_scale is None else tuple(jnp.reshape(scale, (-1,)) for scale in (k_scale, v_scale))
    plan = plan_or_default(
        plan, buffer, block_tables, seq_lens, pages=pages, entry=entry, heads=heads, tokens=tokens, window=window
    )
    interpret = bool(interpreting.value)
    tiles = tiles_of(entry, interpret=interpret) if entry.quantised else None
    buffer, pages = in_entries_dtype(buffer, pages, entry.dtype if tiles is None else tiles.dtype)
    return _decode_kv(
        q, buffer, block_tables, layer, scale, scales, plan,
        pages=pages, entry=entry, tiles=tiles, logit_cap=logit_cap, window=window, config=config, interpret=interpret,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "entry", "tiles", "logit_cap", "window", "config", "interpret"))
def _decode_kv(
    q, buffer, block_tables, layer, scale, scales, plan,
    *, pages, entry, tiles, logit_cap, window, config, interpret,
):  # fmt: skip
    batch, tokens, query_heads, _ = q.shape
    heads, group = pages.num_heads, query_heads // pages.num_heads
    rows = tokens * group
    # TMA copies tiles of 8 rows, and clips them if an axis is shorter than a tile.
    padded = rows if rows <= 8 and tiles is None else rows + -rows % (8 if rows <= TILE else TILE)
    q = q.reshape(batch, tokens, heads, group, -1).swapaxes(1, 2).reshape(batch, heads, rows, -1)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    if tiles is not None:
        found = quantised_swap_ab.attend(
            (q.reshape(batch * heads, padded, -1),), buffer, block_tables, layer, scale, scales, plan,
            tiles=tiles, tokens=tokens, group=group, pages=pages,
            logit_cap=logit_cap, window=window, config=config, interpret=interpret,
        )  # fmt: skip
    else:
        found = gqa.attend(
            q, buffer, block_tables, layer, scale, plan,
            tokens=tokens, group=group, pages=pages, entry=entry, logit_cap=logit_cap, window=window, config=config,
            interpret=interpret,
        )  # fmt: skip
    out, lse, split_out, split_lse, split_scale = found
    by_row = heads * padded
    out, split_out = (x.reshape(-1, by_row, x.shape[-1]) for x in (out, split_out))
    lse, split_lse = (x.reshape(-1, by_row) for x in (lse, split_lse))
    split_scale = split_scale.reshape(-1, 1, by_row)
    out, lse = combine(out, lse, split_out, split_lse, split_scale, plan, rows=by_row, interpret=interpret)

    def by_token(x):
        x = x.reshape(batch, heads, padded, -1)[:, :, :rows].reshape(batch, heads, tokens, group, -1)
        return x.swapaxes(1, 2).reshape(batch, tokens, query_heads, -1)

    return by_token(out)[..., : entry.value_dim], by_token(lse)[..., 0]
