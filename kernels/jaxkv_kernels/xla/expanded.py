"""Attention to keys and values per head that are arrays, not entries of a cache."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.xla.softmax import attend

SCORES_BYTES = 2**28
"""The bound on the bytes of the float32 scores that exist at once, unless those of `LEAST_KEYS` keys need more."""
LEAST_KEYS = 16


def attention(
    q, k, v, q_lens, kv_lens, *, scale: float, ahead: int | None, window: int | None = None, offset=None,
    logit_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attention of q [B, Q, Hq, D] to k [B, S, H, D] and v [B, S, H, V], Hq a multiple of H.

    Args:
      q: float queries.
      k: keys, the dtype of `q`.
      v: values, the dtype of `q`.
      q_lens: int32 [B]; the first `q_lens` queries of a request are tokens, the others see no key.
      kv_lens: int32 [B]; the first `kv_lens` keys of a request are tokens.
      scale: the softmax scale.
      ahead: how many keys after its own a query sees: 0 under a causal mask, None for all.
      window: how many keys up to its own, this one included, a query sees; None for all.
      offset: int32 [B], the position of the first query among the keys, which may be negative; default 0.
      logit_cap: as in `decode_mla`.

    Returns:
      out [B, Q, Hq, V] of q's dtype, and float32 lse [B, Q, Hq]; 0 and -inf for a query that sees no key.
    """
    query = jnp.arange(q.shape[1], dtype=jnp.int32)
    ends = jnp.where(query < q_lens[:, None], kv_lens[:, None], 0)
    position = query if offset is None else offset[:, None] + query
    return _attention(q, k, v, *_seen(position, ends, window, ahead), scale, logit_cap)


def ragged_attention(
    q, k, v, q_starts, q_lens, kv_starts, kv_lens, *, scale: float, ahead: int | None, window: int | None = None,
    offset=None, logit_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attention of q [T, Hq, D] to k [S, H, D] and v [S, H, V], in which requests follow one another.

    All queries are compared with all keys, also with those of other requests.

    Args:
      q: float queries, Hq a multiple of H.
      k: keys, the dtype of `q`.
      v: values, the dtype of `q`.
      q_starts: int32 [B], the first query of each request, in order.
      q_lens: int32 [B], the valid query tokens per request.  Queries between them see no key.
      kv_starts: int32 [B], the first key of each request.
      kv_lens: int32 [B], the valid keys per request.
      scale: the softmax scale.
      ahead: how many keys of its request after its own a query sees, as in `attention`.
      window: how many keys up to its own a query sees.
      offset: int32 [B], the position of the first query of a request among its keys; default 0.
      logit_cap: as in `decode_mla`.

    Returns:
      out [T, Hq, V] of q's dtype, and float32 lse [T, Hq]; 0 and -inf for a query that sees no key.
    """
    request, token = owners(q_starts, q_lens, len(q))
    ends = jnp.where(token >= 0, kv_lens[request], 0)
    position = token if offset is None else offset[request] + token
    first, ends = (kv_starts[request] + x for x in _seen(position, ends, window, ahead))
    out, lse = _attention(q[None], k[None], v[None], first[None], ends[None], scale, logit_cap)
    return out[0], lse[0]


def _seen(position, ends, window: int | None, ahead: int | None) -> tuple[jax.Array, jax.Array]:
    """The first key that the query at each `position` sees, and the end of those; no sum overflows.

    `ends` is the number of keys that are tokens, for each query.
    """
    if ahead is not None:
        ends = jnp.minimum(position + 1, ends - ahead) + ahead
    if window is None:
        return jnp.zeros_like(ends), ends
    return jnp.broadcast_to(jnp.maximum(position, window - 1) - (window - 1), ends.shape), ends


def owners(starts, lens, rows: int) -> tuple[jax.Array, jax.Array]:
    """The request of each of `rows` rows, and its token there, both int32 [rows]; token -1 for rows between requests.

    Args:
      starts: int32 [B], the first row of each request, in order.
      lens: int32 [B], the rows of each request.
      rows: how many rows.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    request = jnp.minimum((starts + lens <= row[:, None]).sum(axis=1, dtype=jnp.int32), len(starts) - 1)
    token = row - starts[request]
    return request, jnp.where((token >= 0) & (token < lens[request]), token, -1)


def _attention(q, k, v, first, ends, scale: float, logit_cap: float | None) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, Q, Hq, D] in which each query sees the keys from `first` to `ends` [B, Q]."""
    batch, tokens, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    size = min(max(SCORES_BYTES // (4 * batch * tokens * heads), LEAST_KEYS), keys)

    def load(i):
        # The last chunk has the full size: it starts earlier, and the keys that it has in common with the chunk before
        # are masked.
        start = jnp.minimum(i * size, keys - size)
        key = start + jnp.arange(size, dtype=jnp.int32)
        seen = (key >= i * size) & (key >= first[..., None]) & (key < ends[..., None])
        chunk_k, chunk_v = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (k, v))
        return chunk_k, chunk_v, seen

    grouped = q.reshape(batch, tokens, kv_heads, -1, q.shape[-1])
    out, lse, _ = attend(
        grouped, load, 0, -(-ends.max() // size), value_dim=v.shape[-1], scale=jnp.float32(scale),
        k_scale=None, v_scale=None, logit_cap=logit_cap,
    )  # fmt: skip
    return out.astype(q.dtype).reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
