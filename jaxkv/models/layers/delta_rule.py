"""The gated delta rule (`jaxkv_kernels/delta_rule.py` defines it for one token) for many tokens at once.

Within a chunk, let c_i be the sum of g up to token i, <a_i, k_j> the sum of the values of a_i exp(c_i - c_j) k_j, and
L[i, j] = b_i <k_i, k_j> for j < i, else 0.  With the state S before the chunk, what the tokens add to the state are the
rows of

    D = (1 + L)^-1 (b v - b exp(c) k S)

and o_i = S' (exp(c_i) q_i) + sum over j <= i of <q_i, k_j> D_j (arXiv 2406.06484, section 3, and 2412.06464, section
3.3).  The state after the chunk is a linear function of S, so that all chunks are computed at once but for one product
per chunk.

All arithmetic is in float32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models.layers.linear import product
from jaxkv_kernels.delta_rule import unit_queries_and_keys

CHUNK = 64
"""Tokens of a chunk.  Work within chunks grows with it, and the number of consecutive steps falls."""


def gated_delta_rule(q, k, v, decay, rate, state) -> tuple[jax.Array, jax.Array]:
    """The rule for new tokens, by chunks of `CHUNK`: the outputs, and the state after the last token.

    Queries and keys are divided by their lengths, and queries by the square root of K.  Value head h reads key head
    h // (H / G).  A token with `decay` 0 and `rate` 0 leaves the state as it is.

    Args:
      q: [B, Q, G, K], like `k`.
      k: the keys.
      v: [B, Q, H, V].
      decay: float32 [B, Q, H, 1], the logarithms g of the heads' decays; or [B, Q, H, K], one per value of a key.
      rate: float32 [B, Q, H], the rates b at which states are corrected.
      state: float32 [B, H, K, V].

    Returns:
      float32 [B, Q, H, V], and the state, of its shape.
    """
    q, k = unit_queries_and_keys(q, k, v.shape[2])
    v = v.astype(jnp.float32)
    q_len = q.shape[1]
    chunk = min(CHUNK, 1 << (q_len - 1).bit_length())
    q, k, v, decay, rate = (_chunks(part, chunk) for part in (q, k, v, decay, rate))  # [B, N, H, chunk, ...]
    decays = _OfHeads(decay) if decay.shape[-1] == 1 else _OfChannels(decay)
    inverse = _inverse(jnp.tril(rate[..., None] * decays.products(k, k), -1))
    # D = values - keys S
    values = product("bnhij,bnhjv->bnhiv", inverse * rate[..., None, :], v)
    keys = product("bnhij,bnhjk->bnhik", inverse * rate[..., None, :], k * decays.before)

    # The state after a chunk is kept S + added.  Only this is computed chunk by chunk.
    rest = k * decays.after
    kept = jnp.expand_dims(jnp.eye(k.shape[-1], dtype=k.dtype), (0, 1, 2)) * decays.before[..., -1:, :]
    kept = kept - product("bnhik,bnhil->bnhkl", rest, keys)
    added = product("bnhik,bnhiv->bnhkv", rest, values)

    def step(state, new):
        kept, added = new
        return product("bhkl,bhlv->bhkv", kept, state) + added, state

    after, states = lax.scan(step, state, (jnp.moveaxis(kept, 1, 0), jnp.moveaxis(added, 1, 0)))
    new = values - product("bnhik,nbhkv->bnhiv", keys, states)
    out = product("bnhik,nbhkv->bnihv", q * decays.before, states)
    out = out + product("bnhij,bnhjv->bnihv", decays.products(q, k), new)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :q_len], after


class _OfHeads:
    """Decays of the tokens of a chunk, one per token, from their logarithms [..., C, 1].

    c_i - c_j is summed from the decays after j, because a difference of large sums would have few exact digits.
    """

    def __init__(self, decay):
        decay = decay[..., 0]
        upper = jnp.triu(jnp.ones(decay.shape[-1:] * 2, decay.dtype))
        later = decay[..., None, :] * jnp.broadcast_to(upper.T, (*decay.shape, len(upper)))
        self._since = jnp.tril(jnp.exp(product("...it,tj->...ij", later, 1 - upper)))
        self.before = jnp.exp(product("...t,ti->...i", decay, upper))[..., None]
        """exp(c_i), [..., C, 1]."""
        self.after = self._since[..., -1, :, None]
        """exp(c_C - c_i), [..., C, 1]."""

    def products(self, a, k) -> jax.Array:
        """<a_i, k_j> [..., C, C] for j <= i, else 0, of a and k [..., C, K]."""
        return self._since * product("...ik,...jk->...ij", a, k)


class _OfChannels:
    """The same with a decay per value of a key, [..., C, K], C a power of two.

    exp(c_i - c_j) would be an array [C, C, K].  For i in the second and j in the first half of an even number of
    tokens, it is exp(c_i - c_m) exp(c_m - c_j) with the last token m of the first half, so that <a_i, k_j> are a matrix
    product.  Starting from single tokens, each step joins pairs of neighbouring halves.
    """

    def __init__(self, decay):
        self._decay = decay
        self.before, self.after = _exp_sums(decay)

    def products(self, a, k) -> jax.Array:
        """As above."""
        found, size = (a * k).sum(axis=-1)[..., None, None], 1
        while size < a.shape[-2]:
            (_, a_2), (k_1, _), (decay_1, decay_2) = (_halves(part, size) for part in (a, k, self._decay))
            (_, after), (before, _) = _exp_sums(decay_1), _exp_sums(decay_2)
            below = product("...ik,...jk->...ij", a_2 * before, k_1 * after)
            first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
            upper, lower = [first, jnp.zeros_like(below)], [below, second]
            found = jnp.concatenate([jnp.concatenate(row, axis=-1) for row in (upper, lower)], axis=-2)
            size *= 2
        return found[..., 0, :, :]


def _halves(x, size: int) -> tuple[jax.Array, jax.Array]:
    """The first and second halves [..., C / (2 size), size, n] of all 2 * size neighbours in x [..., C, n]."""
    x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _exp_sums(decay) -> tuple[jax.Array, jax.Array]:
    """exp of the sums of `decay` [..., n, K] up to each token, and of those after it."""
    axis = decay.ndim - 2
    later = jnp.concatenate([decay[..., 1:, :], jnp.zeros_like(decay[..., :1, :])], axis=axis)
    return jnp.exp(lax.cumsum(decay, axis)), jnp.exp(lax.cumsum(later, axis, reverse=True))


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
