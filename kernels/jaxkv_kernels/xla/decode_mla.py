"""Absorbed attention over paged latents: one KV head whose keys are (latent, rope) and whose values are the latents."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.slots import lengths_in_table
from jaxkv_kernels.xla.entry_rows import load_entries
from jaxkv_kernels.xla.paged import chunk_slots, chunk_tokens, query_ends
from jaxkv_kernels.xla.softmax import attend


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap"))
def decode_mla(
    q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, kv_scale, plan, *, pages, entry, logit_cap
):
    """q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    del plan
    chunk = chunk_tokens(pages.block_size, block_tables)
    lengths = lengths_in_table(seq_lens, block_tables, pages.block_size)
    q = jnp.concatenate([q_latent, q_pe], axis=-1)[:, :, None]
    ends = query_ends(lengths, q.shape[1])

    def load(i):
        positions, slots = chunk_slots(block_tables, i, chunk=chunk, block_size=pages.block_size)
        rows, valid = load_entries(buffer, pages, entry, slots, layer)
        latent, rope = entry.decode(rows, q.dtype)
        seen = valid[:, None] & (positions < ends[..., None])
        return jnp.concatenate([latent, rope], axis=-1), latent, seen

    last = -(-lengths.max() // chunk)
    out, lse = attend(
        q, load, 0, last, value_dim=entry.latent, scale=scale, k_scale=kv_scale, v_scale=kv_scale, logit_cap=logit_cap
    )
    return out[:, :, 0].astype(q_latent.dtype), lse[:, :, 0]
