"""Dense attention over the pages of each request."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import lengths_in_table, load_entries
from jaxkv_kernels.xla.paged import (
    bytes_per_request,
    chunk_slots,
    chunk_tokens,
    chunks_seen,
    in_parts,
    query_ranges,
)
from jaxkv_kernels.xla.softmax import attend


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window"))
def decode_mla(
    q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, kv_scale, plan, *, pages, entry, logit_cap, window
):
    """Attention of q_latent [B, Q, Hq, R] and q_pe [B, Q, Hq, P]: out [B, Q, Hq, V] and float32 lse [B, Q, Hq]."""
    del plan
    chunk = chunk_tokens(pages.block_size, block_tables)
    lengths = lengths_in_table(seq_lens, block_tables, pages.block_size)

    def attend_requests(q_latent, q_pe, block_tables, lengths):
        q = jnp.concatenate([q_latent, q_pe], axis=-1)[:, :, None]
        begins, ends = query_ranges(lengths, q.shape[1], window)

        def load(i):
            positions, slots = chunk_slots(block_tables, i, chunk=chunk, block_size=pages.block_size)
            rows, valid = load_entries(buffer, pages, entry, slots, layer)
            keys, values = entry.keys_and_values(rows, q.dtype)
            seen = valid[:, None] & (positions < ends[..., None]) & (positions >= begins[..., None])
            return keys, values, seen

        first, last = chunks_seen(begins, ends, lengths, chunk)
        out, lse = attend(
            q,
            load,
            first,
            last,
            value_dim=entry.value_dim,
            scale=scale,
            k_scale=kv_scale,
            v_scale=kv_scale,
            logit_cap=logit_cap,
        )
        return out[:, :, 0].astype(q_latent.dtype), lse[:, :, 0]

    _, tokens, heads, _ = q_latent.shape
    needed = bytes_per_request(chunk, sum(entry.sizes) + entry.value_dim, tokens * heads, q_latent.dtype)
    return in_parts(attend_requests, q_latent, q_pe, block_tables, lengths, bytes_per_request=needed)


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window"))
def decode_kv(
    q, buffer, block_tables, seq_lens, layer, scale, k_scale, v_scale, plan, *, pages, entry, logit_cap, window
):
    """Attention of queries q [B, Q, Hq, D]: out [B, Q, Hq, Dv] and float32 lse [B, Q, Hq].

    Query head i reads KV head i // (Hq / H).
    """
    del plan
    chunk = chunk_tokens(pages.block_size, block_tables)
    lengths = lengths_in_table(seq_lens, block_tables, pages.block_size)
    _, tokens, heads, _ = q.shape
    dtype = jnp.dtype(jnp.float32) if entry.codec.in_float32 else q.dtype

    def attend_requests(q, block_tables, lengths):
        grouped = q.astype(dtype).reshape(len(q), tokens, pages.num_heads, heads // pages.num_heads, -1)
        begins, ends = query_ranges(lengths, tokens, window)

        def load(i):
            positions, slots = chunk_slots(block_tables, i, chunk=chunk, block_size=pages.block_size)
            rows, valid = load_entries(buffer, pages, entry, slots, layer)
            k, v = entry.decode(rows, dtype)
            seen = valid[:, None] & (positions < ends[..., None]) & (positions >= begins[..., None])
            return k, v, seen

        first, last = chunks_seen(begins, ends, lengths, chunk)
        out, lse = attend(
            grouped,
            load,
            first,
            last,
            value_dim=entry.value_dim,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
            logit_cap=logit_cap,
        )
        return out.reshape(*q.shape[:-1], entry.value_dim).astype(q.dtype), lse.reshape(q.shape[:-1])

    needed = bytes_per_request(chunk, pages.num_heads * sum(entry.sizes), tokens * heads, dtype)
    return in_parts(attend_requests, q, block_tables, lengths, bytes_per_request=needed)
