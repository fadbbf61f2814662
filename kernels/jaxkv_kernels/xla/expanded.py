"""Attention to keys and values per head that are arrays, not entries of a cache."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.xla.softmax import attend

SCORES_BYTES = 2**28
"""The bound on the bytes of the float32 scores that exist at once, unless those of `LEAST_KEYS` keys need more."""
LEAST_KEYS = 16


def attention(q, k, v, q_lens, kv_lens, *, scale: float, causal: bool) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, Q, H, D] to k [B, S, H, D] and v [B, S, H, V].

    Args:
      q: float queries.
      k: keys, the dtype of `q`.
      v: values, the dtype of `q`.
      q_lens: int32 [B]; the first `q_lens` queries of a request are tokens, the others see no key.
      kv_lens: int32 [B]; the first `kv_lens` keys of a request are tokens.
      scale: the softmax scale.
      causal: whether query t sees only keys 0 to t.

    Returns:
      out [B, Q, H, V] of q's dtype, and float32 lse [B, Q, H]; 0 and -inf for a query that sees no key.
    """
    batch, tokens, heads, _ = q.shape
    keys = k.shape[1]
    size = min(max(SCORES_BYTES // (4 * batch * tokens * heads), LEAST_KEYS), keys)
    query = jnp.arange(tokens, dtype=jnp.int32)
    ends = jnp.where(query < q_lens[:, None], kv_lens[:, None], 0)
    if causal:
        ends = jnp.minimum(ends, query + 1)

    def load(i):
        # The last chunk has the full size: it starts earlier, and the keys that it has in common with the chunk before
        # are masked.
        first = jnp.minimum(i * size, keys - size)
        key = first + jnp.arange(size, dtype=jnp.int32)
        seen = (key >= i * size) & (key < ends[..., None])
        chunk_k, chunk_v = (lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (k, v))
        return chunk_k, chunk_v, seen

    out, lse = attend(
        q[:, :, :, None], load, 0, -(-ends.max() // size), value_dim=v.shape[-1], scale=jnp.float32(scale),
        k_scale=None, v_scale=None, logit_cap=None,
    )  # fmt: skip
    return out[:, :, :, 0].astype(q.dtype), lse[:, :, :, 0]
