"""What prefills share: attention of new tokens to themselves, and to earlier ones in chunks of bounded memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVCache
from jaxkv_kernels import cudnn
from jaxkv_kernels.addressing import lengths_in_table, table_tokens
from jaxkv_kernels.xla import expanded
from jaxkv_kernels.xla.paged import walk

CHUNK_BYTES = 2**28
"""The default bound on the bytes of the keys and values of a chunk: 26,214 tokens for 16 heads of 192 and 128 values in
bfloat16, 3,276 tokens for 128."""
ALIGNED = 1024
"""Chunks of this many tokens or more are multiples of it."""

FULL_ROWS = 2 * 132 * 128
"""Query rows (requests x heads x tokens) that fill a Hopper GPU: two work tiles of 128 rows per multiprocessor."""
LEAST_KEYS = 1024
"""The least keys of a part of a chunk."""

FEW_CHUNKS = 2
"""Up to so many chunks, GPUs compute all of them, even if there are fewer cached tokens.

XLA's loops and conditions wait for the host, which cost 0.46 ms per layer on an H200.  A chunk without tokens takes
about 0.15 ms: its keys and values are expanded, but cuDNN skips them."""


@dataclass(frozen=True)
class Context(ABC):
    """What queries attend to: arguments of a prefill, checked."""

    cache: KVCache
    block_tables: jax.Array
    seq_lens: jax.Array
    scale: float
    most_bytes: int
    options: dict[str, Any]
    """Those of the operation that gathers entries."""

    @property
    def capacity(self) -> int:
        """The most tokens of a request."""
        return table_tokens(self.block_tables, self.cache.layout.block_size)

    @property
    def lengths(self) -> jax.Array:
        """Tokens of each request."""
        return lengths_in_table(self.seq_lens, self.block_tables, self.cache.layout.block_size)

    def chunk(self, most: int, q, sequences: int = 1, *, apart: int = 0) -> int:
        """Tokens per chunk of at most `most` earlier tokens, of each of `sequences`.

        Keys have so many values less, `apart`, if these are not part of the expanded keys.
        """
        heads, value_dim = self.value_shape
        width = q.shape[-1] - apart + value_dim
        return _chunk(most, self.most_bytes // (sequences * heads * width * q.dtype.itemsize))

    def attention(self, q) -> Any:
        """The module whose functions compute attention of queries [..., D] to expanded keys and values."""
        if only_xla(self.options["implementation"]):
            return expanded
        return expanded if any(cudnn.unsupported_reasons(q.dtype, q.shape[-1], self.value_shape[1])) else cudnn

    def in_parts(self, q) -> "InParts | None":
        """Attention of queries [B, Q, H, D] to the two parts of entries, if a kernel joins keys as it reads them."""
        del q
        return None

    @property
    @abstractmethod
    def value_shape(self) -> tuple[int, int]:
        """Heads and size of the values."""

    @abstractmethod
    def entries(self, first, counts, total: int, dtype) -> tuple[jax.Array, jax.Array]:
        """The two parts [total, ...] of `counts` [B] entries per request, from positions `first` [B] on."""

    @abstractmethod
    def expand(self, first_part, second_part) -> tuple[jax.Array, jax.Array]:
        """Keys [..., H, D] and values [..., H, V] of the two parts [..., ...] of entries."""


class InParts(NamedTuple):
    """Attention by a kernel that does not need the keys of all heads in one array."""

    attend: Callable[..., tuple[jax.Array, jax.Array]]
    """`attend(q, first_part, second_part, kv_lens)` for queries [B, Q, H, D], parts of entries [B, S, ...] and the
    number of entries of each request, int32 [B]; returns out [splits, B, Q, H, V] and lse [splits, B, Q, H]."""
    apart: int
    """Values of a key that are the same for all heads, and are not expanded."""
    multiple: int
    """S must be a multiple of it."""


def aligned(context: Context, q, window: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The attention of queries [B, Q, H, D], aligned to the end: out and lse.

    With `window`, a query sees the last so many tokens, itself included.
    """
    batch, tokens, heads, _ = q.shape
    module = context.attention(q)
    attend = partial(module.attention, scale=context.scale)
    lengths = context.lengths
    new = jnp.minimum(lengths, tokens)
    cached = lengths - new
    # A request of fewer than Q tokens has padding before them.  It moves to the end, where masks expect it.
    padding = tokens - new
    q = _shifted(q, padding)

    def entries(first, counts, size):
        """Both parts of `counts` [B] entries, at most `size`, from positions `first` [B] on."""
        packed = context.entries(first, counts, batch * size, q.dtype)
        return (_unpacked(x, counts, size) for x in packed)

    found = attend(q, *context.expand(*entries(cached, new, tokens)), new, new, causal=True, window=window)
    most, begin = context.capacity - tokens, jnp.zeros_like(cached)
    if window is not None:
        most, begin = min(most, window - 1), jnp.maximum(cached - window + 1, 0)
    if most > 0:
        in_parts = context.in_parts(q) if window is None else None
        size = context.chunk(most, q, batch, apart=in_parts.apart if in_parts else 0)
        if in_parts:
            size += -size % in_parts.multiple
        splits = 1 if module is expanded else _splits(size, batch * heads * tokens)

        def with_chunk(i, state):
            first = jnp.minimum(begin + i * size, cached)
            counts = jnp.minimum(cached - first, size)
            if in_parts:
                parts = in_parts.attend(q, *entries(first, counts, size), counts)
                return reduce(merged, zip(*parts, strict=True), state)
            k, v = context.expand(*entries(first, counts, size))
            if window is not None:
                # cuDNN has no mask for windows that begin in different places.
                options = {"causal": False, "window": window, "offset": cached - first}
                return merged(state, expanded.attention(q, k, v, new, counts, scale=context.scale, **options))
            # Parts of the keys become requests of their own.
            k, v = (x.reshape(batch * splits, size // splits, *x.shape[2:]) for x in (k, v))
            starts = jnp.arange(splits, dtype=jnp.int32) * (size // splits)
            kv_lens = jnp.clip(counts[:, None] - starts, 0, size // splits).reshape(-1)
            queries, q_lens = (jnp.repeat(x, splits, axis=0) for x in (q, new))
            parts = attend(queries, k, v, q_lens, kv_lens, causal=False)
            parts = (jnp.moveaxis(x.reshape(batch, splits, *x.shape[1:]), 1, 0) for x in parts)
            return reduce(merged, zip(*parts, strict=True), state)

        found = with_chunks(
            found, with_chunk, -(-(cached - begin).max() // size), None if module is expanded else -(-most // size)
        )
    out, lse = found
    return _padded(out, padding, 0), _padded(lse, padding, -jnp.inf)


def with_chunks(found, with_chunk, count, most: int | None) -> tuple[jax.Array, jax.Array]:
    """(out, lse) `found`, merged with those of `count` chunks by `with_chunk(i, found)`.

    `most` is the most chunks that there may be, if the device is a GPU.
    """
    dtype = found[0].dtype
    if most is not None and most <= FEW_CHUNKS:
        found = found[0].astype(jnp.float32), found[1]
        out, lse = reduce(lambda state, i: with_chunk(jnp.int32(i), state), range(most), found)
        return out.astype(dtype), lse

    def run(out, lse):
        out, lse = walk(0, count, with_chunk, (out.astype(jnp.float32), lse))
        return out.astype(dtype), lse

    # Without cached tokens, the results are not converted to float32 and back.
    return lax.cond(count > 0, run, lambda *found: found, *found)


def only_xla(implementation) -> bool:
    """Whether `implementation` names `xla` only."""
    return implementation in ("xla", ("xla",), ["xla"])


def _chunk(most: int, tokens: int) -> int:
    """Tokens per chunk, at least 1 and at most `most`, given the number of `tokens` that memory allows.

    The chunks of `most` tokens are about equal.
    """
    tokens = max(tokens, 1)
    equal = -(-most // -(-most // tokens))
    if tokens < ALIGNED:
        return min(equal, most)
    return min(-(-equal // ALIGNED) * ALIGNED, tokens // ALIGNED * ALIGNED, most)


def _splits(size: int, rows: int) -> int:
    """Into how many parts the keys of a chunk are divided, so that work tiles of 128 query rows fill a GPU."""
    splits = 1
    while rows * splits < FULL_ROWS and size % (2 * splits * LEAST_KEYS) == 0:
        splits *= 2
    return splits


def sums_from_0(counts) -> jax.Array:
    """int32 [B + 1], from 0."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def merged(state, part) -> tuple[jax.Array, jax.Array]:
    """Merges two pairs (out, lse), in the dtype of the first `out`.  One without keys has out 0 and lse -inf.

    `merge_states` would take a NaN in `lse`, which a NaN in the cache causes, for a part without keys.
    """
    (out, lse), (other_out, other_lse) = state, part
    total = jnp.logaddexp(lse, other_lse)
    top = jnp.where(total == -jnp.inf, 0, total)
    weight, other_weight = (jnp.exp(x - top)[..., None] for x in (lse, other_lse))
    return out * weight + other_out.astype(out.dtype) * other_weight, total


def _shifted(x, by):
    """x [B, Q, ...] whose row t is row t + by of `x`, or else its first or last row; `by` is [B]."""
    rows = jnp.clip(jnp.arange(x.shape[1], dtype=jnp.int32) + by[:, None], 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), axis=1)


def _padded(x, padding, fill):
    """x [B, Q, ...] behind `padding` [B] rows of `fill`; the rows that do not fit are dropped."""
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
