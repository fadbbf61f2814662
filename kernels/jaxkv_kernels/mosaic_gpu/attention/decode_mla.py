"""Dense MLA decode for latents of 512 and rotary parts of 64 values, in bf16 or f16, on sm_90.

Two attention kernels, by the rows of a request (query tokens x heads), and one that combines the pieces of requests
that the plan has cut.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.mosaic_gpu.attention.attend_few_rows import attend_few_rows
from jaxkv_kernels.mosaic_gpu.attention.attend_rows import attend_rows
from jaxkv_kernels.mosaic_gpu.attention.attending import PIECES
from jaxkv_kernels.mosaic_gpu.attention.combine import combine
from jaxkv_kernels.mosaic_gpu.attention.plan_decode import plan_decode
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.unsupported import FEW_ROWS, LATENT


def decode_mla(
    q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, kv_scale, plan, *, pages, entry, logit_cap
):
    """q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    del kv_scale
    if plan is None:
        _, tokens, heads, _ = q_latent.shape
        plan = plan_decode(
            buffer, block_tables, seq_lens,
            pages=pages, entry=entry, heads=heads, tokens=tokens, window=None, batch_invariant=False,
        )  # fmt: skip
    return _decode(
        q_latent, q_pe, buffer, block_tables, layer, scale, plan,
        pages=pages, logit_cap=logit_cap, interpret=bool(interpreting.value),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "logit_cap", "interpret"))
def _decode(q_latent, q_pe, buffer, block_tables, layer, scale, plan, *, pages, logit_cap, interpret):
    batch, tokens, heads, _ = q_latent.shape
    rows = tokens * heads
    # TMA tiles are of 8 rows; whole tiles past the last row it fills with zeros and clips by itself.
    pad = ((0, 0), (0, -rows % 8), (0, 0))
    q_latent, q_pe = (jnp.pad(q.reshape(batch, rows, -1), pad) for q in (q_latent, q_pe))
    attend = attend_few_rows if rows <= FEW_ROWS else attend_rows
    out, lse, part_out, part_lse, part_scale = attend(
        q_latent, q_pe, buffer, block_tables, layer, scale, plan,
        tokens=tokens, heads=heads, pages=pages, logit_cap=logit_cap, interpret=interpret,
    )  # fmt: skip
    part_out = lax.bitcast_convert_type(part_out, PIECES)
    out, lse = combine(out, lse, part_out, part_lse, part_scale, plan, rows=rows, interpret=interpret)
    return out[:, :rows].reshape(batch, tokens, heads, LATENT), lse[:, :rows].reshape(batch, tokens, heads)
