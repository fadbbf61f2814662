"""Dense MLA decode on sm_90.

Runs the schedule for the rows of a request (query tokens x heads) and the format of entries, and then the kernel that
combines splits.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import DecodeMLA
from jaxkv_kernels.mosaic_gpu.attention.combine import combine
from jaxkv_kernels.mosaic_gpu.attention.config import (
    FewRowsConfig,
    FewRowsQuantisedConfig,
    QuantisedWideConfig,
    by_slots,
)
from jaxkv_kernels.mosaic_gpu.attention.paging.token_rows import in_entries_dtype
from jaxkv_kernels.mosaic_gpu.attention.quantised.interpreted import InterpretedLatents
from jaxkv_kernels.mosaic_gpu.attention.quantised.latents import LatentTiles
from jaxkv_kernels.mosaic_gpu.attention.schedules.few_rows import attend_few_rows
from jaxkv_kernels.mosaic_gpu.attention.schedules.few_rows_quantised import attend_few_rows_quantised
from jaxkv_kernels.mosaic_gpu.attention.schedules.wide import attend_wide
from jaxkv_kernels.mosaic_gpu.mla_sparse import decode_by_slots
from jaxkv_kernels.mosaic_gpu.plan_decode import default_config, plan_or_default
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.tuning import configuration


def decode_mla(call: DecodeMLA) -> tuple[jax.Array, jax.Array]:
    """Maps q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    _, tokens, heads, _ = call.q_latent.shape
    entry, window = call.entry, call.window
    plan = plan_or_default(
        call.plan, call.buffer, call.block_tables, call.seq_lens,
        pages=call.pages, entry=entry, heads=heads, tokens=tokens, window=window,
    )  # fmt: skip
    if by_slots(entry, tokens * heads):
        return decode_by_slots(replace(call, plan=plan))
    buffer, pages = in_entries_dtype(call.buffer, call.pages, entry.dtype)
    config = configuration(default_config(entry, tokens * heads))
    return _decode(
        call.q_latent, call.q_pe, buffer, call.block_tables, call.layer, call.scale, call.kv_scale, plan,
        pages=pages, entry=entry, logit_cap=call.logit_cap, window=window, config=config,
        interpret=bool(interpreting.value),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window", "config", "interpret"))
def _decode(
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
    if isinstance(config, FewRowsQuantisedConfig):
        scales = () if kv_scale is None else (jnp.reshape(kv_scale, (1,)),) * 2
        found = attend_few_rows_quantised(
            (q_latent, q_pe), buffer, block_tables, layer, scale, scales, plan,
            tiles=(InterpretedLatents if interpret else LatentTiles)(entry), tokens=tokens, group=heads, pages=pages,
            logit_cap=logit_cap, window=window, config=config, interpret=interpret,
        )  # fmt: skip
    else:
        attend: Any = attend_few_rows if isinstance(config, FewRowsConfig) else attend_wide
        if isinstance(config, QuantisedWideConfig):
            attend = partial(attend_wide, kv_scale=kv_scale)
        found = attend(
            q_latent, q_pe, buffer, block_tables, layer, scale, plan,
            tokens=tokens, heads=heads, pages=pages, logit_cap=logit_cap, window=window, config=config,
            interpret=interpret,
        )  # fmt: skip
    out, lse, split_out, split_lse, split_scale = found
    out, lse = combine(out, lse, split_out, split_lse, split_scale, plan, rows=rows, interpret=interpret)
    return out[:, :rows].reshape(batch, tokens, heads, latent), lse[:, :rows].reshape(batch, tokens, heads)
