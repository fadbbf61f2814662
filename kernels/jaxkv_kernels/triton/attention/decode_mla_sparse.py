"""Absorbed attention over chosen slots of paged latents: every query token is a request, its slots are its table."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.triton.attention.attend_latents import attend_latents
from jaxkv_kernels.triton.attention.decode_tiles import latent_tiles, multiprocessors
from jaxkv_kernels.triton.attention.plan_decode import make_plan


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap"))
def decode_mla_sparse(q_latent, q_pe, buffer, slots, counts, sinks, layer, scale, kv_scale, *, pages, entry, logit_cap):
    """q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P], slots [B, Q, K] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    batch, tokens, heads, _ = q_latent.shape
    requests, size = batch * tokens, slots.shape[-1]
    tiles = latent_tiles(entry, heads, entry.dtype)
    options = dict(
        tiles=tiles, groups=tiles.groups(heads), tokens=1, window=None, longest=size, processors=multiprocessors()
    )
    if counts is None:
        with jax.ensure_compile_time_eval():
            lengths = jnp.full(requests, size, jnp.int32)
            plan = make_plan(lengths, **options)
            plan = replace(plan, items=plan.items[: int(plan.counts.sum())])  # known: nothing is left over
    else:
        lengths = counts.reshape(requests)
        plan = make_plan(lengths, **options)
    one_query, one_pe = (x.reshape(requests, 1, heads, -1) for x in (q_latent, q_pe))
    out, lse = attend_latents(
        one_query, one_pe, buffer, slots.reshape(requests, size), lengths, layer, scale, kv_scale, sinks, plan,
        pages=pages, entry=entry, logit_cap=logit_cap, table_block=1,
    )  # fmt: skip
    return out.reshape(q_latent.shape), lse.reshape(batch, tokens, heads)
