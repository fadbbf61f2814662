"""Calls on one chunk of query tokens at a time, if all query tokens together would need too much memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.scores import CHUNK_TOKENS

LOGITS_BYTES = 2**28
"""The default bound on the bytes of a chunk's logits: negligible beside a cache, and enough for 2,048 query tokens x
32,768 cached tokens."""
ALIGNED = 8
"""Chunks of this many query tokens or more are multiples of it, because kernels process query tokens in groups."""


def logits_bytes_of_a_token(weights, max_len: int) -> int:
    """Bytes per query token, of all requests, of the largest array that scoring makes; `weights` are [B, Q, Hi].

    The array is either the logits, or the scores per head of the `CHUNK_TOKENS` keys that `xla` processes at a time.
    """
    requests, _, heads = weights.shape
    return 4 * requests * max(max_len, heads * CHUNK_TOKENS)


def in_query_chunks(
    select: Callable[..., jax.Array], q, weights, lengths, *, token_bytes: int, most_bytes: int
) -> jax.Array:
    """`select(q, weights, lengths)`, int32 [B, Q, K], computed for as many query tokens at a time as memory allows.

    Args:
      select: a function of queries [B, C, Hi, D], weights [B, C, Hi] and lengths [B]; the queries are those of the last
        C tokens of each request.
      q: [B, Q, Hi, D].
      weights: [B, Q, Hi].
      lengths: int32 [B], clamped to the capacity of the block tables.
      token_bytes: bytes of temporary memory per query token.
      most_bytes: bound on the temporary memory of a chunk, which has at least one query token.
    """
    tokens = q.shape[1]
    most = max(most_bytes // token_bytes, 1)
    if most >= tokens:
        return select(q, weights, lengths)
    most = most // ALIGNED * ALIGNED or most
    chunks = -(-tokens // most)
    size = min(most, -(-tokens // chunks // ALIGNED) * ALIGNED)
    chunks = -(-tokens // size)

    def one(first):
        parts = (lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (q, weights))
        # Where a request has no token in the chunk, the difference may be negative, but negative lengths are invalid.
        return select(*parts, jnp.maximum(lengths - (tokens - size - first), 0))

    # The last chunk has the full size: it starts earlier, and its first `overlap` tokens are computed twice.
    overlap = chunks * size - tokens
    firsts = jnp.minimum(jnp.arange(chunks, dtype=jnp.int32) * size, tokens - size)
    found = lax.map(one, firsts)
    whole = jnp.moveaxis(found[:-1], 0, 1)
    whole = whole.reshape(whole.shape[0], (chunks - 1) * size, *whole.shape[3:])
    return jnp.concatenate([whole, found[-1][:, overlap:]], axis=1)
