"""Sparse MLA decode for latents of 512 and rotary parts of 64 values, in bf16, f16 or fp8_ds_mla, on sm_90.

To the plan, each query token is a request of its own, with `counts` slots.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.attention.combine import combine
from jaxkv_kernels.mosaic_gpu.attention.config import PAIR, TILE, SparseConfig
from jaxkv_kernels.mosaic_gpu.attention.gather.interpreted import InterpretedRows
from jaxkv_kernels.mosaic_gpu.attention.gather.rows import GatheredRows
from jaxkv_kernels.mosaic_gpu.attention.plan import make_plan
from jaxkv_kernels.mosaic_gpu.attention.schedules.slots import attend_slots
from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT
from jaxkv_kernels.tuning import configuration


def decode_mla_sparse(q_latent, q_pe, buffer, slots, counts, sinks, layer, scale, kv_scale, *, pages, entry, logit_cap):
    """q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P], slots [B, Q, K] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    del kv_scale
    return _decode(
        q_latent, q_pe, buffer, slots, counts, sinks, layer, scale,
        pages=pages, entry=entry, logit_cap=logit_cap, config=configuration(SparseConfig()),
        interpret=bool(interpreting.value),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "config", "interpret"))
def _decode(q_latent, q_pe, buffer, slots, counts, sinks, layer, scale, *, pages, entry, logit_cap, config, interpret):
    batch, tokens, heads, _ = q_latent.shape
    requests, size = batch * tokens, slots.shape[-1]
    slots = slots.reshape(requests, size)
    plan_of = partial(_plan, size=size, heads=heads, costs=config.split_costs, interpret=interpret)
    if counts is None:
        with jax.ensure_compile_time_eval():
            plan = plan_of(jnp.full(requests, size, jnp.int32))
    else:
        plan = plan_of(counts.reshape(requests))
    pad = ((0, 0), (0, -heads % 8), (0, 0))  # TMA tiles are of 8 rows
    q_latent, q_pe = (jnp.pad(q.reshape(requests, heads, -1), pad) for q in (q_latent, q_pe))
    if sinks is not None:
        sinks = jnp.pad(sinks, (0, -heads % TILE))
    # The interpreter does not run what sends keys to another CTA.
    shared = config.share and -(-heads // TILE) % 2 == 0 and not interpret
    rows = (InterpretedRows if interpret else GatheredRows)(pages, entry, buffer.dtype.itemsize, shared)
    out, lse, split_out, split_lse, split_scale = attend_slots(
        q_latent, q_pe, buffer, slots, sinks, layer, scale, plan,
        rows=rows, logit_cap=logit_cap, config=config, interpret=interpret,
    )  # fmt: skip
    out, lse = combine(out, lse, split_out, split_lse, split_scale, plan, rows=heads, interpret=interpret, sinks=sinks)
    return out[:, :heads].reshape(batch, tokens, heads, LATENT), lse[:, :heads].reshape(batch, tokens, heads)


def _plan(lengths, *, size: int, heads: int, costs, interpret: bool):
    """The schedule of requests of `lengths` [N], at most `size` slots each."""
    partitions = 4 if interpret else max(MULTIPROCESSORS // -(-heads // TILE), 1)
    # Slots are masked by the kernel: to the plan, a request has one block, which is the cache's.
    table = jnp.zeros((lengths.size, 1), jnp.int32)
    return make_plan(
        lengths, table, partitions=partitions, tokens=1, block_size=size, num_blocks=1, step=PAIR, costs=costs
    )
