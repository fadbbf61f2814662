"""Dense attention over the pages of each request, and merging the results of attention."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing import lengths_in_table, load_entries
from jaxkv_kernels.calls import DecodeCall, DecodeKV, DecodeMLA, MergeStates
from jaxkv_kernels.xla.paged import bytes_per_request, chunk_slots, chunk_tokens, chunks_seen, in_parts, query_ranges
from jaxkv_kernels.xla.softmax import attend


@jax.jit
def decode_mla(call: DecodeMLA) -> tuple[jax.Array, jax.Array]:
    """Absorbed attention: out [B, Q, Hq, V] and lse [B, Q, Hq]."""

    def grouped(q_latent: jax.Array, q_pe: jax.Array) -> jax.Array:
        return jnp.concatenate([q_latent, q_pe], axis=-1)[:, :, None]

    width = sum(call.entry.sizes) + call.entry.value_dim
    return _attend_pages(call, (call.q_latent, call.q_pe), grouped, (call.kv_scale, call.kv_scale), width)


@jax.jit
def decode_kv(call: DecodeKV) -> tuple[jax.Array, jax.Array]:
    """Grouped-query attention: out [B, Q, Hq, Dv] and lse [B, Q, Hq]."""
    kv_heads = call.pages.num_heads
    dtype = jnp.float32 if call.entry.codec.in_float32 else call.q.dtype

    def grouped(q: jax.Array) -> jax.Array:
        batch, tokens, heads, size = q.shape
        return q.astype(dtype).reshape(batch, tokens, kv_heads, heads // kv_heads, size)

    return _attend_pages(call, (call.q,), grouped, (call.k_scale, call.v_scale), kv_heads * sum(call.entry.sizes))


def _attend_pages(
    call: DecodeCall,
    queries: tuple[jax.Array, ...],
    grouped: Callable[..., jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries to the entries of each request.

    Args:
      call: the cache and its block tables, and the options of attention.
      queries: arrays [B, Q, Hq, ...].
      grouped: joins these to one array [B, Q, H, Hq / H, D], of the dtype of products.
      scales: those of keys and of values.
      width: numbers per token of keys and values together.
    """
    pages, entry = call.pages, call.entry
    chunk = chunk_tokens(pages.block_size, call.block_tables)
    lengths = lengths_in_table(call.seq_lens, call.block_tables, pages.block_size)
    _, tokens, heads, _ = queries[0].shape

    def attend_requests(block_tables, lengths, trailing, *queries):
        q = grouped(*queries)
        begins, ends = query_ranges(lengths, tokens, call.window, call.ahead, trailing)

        def load(i):
            positions, slots = chunk_slots(block_tables, i, chunk=chunk, block_size=pages.block_size)
            rows, valid = load_entries(call.buffer, pages, entry, slots, call.layer)
            keys, values = entry.keys_and_values(rows, q.dtype)
            seen = valid[:, None] & (positions < ends[..., None]) & (positions >= begins[..., None])
            return keys, values, seen

        # Under a causal mask, the last query token of a request sees all its tokens.
        first, last = chunks_seen(begins, ends, lengths if call.ahead == 0 and call.trailing is None else ends, chunk)
        out, lse = attend(
            q,
            load,
            first,
            last,
            value_dim=entry.value_dim,
            scale=call.scale,
            k_scale=scales[0],
            v_scale=scales[1],
            logit_cap=call.logit_cap,
        )
        rows = queries[0].shape[:-1]
        return out.reshape(*rows, entry.value_dim).astype(queries[0].dtype), lse.reshape(rows)

    dtype = jax.eval_shape(grouped, *queries).dtype
    needed = bytes_per_request(chunk, width, tokens * heads, dtype)
    return in_parts(attend_requests, call.block_tables, lengths, call.trailing, *queries, bytes_per_request=needed)


@jax.jit
def merge_states(call: MergeStates) -> tuple[jax.Array, jax.Array]:
    """The results of attention over disjoint sets of keys, for the same queries, as one: out [..., D] and lse [...]."""
    outs = call.outs
    # Some kernels return +inf or NaN for a part without keys.  Replace it by -inf, so that the part has no weight,
    # whatever it holds.
    lses = jnp.where(call.lses < jnp.inf, call.lses.astype(jnp.float32), -jnp.inf)
    # The maximum cancels out of the result, so its gradient is 0.
    top = lax.stop_gradient(lses).max(axis=0)
    empty = top == -jnp.inf
    weights = jnp.exp(lses - jnp.where(empty, 0, top))
    # Mask before the product, because 0 * NaN is NaN, also in the gradient of the weights.
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0)
    total, merged = weights.sum(axis=0), (parts * weights[..., None]).sum(axis=0)
    merged = merged / jnp.where(empty, 1, total)[..., None]
    return merged.astype(outs.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
