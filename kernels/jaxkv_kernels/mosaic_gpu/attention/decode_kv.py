"""Grouped-query and multi-head decode on sm_90: attention per KV head, then `combine` for splits."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.attention.combine import combine
from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.paging.token_rows import in_entries_dtype
from jaxkv_kernels.mosaic_gpu.attention.plan import default_config, plan_or_default
from jaxkv_kernels.mosaic_gpu.attention.quantised.heads import HeadTiles
from jaxkv_kernels.mosaic_gpu.attention.quantised.interpreted import (
    InterpretedHeads,
    InterpretedInt8,
    InterpretedNvfp4,
)
from jaxkv_kernels.mosaic_gpu.attention.quantised.rows import Int8Tiles, Nvfp4Tiles
from jaxkv_kernels.mosaic_gpu.attention.quantised.tiles import Tiles
from jaxkv_kernels.mosaic_gpu.attention.schedules.few_rows_quantised import attend_few_rows_quantised
from jaxkv_kernels.mosaic_gpu.attention.schedules.kv import attend_kv
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.tuning import configuration

TILES: dict[str, tuple[Callable[..., Tiles], Callable[..., Tiles]]] = {
    "fp8": (HeadTiles, InterpretedHeads),
    "int8": (Int8Tiles, InterpretedInt8),
    "nvfp4": (Nvfp4Tiles, InterpretedNvfp4),
}
"""Tiles of quantised entries by format: for the GPU, and for the interpreter."""


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
    tiles = TILES[entry.format][interpret](entry) if entry.quantised else None
    buffer, pages = in_entries_dtype(buffer, pages, entry.dtype if tiles is None else tiles.dtype)
    return _decode(
        q, buffer, block_tables, layer, scale, scales, plan,
        pages=pages, entry=entry, tiles=tiles, logit_cap=logit_cap, window=window, config=config, interpret=interpret,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "entry", "tiles", "logit_cap", "window", "config", "interpret"))
def _decode(
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
        found = attend_few_rows_quantised(
            (q.reshape(batch * heads, padded, -1),), buffer, block_tables, layer, scale, scales, plan,
            tiles=tiles, tokens=tokens, group=group, pages=pages,
            logit_cap=logit_cap, window=window, config=config, interpret=interpret,
        )  # fmt: skip
    else:
        found = attend_kv(
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
