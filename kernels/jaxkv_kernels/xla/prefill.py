"""Attention of many new tokens to gathered keys and values: to the new ones at once, to earlier ones in chunks.

The gather of the implementation reads entries, and its `DenseAttention` attends to them as arrays.  Under a causal
mask, the last Q tokens of each request are gathered and attended to at once.  Earlier tokens, or without a causal mask
all tokens, are gathered in chunks of bounded memory, from the first one that some query token sees.  Each attention
returns a result (out, lse), and results are merged by their log-sum-exps.  XLA attends if the mask is not one of
`DenseAttention`'s.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing import lengths_in_table, sums_from_0, table_tokens
from jaxkv_kernels.calls import ExpandedHeads, PrefillKV, PrefillMLA
from jaxkv_kernels.scores import merged
from jaxkv_kernels.xla import expanded
from jaxkv_kernels.xla.paged import walk

ALIGNED = 1024
"""Chunks of this many tokens or more are multiples of it."""


def _one_split(keys: int, rows: int) -> int:
    return 1


class DenseAttention(NamedTuple):
    """Kernels of attention to keys and values per head that are arrays, and how an implementation calls them.

    Queries see all keys or, with an `ahead` of 0, those up to their own.  Other masks are left to XLA.
    """

    attention: Callable[..., tuple[jax.Array, jax.Array]]
    """As `jaxkv_kernels.xla.expanded.attention`, with a `window` only if `ahead` is 0."""
    ragged_attention: Callable[..., tuple[jax.Array, jax.Array]]
    """As `jaxkv_kernels.xla.expanded.ragged_attention`, without a `window`."""
    splits: Callable[[int, int], int] = _one_split
    """`splits(keys, rows)`: the number of equal splits of a chunk's keys per request, a divisor of it, for so many rows
    (requests x heads x query tokens).  The kernel attends to splits as to requests of their own."""
    unconditional_chunks: int = 0
    """If there is room for at most this many chunks, the kernel attends to all of them, even to those without tokens.
    Otherwise, a loop runs as many chunks as there are tokens for."""


XLA = DenseAttention(expanded.attention, expanded.ragged_attention)


class SharedRopeAttention(NamedTuple):
    """Attention to expanded latents by a kernel for which the rotary keys, which all heads share, are an own array."""

    attend: Callable[..., tuple[jax.Array, jax.Array]]
    """`attend(q, k_nope, k_pe, v, kv_lens)` returns out [splits, B, Q, H, V] and lse [splits, B, Q, H].  If some query
    tokens do not see all keys, it gets `window`, `ahead` and `offset` of `jaxkv_kernels.xla.expanded.attention`, too.
    """
    multiple: int
    """The number of keys must be a multiple of it."""


@dataclass(frozen=True)
class Context[C: PrefillMLA | PrefillKV](ABC):
    """What queries attend to, and by which kernels."""

    call: C
    gather: Callable[[Any], tuple[jax.Array, ...]]
    """The implementation's kernel for the calls that `call.gather` returns."""
    dense: DenseAttention

    @property
    def capacity(self) -> int:
        """The most tokens of a request."""
        return table_tokens(self.call.block_tables, self.call.pages.block_size)

    @property
    def lengths(self) -> jax.Array:
        """Tokens of each request."""
        return lengths_in_table(self.call.seq_lens, self.call.block_tables, self.call.pages.block_size)

    @property
    def options(self) -> dict[str, Any]:
        """The options of attention.  Not all kernels have a logit cap: those of calls without one are not given it."""
        cap = self.call.logit_cap
        return {"scale": self.call.scale, **({} if cap is None else {"logit_cap": cap})}

    def empty(self, q) -> tuple[jax.Array, jax.Array]:
        """The result of queries [..., H, D] that see no key."""
        rows = q.shape[:-1]
        return jnp.zeros((*rows, self.value_shape[1]), q.dtype), jnp.full(rows, -jnp.inf)

    def chunk(self, most: int, q, sequences: int = 1, *, shared_dims: int = 0) -> int:
        """Tokens per chunk, if each of `sequences` has at most `most` earlier tokens.

        `shared_dims`: dims of keys that are stored once for all heads.
        """
        heads, value_dim = self.value_shape
        width = q.shape[-1] - shared_dims + value_dim
        return _chunk(most, self.call.chunk_bytes // (sequences * heads * width * q.dtype.itemsize))

    def entries(self, first, counts, total: int) -> tuple[jax.Array, ...]:
        """The two arrays [total, ...] of `counts` [B] entries per request, from positions `first` [B] on."""
        return self.gather(self.call.gather(first, counts, total))

    @property
    @abstractmethod
    def value_shape(self) -> tuple[int, int]:
        """Heads and size of the values."""

    @abstractmethod
    def expand(self, first, second) -> tuple[jax.Array, jax.Array]:
        """Keys [..., H, D] and values [..., H, V] of the two arrays [..., ...] of entries."""


@dataclass(frozen=True)
class _Entries(Context[PrefillKV]):
    """Attention to the keys and values of the cache."""

    @property
    @override
    def value_shape(self):
        return self.call.pages.num_heads, self.call.entry.value_dim

    @override
    def expand(self, first, second):
        return first, second


@dataclass(frozen=True)
class _Latents(Context[PrefillMLA]):
    """Attention to keys and values that are expanded from latents."""

    shared_rope: SharedRopeAttention | None

    @property
    @override
    def value_shape(self):
        heads, value_dim, _ = self.call.w_uv.shape
        return heads, value_dim

    def products(self, kv_c):
        """Keys [..., H, N], without their rotary part, and values [..., H, V] of latents [..., R]."""
        # Products of float32 values must not be rounded to tf32.
        precision = lax.Precision.HIGHEST if kv_c.dtype == jnp.float32 else None
        k_nope = jnp.einsum("...r,hnr->...hn", kv_c, self.call.w_uk, precision=precision)
        return k_nope, jnp.einsum("...r,hvr->...hv", kv_c, self.call.w_uv, precision=precision)

    @override
    def expand(self, first, second):
        k_nope, v = self.products(first)
        k_pe = jnp.broadcast_to(second[..., None, :], (*k_nope.shape[:-1], second.shape[-1]))
        return jnp.concatenate([k_nope, k_pe], axis=-1), v


def prefill_mla(
    call: PrefillMLA,
    gather: Callable[[Any], tuple[jax.Array, ...]],
    dense: DenseAttention = XLA,
    shared_rope: SharedRopeAttention | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The results of a call by these kernels.

    If queries are not ragged, `shared_rope` attends to earlier tokens in place of `dense`.
    """
    context = _Latents(call, gather, dense, shared_rope)
    q = jnp.concatenate([call.q_nope, call.q_pe], axis=-1)
    return _aligned(context, q) if call.cu_q_lens is None else _ragged(context, q, call.cu_q_lens)


def prefill_kv(
    call: PrefillKV, gather: Callable[[Any], tuple[jax.Array, ...]], dense: DenseAttention = XLA
) -> tuple[jax.Array, jax.Array]:
    """The results of a call by these kernels."""
    context = _Entries(call, gather, dense)
    return _aligned(context, call.q) if call.cu_q_lens is None else _ragged(context, call.q, call.cu_q_lens)


def least_by_flops(heads: ExpandedHeads) -> int | None:
    """New tokens per request from which on `prefill_mla` takes fewer flops than `decode_mla`, with a long context.

    Per head and cached token, absorbed attention takes 2 * (2 * latent + rope) flops per query token.  Attention to
    expanded keys and values takes 2 * (nope + rope + value) flops per query token, and expanding a token takes
    2 * latent * (nope + value) flops, once for all query tokens.  The length of the context multiplies both sides.
    For DeepSeek-V3 (512, 128, 128), it is 171.
    """
    saved = 2 * heads.latent - heads.nope - heads.value
    return None if saved <= 0 else heads.latent * (heads.nope + heads.value) // saved + 1


def _aligned(context: _Entries | _Latents, q) -> tuple[jax.Array, jax.Array]:
    """The attention of queries [B, Q, H, D], aligned to the end: out and lse."""
    batch, tokens, heads, _ = q.shape
    call, dense, lengths = context.call, context.dense, context.lengths
    window, causal = call.window, call.ahead == 0
    attend = partial(dense.attention, **context.options)

    def entries(first, counts, size):
        """The two arrays [B, size, ...] of `counts` [B] entries per request, from positions `first` [B] on."""
        packed = context.entries(first, counts, batch * size)
        return (_unpacked(x, counts, size) for x in packed)

    if causal:
        new = jnp.minimum(lengths, tokens)
        cached = start = lengths - new
        # A request of fewer than Q tokens has padding before them.  It moves to the end, where masks expect it.
        padding = tokens - new
        q, q_lens = _shifted(q, padding), new
        result = attend(q, *context.expand(*entries(cached, new, tokens)), new, new, ahead=0, window=window)
    else:
        padding, cached, start, q_lens = None, lengths, lengths - tokens, jnp.full_like(lengths, tokens)
        result = context.empty(q)
    # The mask of the `cached` tokens.  `start` is the position of the first query.
    ahead = None if causal else call.ahead
    most, begin = context.capacity - tokens if causal else context.capacity, jnp.zeros_like(cached)
    if window is not None:
        most = min(most, window - 1 if causal else window - 1 + tokens)
        begin = jnp.maximum(start, window - 1) - (window - 1)
    if most > 0:
        latents = context if isinstance(context, _Latents) else None
        shared_rope = latents.shared_rope if latents else None
        size = context.chunk(most, q, batch, shared_dims=latents.call.q_pe.shape[-1] if latents and shared_rope else 0)
        if shared_rope:
            size += -size % shared_rope.multiple
        splits = dense.splits(size, batch * heads * tokens)

        def with_chunk(i, result):
            first = jnp.minimum(begin + i * size, cached)
            counts = jnp.minimum(cached - first, size)
            mask: dict[str, Any] = {}
            if window is not None or ahead is not None:
                mask = {"window": window, "ahead": ahead, "offset": start - first}
            if latents and shared_rope:
                kv_c, k_pe = entries(first, counts, size)
                k_nope, v = latents.products(kv_c)
                results = shared_rope.attend(q, k_nope, k_pe, v, counts, **mask)
                return merged([result, *zip(*results, strict=True)])
            k, v = context.expand(*entries(first, counts, size))
            if mask:
                # cuDNN has no mask for windows that begin in different places.
                return merged([result, expanded.attention(q, k, v, q_lens, counts, **context.options, **mask)])
            # Splits of the keys become requests of their own.
            k, v = (x.reshape(batch * splits, size // splits, *x.shape[2:]) for x in (k, v))
            starts = jnp.arange(splits, dtype=jnp.int32) * (size // splits)
            kv_lens = jnp.clip(counts[:, None] - starts, 0, size // splits).reshape(-1)
            queries, lens = (jnp.repeat(x, splits, axis=0) for x in (q, q_lens))
            results = attend(queries, k, v, lens, kv_lens, ahead=None)
            results = (jnp.moveaxis(x.reshape(batch, splits, *x.shape[1:]), 1, 0) for x in results)
            return merged([result, *zip(*results, strict=True)])

        chunks = -(-(cached - begin).max() // size)
        bounds = chunks, -(-most // size), dense.unconditional_chunks
        result = _with_chunks(result, with_chunk, *bounds, from_empty=not causal)
    if padding is None:
        return result
    out, lse = result
    return _padded(out, padding, 0), _padded(lse, padding, -jnp.inf)


def _with_chunks(
    result, with_chunk, count, most: int, unconditional: int, *, from_empty: bool
) -> tuple[jax.Array, jax.Array]:
    """`result` (out, lse), merged with those of `count` chunks by `with_chunk(i, result)`.

    If there is room for at most `unconditional` chunks, all `most` of them run, and `count` is not used.  `from_empty`:
    `result` is that of no keys.
    """
    dtype = result[0].dtype
    if most <= unconditional:
        result = result[0].astype(jnp.float32), result[1]
        out, lse = reduce(lambda result, i: with_chunk(jnp.int32(i), result), range(most), result)
        return out.astype(dtype), lse

    def run(out, lse):
        out, lse = walk(0, count, with_chunk, (out.astype(jnp.float32), lse))
        return out.astype(dtype), lse

    if from_empty:
        return run(*result)
    # Without cached tokens, the results are not converted to float32 and back.
    return lax.cond(count > 0, run, lambda *result: result, *result)


def _ragged(context: _Entries | _Latents, q, cu_q_lens) -> tuple[jax.Array, jax.Array]:
    """The rows of requests that follow one another in q [T, H, D]."""
    rows, call, dense = len(q), context.call, context.dense
    if not len(call.block_tables):
        return context.empty(q)
    window, causal = call.window, call.ahead == 0
    sums = jnp.clip(cu_q_lens, 0, rows)
    starts, ends = sums[:-1], sums[1:]
    # The query tokens of a request that are past the last row are its last ones.
    left_out = jnp.diff(jnp.maximum(cu_q_lens, rows))

    def attend_to(first, counts, size, *, ahead):
        """The result of attention to `counts` [B] tokens, at most `size` in all, from positions `first` [B] on."""
        k, v = context.expand(*context.entries(first, counts, size))
        arrays = q, k, v, q_starts, q_lens, sums_from_0(counts)[:-1], counts
        if window is None and ahead in (0, None):
            return dense.ragged_attention(*arrays, **context.options, ahead=ahead)
        mask: dict[str, Any] = {"window": window, "ahead": ahead, "offset": start - first}
        return expanded.ragged_attention(*arrays, **context.options, **mask)

    # Nothing is read for a request without query tokens.
    if causal:
        lengths = jnp.where(ends > starts, jnp.maximum(context.lengths - left_out, 0), 0)
        new = jnp.minimum(lengths, ends - starts)
        cached = start = lengths - new
        q_starts, q_lens = ends - new, new
        result = attend_to(cached, new, rows, ahead=0)
    else:
        cached = jnp.where(ends > starts, context.lengths, 0)
        q_starts, q_lens = starts, ends - starts
        start = context.lengths - left_out - q_lens
        result = context.empty(q)
    # The mask of the `cached` tokens.  `start` is the position of the first query token of each request.
    ahead = None if causal else call.ahead
    most, begin = len(cached) * context.capacity, jnp.zeros_like(cached)
    if window is not None:
        most = min(most, len(cached) * (window - 1) if causal else len(cached) * (window - 1) + rows)
        begin = jnp.minimum(jnp.maximum(start, window - 1) - (window - 1), cached)
    if not most:
        return result
    counts = cached - begin
    before = sums_from_0(counts)
    size = context.chunk(most, q)

    def with_chunk(i, result):
        first, last = (jnp.clip(bound - before[:-1], 0, counts) for bound in (i * size, (i + 1) * size))
        return merged([result, attend_to(begin + first, last - first, size, ahead=ahead)])

    bounds = -(-before[-1] // size), -(-most // size), dense.unconditional_chunks
    return _with_chunks(result, with_chunk, *bounds, from_empty=not causal)


def _chunk(most: int, tokens: int) -> int:
    """Tokens per chunk, at least 1 and at most `most`, given the number of `tokens` that memory allows.

    The chunks of `most` tokens are about equal.
    """
    tokens = max(tokens, 1)
    equal = -(-most // -(-most // tokens))
    if tokens < ALIGNED:
        return min(equal, most)
    return min(-(-equal // ALIGNED) * ALIGNED, tokens // ALIGNED * ALIGNED, most)


def _shifted(x, by):
    """x [B, Q, ...] whose row t is row t + by of `x`, or else its first or last row; `by` is [B]."""
    rows = jnp.clip(jnp.arange(x.shape[1], dtype=jnp.int32) + by[:, None], 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), axis=1)


def _padded(x, padding, fill):
    """Shifts x [B, Q, ...] right by `padding` [B], filling with `fill`; the rows that do not fit are dropped."""
    live = jnp.arange(x.shape[1], dtype=jnp.int32) >= padding[:, None]
    return jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), _shifted(x, -padding), jnp.asarray(fill, x.dtype))


def _unpacked(x, counts, size: int):
    """x [B * size, ...], in which the `counts` [B] rows of each request follow one another, as [B, size, ...]."""
    if len(counts) == 1:
        return x[None]
    token = jnp.arange(size, dtype=jnp.int32)
    live = token < counts[:, None]
    rows = jnp.where(live, sums_from_0(counts)[:-1, None] + token, 0)
    return jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 1)), x[rows], 0)
