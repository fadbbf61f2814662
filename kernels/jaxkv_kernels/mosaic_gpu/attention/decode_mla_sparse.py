"""Sparse MLA decode for latents of 512 or 448 and rotary parts of 64 values, on sm_90.

To the plan, each query token is a request of its own, with `counts` slots.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.extra_slots import ExtraSlots
from jaxkv_kernels.mosaic_gpu.attention.combine import combine
from jaxkv_kernels.mosaic_gpu.attention.config import PAIR, TILE, SparseConfig, sparse_config
from jaxkv_kernels.mosaic_gpu.attention.gather.interpreted import InterpretedJoined, InterpretedRows
from jaxkv_kernels.mosaic_gpu.attention.gather.joined import JoinedRows
from jaxkv_kernels.mosaic_gpu.attention.gather.rows import GatheredRows
from jaxkv_kernels.mosaic_gpu.attention.plan import Plan
from jaxkv_kernels.mosaic_gpu.attention.planning.slots import plan_slots
from jaxkv_kernels.mosaic_gpu.attention.schedules.slots import attend_slots
from jaxkv_kernels.mosaic_gpu.runtime.device import MULTIPROCESSORS, interpreting
from jaxkv_kernels.tuning import configuration


def decode_mla_sparse(
    q_latent, q_pe, buffer, slots, counts, sinks, layer, scale, kv_scale, extra=None,
    *, pages, entry, logit_cap, batch_invariant=False,
):  # fmt: skip
    """Attention of q_latent [B, Q, Hq, R] and q_pe [B, Q, Hq, P] to slots [B, Q, K].

    Returns out [B, Q, Hq, R] and float32 lse [B, Q, Hq].
    """
    batch, tokens, heads, _ = q_latent.shape
    size, lengths = slots.shape[-1], counts
    if extra is not None:
        size, lengths = _both(slots, counts, extra)
    costs = config_of(entry, queries=batch * tokens, size=size, heads=heads).split_costs
    plan_of = partial(
        plan_slots, size=size, heads=heads, costs=costs,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if lengths is None:
        with jax.ensure_compile_time_eval():
            plan = plan_of(jnp.full(batch * tokens, size, jnp.int32))
            plan = replace(plan, whole=not bool((plan.split_requests[:, 0] >= 0).any()))
    else:
        plan = plan_of(lengths.reshape(-1), by_kernel=not interpreting.value)
    return decode_slots(
        q_latent, q_pe, buffer, slots, sinks, layer, scale, kv_scale, plan, counts, extra,
        pages=pages, entry=entry, logit_cap=logit_cap,
    )  # fmt: skip


def _both(slots, counts, extra: ExtraSlots) -> tuple[int, Any]:
    """The size of a list of the slots of both caches, and the lengths [B, Q] of such lists, or None if all are `size`.

    In such a list, the slots of the first cache take whole pairs of tiles, whether they are used or not.
    """
    size, second = slots.shape[-1], extra.slots.shape[-1]
    first = -(-size // PAIR) * PAIR
    if extra.counts is None:
        return first + second, None
    counts = size if counts is None else jnp.minimum(counts, size)
    return first + second, jnp.where(extra.counts > 0, first + jnp.minimum(extra.counts, second), counts)


def config_of(entry, *, queries: int, size: int, heads: int) -> SparseConfig:
    """The configuration of a call whose `queries` query tokens have up to `size` slots: the user's, or the default."""
    tiles = queries * -(-size // TILE) * -(-heads // TILE)
    return configuration(sparse_config(entry.format, tiles // MULTIPROCESSORS))


def decode_slots(
    q_latent, q_pe, buffer, slots, sinks, layer, scale, kv_scale, plan: Plan, counts=None,
    extra: ExtraSlots | None = None, *, pages, entry, logit_cap,
):  # fmt: skip
    """`decode_mla_sparse` with a plan, in which each query token is a request."""
    batch, tokens, size = slots.shape
    if extra is not None:
        size, _ = _both(slots, counts, extra)
    config = config_of(entry, queries=batch * tokens, size=size, heads=q_latent.shape[2])
    return _decode(
        q_latent, q_pe, buffer, slots, sinks, layer, scale, kv_scale, plan, counts, extra,
        pages=pages, entry=entry, logit_cap=logit_cap, config=config, interpret=bool(interpreting.value),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "config", "interpret"))
def _decode(
    q_latent, q_pe, buffer, slots, sinks, layer, scale, kv_scale, plan, counts, extra,
    *, pages, entry, logit_cap, config, interpret,
):  # fmt: skip
    batch, tokens, heads, _ = q_latent.shape
    requests = batch * tokens
    slots = slots.reshape(requests, slots.shape[-1])
    pad = ((0, 0), (0, -heads % 8), (0, 0))  # TMA tiles are of 8 rows
    q_latent, q_pe = (jnp.pad(q.reshape(requests, heads, -1), pad) for q in (q_latent, q_pe))
    if sinks is not None:
        sinks = jnp.pad(sinks, (0, -heads % TILE))
    rows: Any = (InterpretedRows if interpret else GatheredRows)(pages, entry, buffer.dtype.itemsize)
    if entry.codec.rope_in_values:
        sources = [rows]
        if extra is not None:
            sources.append(GatheredRows(extra.pages, extra.entry, extra.buffer.dtype.itemsize))
        first_tiles = 2 * -(-slots.shape[-1] // PAIR)
        rows = (InterpretedJoined if interpret else JoinedRows)(tuple(sources), first_tiles)
    if extra is None:
        counts = None  # the plan knows them
    else:
        extra = replace(extra, slots=extra.slots.reshape(requests, -1))
    out, lse, split_out, split_lse, split_scale = attend_slots(
        q_latent, q_pe, buffer, slots, sinks, layer, scale, kv_scale, plan, extra,
        counts=None if counts is None else counts.reshape(-1), rows=rows, logit_cap=logit_cap, config=config,
        interpret=interpret,
    )  # fmt: skip
    if not plan.whole:
        out, lse = combine(
            out, lse, split_out, split_lse, split_scale, plan, rows=heads, interpret=interpret, sinks=sinks
        )
    return out[:, :heads].reshape(batch, tokens, heads, -1), lse[:, :heads].reshape(batch, tokens, heads)
