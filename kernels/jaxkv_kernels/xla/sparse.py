"""Absorbed latent attention over selected slots, of one cache or of two."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.entry_rows import load_entries
from jaxkv_kernels.extra_slots import ExtraSlots
from jaxkv_kernels.xla.paged import CHUNK_TOKENS
from jaxkv_kernels.xla.softmax import attend, joined, with_sinks


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "batch_invariant"))
def decode_mla_sparse(
    q_latent, q_pe, buffer, slots, counts, sinks, layer, scale, kv_scale, extra: ExtraSlots | None = None,
    *, pages, entry, logit_cap, batch_invariant=False,
):  # fmt: skip
    """Attention of q_latent [B, Q, Hq, R] and q_pe [B, Q, Hq, P] to slots [B, Q, K].

    Returns out [B, Q, Hq, V] and float32 lse [B, Q, Hq].
    """
    del batch_invariant  # rejected
    batch, tokens, heads, _ = q_latent.shape
    # Every query token has its own keys, so each is computed as a request.
    q = jnp.concatenate([q_latent, q_pe], axis=-1).reshape(batch * tokens, 1, 1, heads, -1)
    sources = [ExtraSlots(buffer, slots, counts, layer, kv_scale, pages, entry)]
    if extra is not None:
        sources.append(extra)
    out, lse = joined([_attend(q, source, scale, logit_cap) for source in sources])
    out, lse = out.reshape(batch, tokens, heads, -1), lse.reshape(batch, tokens, heads)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return out.astype(q_latent.dtype), lse


def _attend(q, source: ExtraSlots, scale, logit_cap):
    """Attention of q [B * Q, 1, 1, Hq, R + P] to the slots of one cache: what `attend` returns."""
    slots, entry = source.slots, source.entry
    size = slots.shape[-1]
    if source.counts is not None:
        slots = jnp.where(jnp.arange(size, dtype=jnp.int32) < source.counts[..., None], slots, -1)
    chunk = min(size, CHUNK_TOKENS)
    chunks = -(-size // chunk)
    slots = jnp.pad(slots.reshape(-1, size), ((0, 0), (0, chunks * chunk - size)), constant_values=-1)

    def load(i):
        some = jax.lax.dynamic_slice_in_dim(slots, i * chunk, chunk, axis=1)
        rows, valid = load_entries(source.buffer, source.pages, entry, some, source.layer)
        return *entry.keys_and_values(rows, q.dtype), valid[:, None]

    return attend(
        q, load, 0, chunks, value_dim=entry.value_dim, scale=scale, k_scale=source.kv_scale, v_scale=source.kv_scale,
        logit_cap=logit_cap,
    )  # fmt: skip
