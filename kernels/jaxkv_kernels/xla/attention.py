"""Dense attention over the pages of each request, and merging the results of attention."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing import lengths_in_table, load_entries, scale_at, slots_for
from jaxkv_kernels.calls import DecodeCall, DecodeKV, DecodeMLA, MergeStates
from jaxkv_kernels.xla.paged import bytes_per_request, chunk_slots, chunk_tokens, chunks_seen, in_parts
from jaxkv_kernels.xla.softmax import attend
from jaxkv_kernels.xla.visible import Visible


class FewTokens(NamedTuple):
    """Tokens of requests at given positions, to which query tokens attend instead of to those that `call` shows."""

    positions: jax.Array
    """int32 [B, S]."""
    seen: jax.Array
    """bool [B, Q, S], whether each query token sees each."""


@jax.jit
def decode_mla(call: DecodeMLA, few: FewTokens | None = None) -> tuple[jax.Array, jax.Array]:
    """Absorbed attention: out [B, Q, Hq, V], in float32 if it is to `few` tokens, and lse [B, Q, Hq]."""

    def grouped(q_latent: jax.Array, q_pe: jax.Array) -> jax.Array:
        return jnp.concatenate([q_latent, q_pe], axis=-1)[:, :, None]

    width = sum(call.entry.sizes) + call.entry.value_dim
    return _attend_pages(call, (call.q_latent, call.q_pe), grouped, (call.kv_scale, call.kv_scale), width, few)


@jax.jit
def decode_kv(call: DecodeKV, few: FewTokens | None = None) -> tuple[jax.Array, jax.Array]:
    """Grouped-query attention: out [B, Q, Hq, Dv], in float32 if it is to `few` tokens, and lse [B, Q, Hq]."""
    kv_heads, scales = call.pages.num_heads, (call.k_scale, call.v_scale)
    dtype = jnp.float32 if call.entry.codec.in_float32 or any(map(per_token, scales)) else call.q.dtype

    def grouped(q: jax.Array) -> jax.Array:
        batch, tokens, heads, size = q.shape
        return q.astype(dtype).reshape(batch, tokens, kv_heads, heads // kv_heads, size)

    return _attend_pages(call, (call.q,), grouped, scales, kv_heads * sum(call.entry.sizes), few)


def per_token(scale: jax.Array | None) -> bool:
    """Whether there is a scale per token and head."""
    return scale is not None and scale.ndim > 1


def _attend_pages(
    call: DecodeCall,
    queries: tuple[jax.Array, ...],
    grouped: Callable[..., jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
    width: int,
    few: FewTokens | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries to the entries of each request.

    Args:
      call: the cache and its block tables, and the options of attention.
      queries: arrays [B, Q, Hq, ...].
      grouped: joins these to one array [B, Q, H, Hq / H, D], of the dtype of products.
      scales: those of keys and of values.  Scales per token multiply the entries, others the scores and the results.
      width: numbers per token of keys and values together.
      few: the tokens to attend to; None for those that `call` shows.
    """
    pages, entry = call.pages, call.entry
    by_token = [scale if per_token(scale) else None for scale in scales]
    k_scale, v_scale = (None if per_token(scale) else scale for scale in scales)
    chunk = chunk_tokens(pages.block_size, call.block_tables) if few is None else few.positions.shape[1]
    lengths = lengths_in_table(call.seq_lens, call.block_tables, pages.block_size)
    _, tokens, heads, _ = queries[0].shape

    def attend_requests(block_tables, lengths, trailing, tree, few, *queries):
        q = grouped(*queries)
        visible = Visible.of(call, lengths, tokens, trailing, tree)

        def load(i):
            if few is None:
                positions, slots = chunk_slots(block_tables, i, chunk=chunk, block_size=pages.block_size)
                seen = visible.of_keys(positions)
            else:
                slots, seen = slots_for(block_tables, few.positions, block_size=pages.block_size), few.seen
            rows, valid = load_entries(call.buffer, pages, entry, slots, call.layer)
            keys, values = entry.keys_and_values(rows, q.dtype, [scale_at(scale, slots) for scale in by_token])
            return keys, values, seen & valid[:, None]

        # Under a causal mask, the last query token of a request sees all its tokens.
        by_last = call.ahead == 0 and call.trailing is None and call.mask is None
        chunks = chunks_seen(visible.begins, visible.ends, lengths if by_last else visible.ends, chunk)
        first, last = chunks if few is None else (0, 1)
        out, lse, _ = attend(
            q,
            load,
            first,
            last,
            value_dim=entry.value_dim,
            scale=call.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            logit_cap=call.logit_cap,
        )
        rows = queries[0].shape[:-1]
        out = out.reshape(*rows, entry.value_dim)
        return out.astype(queries[0].dtype) if few is None else out, lse.reshape(rows)

    dtype = jax.eval_shape(grouped, *queries).dtype
    needed = bytes_per_request(chunk, width, tokens * heads, dtype)
    requests = call.block_tables, lengths, call.trailing, call.tree, few
    return in_parts(attend_requests, *requests, *queries, bytes_per_request=needed)


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
