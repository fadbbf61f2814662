"""Attention of many new tokens to the keys and values in the cache."""

from dataclasses import dataclass
from typing import Any, Literal, overload, override

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    Dims,
    check_cache,
    entry_scale,
    int32,
    layer_index,
    positive_int,
    static_bool,
    static_scale,
)
from jaxkv.dispatch import Implementations
from jaxkv.ops.attention import check_entries
from jaxkv.ops.composed.parts import CHUNK_BYTES, Context, aligned, sums_from_0
from jaxkv.ops.gathers import gather_kv
from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.xla.softmax import with_sinks


@overload
def prefill_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    window: int | None = None,
    sinks: ArrayLike | None = None,
    gathered_bytes: int = CHUNK_BYTES,
    return_lse: Literal[False] = False,
    implementation: Implementations | None = None,
) -> jax.Array: ...
@overload
def prefill_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    window: int | None = None,
    sinks: ArrayLike | None = None,
    gathered_bytes: int = CHUNK_BYTES,
    return_lse: Literal[True],
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def prefill_kv(
    q: ArrayLike,
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    window: int | None = None,
    sinks: ArrayLike | None = None,
    gathered_bytes: int = CHUNK_BYTES,
    return_lse: bool = False,
    implementation: Implementations | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Grouped-query or multi-head attention of many new tokens per request, to keys and values that are gathered first.

    Up to rounding, the result is that of `decode_kv`, which reads the cache for each few query tokens again.  As there,
    the entries of the new tokens must already be in the cache, and the mask is causal and aligned to the end: query
    token t of Q sees the first `seq_len - Q + 1 + t` tokens.  New tokens are read back from the cache, like all others.

    The last Q tokens of each request are gathered and attended to at once.  Earlier tokens are gathered in chunks of
    bounded memory, in a loop over the longest request, or its window; the parts are merged by their log-sum-exps.

    Which of the two is faster depends on the number of new tokens.  On an H200, with 32 query heads and 8 KV heads of
    128 bfloat16 values, 4,096 new tokens take 0.5 ms instead of 1.1; 256 take longer than by `decode_kv`, and so do
    1,024 with a window of 1,024 and earlier tokens.

    On Hopper, cuDNN computes the attention of bfloat16 and float16 queries whose heads have up to 256 values, in
    multiples of 8, except to earlier tokens within a window.  As in `decode_kv` on GPUs, inf or NaN in a token that
    some query tokens of the request see may then reach those that do not see it.  All other calls, and those with
    `implementation="xla"`, run on XLA.  Unlike in `decode_kv`, a token in a block outside the cache is not masked, but
    has an entry of zeros, and so have all tokens if a traced layer is outside the cache.

    Args:
      q: float [B, Q, Hq, D]; Hq a multiple of the cache's heads H.  Query head i reads KV head i // (Hq / H).
      cache: a cache of `KVEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: static number, the softmax scale.
      k_scale: float scalar or [H], required by format `fp8` and rejected by the others; value = stored * k_scale.
      v_scale: the same for v; value = stored * v_scale.
      window: static positive int; a query sees only the last `window` tokens, itself included.
      sinks: float32 [Hq]; attention sinks, as in `decode_mla_sparse`: one logit per head that is added to the softmax's
        denominator, without a value.
      gathered_bytes: static bound on the bytes of the keys and values of a chunk of earlier tokens; 256 MiB by default.
        A chunk has at least one token of each request, even if that exceeds the bound.
      return_lse: also return the log-sum-exp of the scores, without sinks.
      implementation: None (the best that supports the call), a name, or a sequence of names, for reading the cache.

    Returns:
      out [B, Q, Hq, Dv], of q's dtype; with `return_lse` also lse, float32 [B, Q, Hq], natural logarithm.  A query that
      sees no token gets 0 and -inf.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, KVEntry)
    return_lse, layout = static_bool("return_lse", return_lse), cache.layout
    dims = Dims(D=(layout.entry.sizes[0], "the entry's head_dim"))
    q = dims.check("q", q, "B Q Hq D")
    if dims["Hq"] % layout.num_heads:
        raise ValueError(f"`q` has {dims['Hq']} heads: expected a multiple of the cache's {layout.num_heads} heads")
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    scale = static_scale(scale)
    most_bytes = positive_int("gathered_bytes", gathered_bytes, below=None)
    if window is not None:
        window = positive_int("window", window, below=None)
    block_tables, seq_lens, layer = int32(block_tables), int32(seq_lens), layer_index(layer, cache)
    options = {
        "layer": layer,
        "k_scale": entry_scale("k_scale", k_scale, cache, heads=True),
        "v_scale": entry_scale("v_scale", v_scale, cache, heads=True),
        "implementation": implementation,
    }
    # As for kernels: the user's program may have stricter rules than JAX's default ones.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        context = _Entries(cache, block_tables, seq_lens, scale, most_bytes, options)
        if window is not None and window >= context.capacity:
            window = None
        if data_checks.checking():
            seen = 0 if window is None else seq_lens - q.shape[1] - window + 1
            check_entries(cache, block_tables, jnp.maximum(seen, jnp.zeros_like(seq_lens)), seq_lens, layer)
        out, lse = aligned(context, q, window)
        if sinks is not None:
            out = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Entries(Context):
    """Attention to the keys and values of the cache."""

    @property
    @override
    def value_shape(self):
        return self.cache.layout.num_heads, self.cache.layout.entry.sizes[1]

    @override
    def entries(self, first, counts, total, dtype):
        options: dict[str, Any] = {**self.options, "total": total, "dtype": dtype, "seq_starts": first}
        return gather_kv(self.cache, self.block_tables, sums_from_0(counts), **options)

    @override
    def expand(self, first_part, second_part):
        return first_part, second_part
