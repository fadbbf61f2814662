"""Absorbed latent attention over selected slots."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.entry_rows import load_entries
from jaxkv_kernels.xla.paged import CHUNK_TOKENS
from jaxkv_kernels.xla.softmax import attend, with_sinks


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "batch_invariant"))
def decode_mla_sparse(
    q_latent, q_pe, buffer, slots, counts, sinks, layer, scale, kv_scale, *, pages, entry, logit_cap,
    batch_invariant=False,
):  # fmt: skip
    """Attention of q_latent [B, Q, Hq, R] and q_pe [B, Q, Hq, P] to slots [B, Q, K].

    Returns out [B, Q, Hq, R] and float32 lse [B, Q, Hq].
    """
    del batch_invariant  # rejected
    batch, tokens, heads, _ = q_latent.shape
    # Every query token has its own keys, so each is computed as a request.
    q = jnp.concatenate([q_latent, q_pe], axis=-1).reshape(batch * tokens, 1, 1, heads, -1)
    size = slots.shape[-1]
    if counts is not None:
        slots = jnp.where(jnp.arange(size, dtype=jnp.int32) < counts[..., None], slots, -1)
    chunk = min(size, CHUNK_TOKENS)
    chunks = -(-size // chunk)
    slots = jnp.pad(slots.reshape(-1, size), ((0, 0), (0, chunks * chunk - size)), constant_values=-1)

    def load(i):
        some = jax.lax.dynamic_slice_in_dim(slots, i * chunk, chunk, axis=1)
        rows, valid = load_entries(buffer, pages, entry, some, layer)
        latent, rope = entry.decode(rows, q.dtype)
        return jnp.concatenate([latent, rope], axis=-1), latent, valid[:, None]

    out, lse = attend(
        q, load, 0, chunks, value_dim=entry.latent, scale=scale, k_scale=kv_scale, v_scale=kv_scale, logit_cap=logit_cap
    )
    out, lse = out.reshape(q_latent.shape), lse.reshape(batch, tokens, heads)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return out.astype(q_latent.dtype), lse
