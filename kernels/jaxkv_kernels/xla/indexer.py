"""The V3.2 indexer: logits of all cached tokens, and top-k."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing import lengths_in_table, load_entries
from jaxkv_kernels.calls import IndexerLogits, SelectTopk
from jaxkv_kernels.formats.bits import FP8, from_ordered_bits, ordered_bits
from jaxkv_kernels.xla.paged import bytes_per_request, chunk_slots, chunk_tokens, in_parts, query_ends, walk


@jax.jit
def indexer_logits(call: IndexerLogits) -> jax.Array:
    """Logits, float32 [B, Q, max_len].

    A logit is the sum over heads of relu(q . k) * w, times the scale of k; -inf for keys that a query token does not
    see.
    """
    pages, entry, max_len = call.pages, call.entry, call.max_len
    dtype = jnp.bfloat16 if call.q.dtype == FP8 else call.q.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    tokens, heads, width = call.q.shape[1:]
    chunk = chunk_tokens(pages.block_size, call.block_tables)
    lengths = lengths_in_table(call.seq_lens, call.block_tables, pages.block_size)

    def score_requests(q, weights, block_tables, lengths):
        q, ends = q.astype(dtype), query_ends(lengths, tokens)

        def step(i, logits):
            positions, slots = chunk_slots(block_tables, i, chunk=chunk, block_size=pages.block_size)
            rows, valid = load_entries(call.buffer, pages, entry, slots, call.layer)
            # Without the barrier, XLA may fuse the gather into the product, and the order of its sums would depend on
            # the layout.
            rows = lax.optimization_barrier(rows[..., 0, :])
            k, k_scale = entry.key_and_scale(rows, dtype)
            s = jnp.einsum("bqhd,bsd->bqhs", q, k, precision=precision, preferred_element_type=jnp.float32)
            s = (jax.nn.relu(s) * weights.astype(jnp.float32)[..., None]).sum(axis=2) * k_scale[:, None, :, 0]
            seen = valid[:, None] & (positions < ends[..., None])
            return lax.dynamic_update_slice_in_dim(logits, jnp.where(seen, s, -jnp.inf), i * chunk, axis=2)

        padded = -(-max_len // chunk) * chunk
        logits = jnp.full((len(q), tokens, padded), -jnp.inf, jnp.float32)
        last = -(-jnp.minimum(lengths.max(), max_len) // chunk)
        return walk(0, last, step, logits)[..., :max_len]

    needed = bytes_per_request(chunk, width, tokens * heads, dtype)
    return in_parts(score_requests, call.q, call.weights, call.block_tables, lengths, bytes_per_request=needed)


@jax.jit
def select_topk(call: SelectTopk) -> jax.Array:
    """The positions of the largest logits, or their slots, in decreasing order; -1 in place of -inf.

    Among equal logits, the earlier position comes first.
    """
    logits, k = call.logits, call.k
    best = min(k, logits.shape[-1])
    # top_k orders values by their bits.  So -0 must become 0, because relu returns both, and they must count as equal;
    # and NaN of either sign the same NaN.  Only for float32, top_k is fast on CPUs.
    values, positions = lax.top_k(from_ordered_bits(ordered_bits(logits)), best)
    positions = jnp.where(values == -jnp.inf, -1, positions)
    return call.located(jnp.pad(positions, [(0, 0)] * (logits.ndim - 1) + [(0, k - best)], constant_values=-1))
