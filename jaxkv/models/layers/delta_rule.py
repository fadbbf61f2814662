"""The gated delta rule (arXiv 2412.06464), and the short causal convolution before it, with their states.

A head has a state S [K, V].  Each token has a query q and a key k [K], a value v [V], the logarithm g <= 0 of a decay,
and a rate b:

    S = exp(g) S
    S = S + k (b (v - S' k))'
    o = S' q

`recurrent` computes this token by token.  `chunked` computes the same for many tokens at once.  Within a chunk, let
c_i be the sum of g up to token i, and L[i, j] = b_i exp(c_i - c_j) (k_i . k_j) for j < i, else 0.  With the state S
before the chunk, what the tokens add to the state are the rows of

    D = (1 + L)^-1 (b v - b exp(c) k S)

and o_i = exp(c_i) S' q_i + sum over j <= i of exp(c_i - c_j) (q_i . k_j) D_j (arXiv 2406.06484, section 3, and
2412.06464, section 3.3).  The state after the chunk is a linear function of S, so that all chunks are computed at once
but for one product per chunk.

All arithmetic is in float32.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models.layers.linear import product, with_rank

CHUNK = 64
"""Tokens of a chunk.  Work within chunks grows with it, and the number of consecutive steps falls."""
NORM_EPS = 1e-6
"""What is added to the squared lengths of queries and keys before these are divided by their lengths."""


def convolve(x, state, weight, count) -> tuple[jax.Array, jax.Array]:
    """The causal convolution of each channel over the tokens of a request; returns it and the next state.

    Args:
      x: [B, Q, C], the new tokens, aligned to the end; those before them may hold anything.
      state: float32 [B, W - 1, C], the W - 1 tokens before the new ones; 0 before the first of a request.
      weight: [C, W], in which the new token has the last column.
      count: int32 [B], the new tokens of each request.

    Returns:
      float32 [B, Q, C], of which those before the new tokens have no meaning; and the state, of the last W - 1 tokens.
    """
    (_, q_len, _), width = x.shape, weight.shape[-1]
    x, weight = jnp.pad(x.astype(jnp.float32), ((0, 0), (width - 1, 0), (0, 0))), weight.astype(jnp.float32)
    # The state lies before the first new token of each row.
    x = jax.vmap(lambda row, earlier, first: lax.dynamic_update_slice(row, earlier, (first, 0)))(
        x, state, q_len - count
    )
    taps = [x[:, i : i + q_len] * with_rank(weight[:, i], 3) for i in range(width)]
    return reduce(jnp.add, taps), x[:, q_len:]


def gated_delta_rule(q, k, v, decay, rate, state) -> tuple[jax.Array, jax.Array]:
    """The rule for new tokens: the outputs, and the state after the last token.

    Queries and keys are divided by their lengths, and queries by the square root of K.  Value head h reads key head
    h // (H / G).  A token with `decay` 0 and `rate` 0 leaves the state as it is.

    Args:
      q: [B, Q, G, K], like `k`.
      k: the keys.
      v: [B, Q, H, V].
      decay: float32 [B, Q, H], g above.
      rate: float32 [B, Q, H], b above.
      state: float32 [B, H, K, V].

    Returns:
      float32 [B, Q, H, V], and the state, of its shape.
    """
    group = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(_unit(part.astype(jnp.float32)), group, axis=2) for part in (q, k))
    form = recurrent if v.shape[1] == 1 else chunked
    return form(q * q.shape[-1] ** -0.5, k, v.astype(jnp.float32), decay, rate, state)


def recurrent(q, k, v, decay, rate, state) -> tuple[jax.Array, jax.Array]:
    """The rule token by token; all arrays are float32, and queries and keys [B, Q, H, K]."""

    def token(state, new):
        q, k, v, decay, rate = new
        q, k = q[..., None], k[..., None]
        state = state * jnp.exp(decay)[..., None, None]
        state = state + k * (rate[..., None] * (v - (k * state).sum(axis=-2)))[..., None, :]
        return state, (q * state).sum(axis=-2)

    state, out = lax.scan(token, state, tuple(jnp.moveaxis(part, 1, 0) for part in (q, k, v, decay, rate)))
    return jnp.moveaxis(out, 0, 1), state


def chunked(q, k, v, decay, rate, state) -> tuple[jax.Array, jax.Array]:
    """The same by chunks of `CHUNK` tokens, or fewer if there are fewer."""
    q_len = q.shape[1]
    chunk = min(CHUNK, 1 << (q_len - 1).bit_length())
    q, k, v, decay, rate = (_chunks(part, chunk) for part in (q, k, v, decay, rate))  # [B, N, H, chunk, ...]
    whole, since = _decays(decay)
    lower = rate[..., None] * since * product("bnhik,bnhjk->bnhij", k, k)
    inverse = _inverse(jnp.tril(lower, -1))
    # D = values - keys S
    values = product("bnhij,bnhjv->bnhiv", inverse * rate[..., None, :], v)
    keys = product("bnhij,bnhjk->bnhik", inverse * (rate * whole)[..., None, :], k)

    # The state after a chunk is kept S + added.  Only this is computed chunk by chunk.
    rest = k * since[..., -1, :, None]
    kept = jnp.expand_dims(jnp.eye(k.shape[-1]), (0, 1, 2)) * whole[..., -1:, None]
    kept = kept - product("bnhik,bnhil->bnhkl", rest, keys)
    added = product("bnhik,bnhiv->bnhkv", rest, values)

    def step(state, new):
        kept, added = new
        return product("bhkl,bhlv->bhkv", kept, state) + added, state

    after, states = lax.scan(step, state, (jnp.moveaxis(kept, 1, 0), jnp.moveaxis(added, 1, 0)))
    new = values - product("bnhik,nbhkv->bnhiv", keys, states)
    scores = since * product("bnhik,bnhjk->bnhij", q, k)
    out = product("bnhik,nbhkv->bnihv", q * whole[..., None], states) + product("bnhij,bnhjv->bnihv", scores, new)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :q_len], after


def _decays(decay) -> tuple[jax.Array, jax.Array]:
    """exp(c_i) [..., C], and exp(c_i - c_j) [..., C, C] for j <= i, else 0, of the logarithms `decay` [..., C].

    c_i - c_j is summed from the decays after j, because a difference of large sums would have few exact digits.
    """
    upper = jnp.triu(jnp.ones(decay.shape[-1:] * 2, decay.dtype))
    total = product("...t,ti->...i", decay, upper)
    after = product(
        "...it,tj->...ij", decay[..., None, :] * jnp.broadcast_to(upper.T, (*decay.shape, len(upper))), 1 - upper
    )
    return jnp.exp(total), jnp.tril(jnp.exp(after))


def _unit(x) -> jax.Array:
    """x [..., n] divided by its length."""
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + NORM_EPS)


def _chunks(x, chunk: int) -> jax.Array:
    """x [B, Q, H, ...] as [B, N, H, chunk, ...], with zeros after the last token."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 3, 2)


def _inverse(lower) -> jax.Array:
    """(1 + lower)^-1 of strictly lower triangular matrices [..., n, n], n a power of two.

    The inverse of [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]].  Starting from the inverses of blocks of one
    row, each step joins pairs of blocks, in all places at once.
    """
    n = lower.shape[-1]
    rows, columns = (lax.broadcasted_iota(jnp.int32, lower.shape, lower.ndim - axis) for axis in (2, 1))
    inverse = (rows == columns).astype(lower.dtype)
    size = 1
    while size < n:
        beside = (rows // size == columns // size + 1) & (rows // (2 * size) == columns // (2 * size))
        below = jnp.where(beside, lower, 0.0)
        inverse = inverse - product("...ij,...jk,...kl->...il", inverse, below, inverse)
        size *= 2
    return inverse
