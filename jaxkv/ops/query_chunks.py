"""Calls on a few query tokens at a time, whose temporary memory would be too large for all of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.xla.paged import CHUNK_TOKENS

LOGITS_BYTES = 2**28
"""The default bound of the temporary arrays of a chunk: few enough to be negligible beside a cache, and enough for
2,048 query tokens x 32,768 cached ones."""
ALIGNED = 8
"""Chunks are multiples of this many query tokens, which kernels process in groups."""


def logits_bytes_of_a_token(weights, max_len: int) -> int:
    """Bytes per query token, of all requests, of the largest array that scoring makes; `weights` are [B, Q, Hi].

    This is the logits, or the scores of all heads of `CHUNK_TOKENS` keys, which `xla` computes at a time.
    """
    requests, _, heads = weights.shape
    return 4 * requests * max(max_len, heads * CHUNK_TOKENS)


def in_query_chunks(
    select: Callable[..., jax.Array], q, weights, lengths, *, token_bytes: int, most_bytes: int
) -> jax.Array:
    """`select(q, weights, lengths)`, int32 [B, Q, K], computed for as many query tokens at a time as memory allows.

    Args:
      select: a function of queries [B, C, Hi, D], weights [B, C, Hi] and the tokens [B] of each request, whose last C
        are those of the queries.
      q: [B, Q, Hi, D].
      weights: [B, Q, Hi].
      lengths: int32 [B], clamped to the capacity of the block tables.
      token_bytes: bytes of temporary memory per query token.
      most_bytes: the bound; a chunk has at least one query token.
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
        # Below 0 where a request has no token in the chunk; such lengths are valid only if they are 0.
        return select(*parts, jnp.maximum(lengths - (tokens - size - first), 0))

    # The last chunk begins early enough to be whole.
    overlap = chunks * size - tokens
    firsts = jnp.minimum(jnp.arange(chunks, dtype=jnp.int32) * size, tokens - size)
    found = lax.map(one, firsts)
    whole = jnp.moveaxis(found[:-1], 0, 1)
    whole = whole.reshape(whole.shape[0], (chunks - 1) * size, *whole.shape[3:])
    return jnp.concatenate([whole, found[-1][:, overlap:]], axis=1)
