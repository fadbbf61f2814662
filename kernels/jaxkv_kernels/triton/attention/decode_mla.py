"""Absorbed attention over paged latents."""

from functools import partial

import jax

from jaxkv_kernels.triton.attention.attend_latents import attend_latents
from jaxkv_kernels.triton.attention.plan_decode import plan_or_default


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window"))
def decode_mla(
    q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, kv_scale, plan, *, pages, entry, logit_cap, window
):
    """Attention of q_latent [B, Q, Hq, R] and q_pe [B, Q, Hq, P]: out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    plan = plan_or_default(plan, q_latent, block_tables, seq_lens, pages=pages, entry=entry, window=window)
    return attend_latents(
        q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, kv_scale, None, plan,
        pages=pages, entry=entry, logit_cap=logit_cap, window=window, table_block=pages.block_size,
    )  # fmt: skip
