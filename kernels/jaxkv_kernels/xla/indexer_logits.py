"""Scores of the DeepSeek V3.2 indexer against every cached key."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.xla.paged import chunk_slots, chunk_tokens, live_lengths
from jaxkv_kernels.xla.split_page import read_split


@partial(jax.jit, static_argnames=("pages", "entry", "max_len"))
def indexer_logits(q, weights, buffer, block_tables, seq_lens, layer, *, pages, entry, max_len):
    """Q [B, Q, Hi, D], weights [B, Q, Hi] to float32 [B, Q, max_len].

    The sum over heads of relu(q . k) * w, times k's scale; -inf where a query token sees no key.
    """
    # e4m3 values are exact in bf16, so narrow products lose nothing.
    dtype = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    q = q.astype(dtype)
    batch, tokens = q.shape[:2]
    chunk = chunk_tokens(pages.block_size, block_tables)
    lengths = jnp.minimum(live_lengths(block_tables, seq_lens, pages.block_size), max_len)
    ends = seq_lens[:, None] - (tokens - 1) + jnp.arange(tokens, dtype=jnp.int32)

    def step(i, logits):
        positions, slots = chunk_slots(block_tables, i, chunk=chunk, block_size=pages.block_size)
        rows, valid = read_split(buffer, pages, entry, slots, layer)
        k, k_scale = entry.codec.split(rows, entry.sizes)
        s = jnp.einsum("bqhd,bsd->bqhs", q, k.astype(dtype), precision=precision, preferred_element_type=jnp.float32)
        s = (jax.nn.relu(s) * weights.astype(jnp.float32)[..., None]).sum(axis=2) * k_scale[:, None, :, 0]
        seen = valid[:, None] & (positions < ends[..., None])
        return lax.dynamic_update_slice_in_dim(logits, jnp.where(seen, s, -jnp.inf), i * chunk, axis=2)

    width = -(-max_len // chunk) * chunk
    logits = jnp.full((batch, tokens, width), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, -(-lengths.max() // chunk), step, logits)[..., :max_len]
