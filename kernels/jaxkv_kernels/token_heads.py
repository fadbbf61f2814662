"""Query tokens as heads: those of a request that see the same keys are, for a kernel, as the heads of one token."""

from functools import partial

import jax


@partial(jax.jit, static_argnames="kv_heads")
def tokens_as_heads(q: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [B, Q, H, D] as those of one token, [B, 1, Q * H, D].

    Heads that share one of `kv_heads` stay adjacent.
    """
    batch, tokens, heads, width = q.shape
    q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, width).swapaxes(1, 2)
    return q.reshape(batch, 1, tokens * heads, width)


@partial(jax.jit, static_argnames=("kv_heads", "tokens"))
def heads_as_tokens(x: jax.Array, kv_heads: int, tokens: int) -> jax.Array:
    """Results [B, 1, Q * H, ...] for such queries as those of the Q `tokens`, [B, Q, H, ...]."""
    batch, _, rows, *rest = x.shape
    heads = rows // tokens
    x = x.reshape(batch, kv_heads, tokens, heads // kv_heads, *rest).swapaxes(1, 2)
    return x.reshape(batch, tokens, heads, *rest)
