"""Absorbed attention over selected slots of paged latents.

Every query token is computed as a request of its own.  Its block table is its list of slots, as blocks of one token.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.triton.attention.attend_latents import attend_latents
from jaxkv_kernels.triton.attention.config import latent_config
from jaxkv_kernels.triton.attention.plan_decode import make_plan, multiprocessors


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "batch_invariant"))
def decode_mla_sparse(
    q_latent, q_pe, buffer, slots, counts, sinks, layer, scale, kv_scale, extra=None,
    *, pages, entry, logit_cap, batch_invariant=False,
):  # fmt: skip
    """Attention of q_latent [B, Q, Hq, R] and q_pe [B, Q, Hq, P] to slots [B, Q, K].

    Returns out [B, Q, Hq, R] and float32 lse [B, Q, Hq].
    """
    del extra, batch_invariant  # rejected
    batch, q_len, heads, _ = q_latent.shape
    requests, size = batch * q_len, slots.shape[-1]
    config = latent_config(entry, heads, entry.dtype)
    options = dict(
        config=config, row_tiles=config.row_tiles(heads), q_len=1, window=None, longest=size, sms=multiprocessors()
    )
    if counts is None:
        # All lengths are known at trace time, and therefore also the number of work tiles.
        with jax.ensure_compile_time_eval():
            lengths = jnp.full(requests, size, jnp.int32)
            plan = make_plan(lengths, **options)
            plan = replace(plan, work_tiles=plan.work_tiles[: int(plan.tiles_per_request.sum())])
    else:
        lengths = counts.reshape(requests)
        plan = make_plan(lengths, **options)
    one_query, one_pe = (x.reshape(requests, 1, heads, -1) for x in (q_latent, q_pe))
    out, lse = attend_latents(
        one_query, one_pe, buffer, slots.reshape(requests, size), lengths, layer, scale, kv_scale, sinks, plan,
        pages=pages, entry=entry, logit_cap=logit_cap, window=None, table_block=1,
    )  # fmt: skip
    return out.reshape(q_latent.shape), lse.reshape(batch, q_len, heads)
