"""Attention of many new tokens to the cache, by keys and values that are expanded from latents."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.dispatch import checked as checks
from jaxkv.dispatch.validate import check_cache, entry_scale, in_float32, int32, layer_index, mla_dims, positive_int
from jaxkv.ops.attention import check_entries
from jaxkv.ops.gathers import gather_mla
from jaxkv_kernels import cudnn
from jaxkv_kernels.addressing.slots import lengths_in_table, table_tokens
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.xla import expanded

EXPANDED_BYTES = 2**28
"""The default bound on the bytes of the expanded keys and values of a chunk: 26,214 tokens for 16 heads of 192 and 128
values in bfloat16, 3,276 tokens for 128."""
ALIGNED = 1024
"""Chunks of this many tokens or more are multiples of it."""

FULL_ROWS = 2 * 132 * 128
"""Query rows (requests x heads x tokens) that fill a Hopper GPU: two work tiles of 128 rows per multiprocessor."""
LEAST_KEYS = 1024
"""The least keys of a part of a chunk."""


def expansion_pays(q_len: int, *, latent: int, nope: int, value: int) -> bool:
    """Whether `prefill_mla` needs fewer flops than `decode_mla` for `q_len` new tokens and a long context.

    Per head and cached token, absorbed attention takes 2 * (2 * latent + rope) flops per query token.  Attention to
    expanded keys and values takes 2 * (nope + rope + value) flops per query token, and expanding a token takes
    2 * latent * (nope + value) flops, once for all query tokens.  The rule depends on the number of query tokens only:
    the length of the context multiplies both sides.  For DeepSeek-V3 (512, 128, 128), it holds from 171 query tokens
    on.
    """
    return q_len * (2 * latent - nope - value) > latent * (nope + value)


LEAST_ON_GPUS = 1024
"""New tokens per request from which on models expand keys and values on GPUs.

With 512, expansion was slower on an H200 (see `prefers_expansion`); with 8,192, it was faster.  Nothing in between was
measured."""


def prefers_expansion(q_len: int, dtype, *, latent: int, rope: int, nope: int, value: int, implementation=None) -> bool:
    """Whether models call `prefill_mla` instead of `decode_mla` for `q_len` new tokens of `dtype`.

    It must need fewer flops.  On a GPU, where `decode_mla` has kernels, cuDNN must also support the heads, and there
    must be at least `LEAST_ON_GPUS` new tokens.

    Flops are not everything.  In a layer of DeepSeek-V2-Lite (16 heads, bfloat16) on an H200, the attention kernel of
    8,192 new tokens takes 0.8 ms instead of 5.4.  For 512 new tokens after 7,680 cached ones, it takes 0.16 ms instead
    of 0.20, but the expansion and the loop over chunks cost more than that saves: a layer takes 1.8 ms instead of 1.5.
    """
    pays = expansion_pays(q_len, latent=latent, nope=nope, value=value)
    if jax.default_backend() != "gpu" or _only_xla(implementation):
        return pays
    return pays and q_len >= LEAST_ON_GPUS and not any(cudnn.unsupported_reasons(dtype, nope + rope, value))


def prefill_mla(
    q_nope,
    q_pe,
    w_uk,
    w_uv,
    cache: KVCache,
    block_tables,
    seq_lens,
    *,
    layer,
    scale,
    kv_scale=None,
    expanded_bytes: int = EXPANDED_BYTES,
    return_lse: bool = False,
    implementation=None,
) -> Any:
    """Multi-head latent attention of many new tokens per request, with keys and values expanded per head.

    For each head h, key = (W_UK[h] @ kv_c, k_pe) and value = W_UV[h] @ kv_c; score = (q_nope . W_UK[h] @ kv_c + q_pe .
    k_pe) * scale.  Up to rounding, the result is that of `decode_mla` with q_latent = q_nope @ W_UK, multiplied by
    W_UV.  This function takes fewer flops if query tokens are many: for DeepSeek's sizes, 640 per pair of a query and a
    key instead of 2,176, and 262,144 to expand a cached token, all per head.  From 171 query tokens on, that is fewer,
    whatever the length of the context.

    As for `decode_mla`, the entries of the new tokens must already be in the cache, and the mask is causal and aligned
    to the end: query token t of Q sees the first `seq_len - Q + 1 + t` tokens.  New tokens are read back from the
    cache, like all others.  With quantised entries, all query tokens therefore see the values that later steps see, and
    a prompt has the same entries whether it is prefilled at once or in chunks.

    The last Q tokens of each request are expanded and attended to at once.  Earlier tokens are expanded in chunks of
    bounded memory, in a loop over the longest request; the parts are merged by their log-sum-exps.

    On Hopper, cuDNN computes the attention of bfloat16 and float16 queries whose heads have up to 256 values, in
    multiples of 8.  As in `decode_mla` on GPUs, inf or NaN in a token that some query tokens of the request see may
    then reach those that do not see it.  All other calls, and those with `implementation="xla"`, run on XLA.  Tokens
    that no query token sees have no influence.  Unlike in `decode_mla`, a token in a block outside the cache is not
    masked, but has an entry of zeros, and so have all tokens if a traced layer is outside the cache.

    Args:
      q_nope: float [B, Q, H, N], queries without their rotary part.
      q_pe: [B, Q, H, P], rotary queries after RoPE, the dtype of `q_nope`.
      w_uk: [H, N, R], the dtype of `q_nope`.
      w_uv: [H, V, R], the dtype of `q_nope`.
      cache: a cache of `MLAEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: static number, the model's own softmax scale.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      expanded_bytes: static bound on the bytes of the expanded keys and values of a chunk of earlier tokens; 256 MiB by
        default.  Temporary memory is up to about four times that.  A chunk has at least one token of each request, even
        if that exceeds the bound.  The last Q tokens are expanded at once, because queries and results are as large.
      return_lse: also return the log-sum-exp of the scores.
      implementation: None (the best that supports the call), a name, or a sequence of names, for reading the cache.

    Returns:
      out [B, Q, H, V], of q_nope's dtype; with `return_lse` also lse, float32 [B, Q, H], natural logarithm.  A query
      that sees no token gets 0 and -inf.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, MLAEntry)
    dims, dtype = mla_dims(cache), (str(getattr(q_nope, "dtype", None)),)
    dims.check("q_nope", q_nope, "B Q H N")
    dims.check("q_pe", q_pe, "B Q H P", dtype)
    dims.check("w_uk", w_uk, "H N R", dtype)
    dims.check("w_uv", w_uv, "H V R", dtype)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    scale = _static_scale(scale)
    most_bytes = positive_int("expanded_bytes", expanded_bytes, below=None)
    block_tables, seq_lens, layer = int32(block_tables), int32(seq_lens), layer_index(layer, cache)
    options = {"layer": layer, "kv_scale": entry_scale("kv_scale", kv_scale, cache), "implementation": implementation}
    # As for kernels: the user's program may have stricter rules than JAX's default ones.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        if checks.checking():
            check_entries(cache, block_tables, jnp.zeros_like(seq_lens), seq_lens, layer)
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        out, lse = _prefill(q, w_uk, w_uv, cache, block_tables, seq_lens, scale, most_bytes, options)
    return (out, lse) if return_lse else out


def _prefill(q, w_uk, w_uv, cache, block_tables, seq_lens, scale, most_bytes, options) -> tuple[jax.Array, jax.Array]:
    """`prefill_mla` of queries [B, Q, H, N + P]: out and lse.  `options` are those of `gather_mla`."""
    batch, tokens, heads, key_dim = q.shape
    value_dim = w_uv.shape[1]
    attention = _attention(q.dtype, key_dim, value_dim, options["implementation"])
    lengths = lengths_in_table(seq_lens, block_tables, cache.layout.block_size)
    new = jnp.minimum(lengths, tokens)
    cached = lengths - new
    # A request of fewer than Q tokens has padding before them.  It moves to the end, where masks expect it.
    padding = tokens - new
    q = _shifted(q, padding)

    def keys_and_values(first, counts, size):
        """Those of `counts` [B] tokens, at most `size`, from positions `first` [B] on."""
        return _expanded(*_gathered(cache, block_tables, first, counts, size, q.dtype, options), w_uk, w_uv)

    found = attention(q, *keys_and_values(cached, new, tokens), new, new, scale=scale, causal=True)
    if (most := table_tokens(block_tables, cache.layout.block_size) - tokens) > 0:
        size = _chunk(most, most_bytes // (batch * heads * (key_dim + value_dim) * q.dtype.itemsize))
        splits = 1 if attention is expanded.attention else _splits(size, batch * heads * tokens)

        def with_chunk(i, state):
            first = jnp.minimum(i * size, cached)
            counts = jnp.minimum(cached - first, size)
            k, v = keys_and_values(first, counts, size)
            if splits == 1:
                return _merged(*state, *attention(q, k, v, new, counts, scale=scale, causal=False))
            # Parts of the keys become requests of their own.
            k, v = (x.reshape(batch * splits, size // splits, *x.shape[2:]) for x in (k, v))
            starts = jnp.arange(splits, dtype=jnp.int32) * (size // splits)
            lengths = jnp.clip(counts[:, None] - starts, 0, size // splits).reshape(-1)
            queries, q_lens = (jnp.repeat(x, splits, axis=0) for x in (q, new))
            parts = attention(queries, k, v, q_lens, lengths, scale=scale, causal=False)
            for out, lse in zip(*(jnp.moveaxis(x.reshape(batch, splits, *x.shape[1:]), 1, 0) for x in parts), strict=True):
                state = _merged(*state, out, lse)
            return state

        def with_cached(out, lse):
            out, lse = lax.fori_loop(0, -(-cached.max() // size), with_chunk, (out.astype(jnp.float32), lse))
            return out.astype(q.dtype), lse

        # Without cached tokens, the results are not converted to float32 and back.
        found = lax.cond(cached.max() > 0, with_cached, lambda *found: found, *found)
    out, lse = found
    return _padded(out, padding, 0), _padded(lse, padding, -jnp.inf)


def _static_scale(scale) -> float:
    """`scale` as a Python float; ValueError unless it is a number that is finite in float32."""
    number = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not number or not np.isfinite(in_float32(scale)):
        raise ValueError(f"`scale` is {scale!r}: expected a number, finite in float32 (it is static)")
    return float(scale)


def _attention(dtype, key_dim: int, value_dim: int, implementation):
    """The function that computes attention to expanded keys and values."""
    if _only_xla(implementation) or any(cudnn.unsupported_reasons(dtype, key_dim, value_dim)):
        return expanded.attention
    return cudnn.attention


def _only_xla(implementation) -> bool:
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


def _merged(out, lse, other_out, other_lse) -> tuple[jax.Array, jax.Array]:
    """Merges two parts, in the dtype of `out`.  A part without keys has out 0 and lse -inf.

    `merge_states` would take a NaN in `lse`, which a NaN in the cache causes, for a part without keys.
    """
    total = jnp.logaddexp(lse, other_lse)
    top = jnp.where(total == -jnp.inf, 0, total)
    weight, other_weight = (jnp.exp(part - top)[..., None] for part in (lse, other_lse))
    return out * weight + other_out.astype(out.dtype) * other_weight, total


def _shifted(x, by):
    """x [B, Q, ...] whose row t is row t + by of `x`, or else its first or last row; `by` is [B]."""
    rows = jnp.clip(jnp.arange(x.shape[1], dtype=jnp.int32) + by[:, None], 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), axis=1)


def _padded(x, padding, fill):
    """x [B, Q, ...] behind `padding` [B] rows of `fill`; the rows that do not fit are dropped."""
    live = jnp.arange(x.shape[1], dtype=jnp.int32) >= padding[:, None]
    return jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), _shifted(x, -padding), jnp.asarray(fill, x.dtype))


def _gathered(cache, block_tables, first, counts, size, dtype, options):
    """kv_c [B, size, R] and k_pe [B, size, P] of `counts` tokens per request, from positions `first` on, then zeros."""
    batch = len(counts)
    runs = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    packed = gather_mla(cache, block_tables, runs, total=batch * size, dtype=dtype, seq_starts=first, **options)
    if batch == 1:
        return tuple(part[None] for part in packed)
    token = jnp.arange(size, dtype=jnp.int32)
    live = token < counts[:, None]
    rows = jnp.where(live, runs[:-1, None] + token, 0)
    return tuple(jnp.where(live[..., None], part[rows], 0) for part in packed)


def _expanded(kv_c, k_pe, w_uk, w_uv) -> tuple[jax.Array, jax.Array]:
    """Keys [B, S, H, N + P] and values [B, S, H, V] of latents [B, S, R] and rotary keys [B, S, P]."""
    # Products of float32 values must not be rounded to tf32.
    precision = lax.Precision.HIGHEST if kv_c.dtype == jnp.float32 else None
    k_nope = jnp.einsum("bsr,hnr->bshn", kv_c, w_uk, precision=precision)
    v = jnp.einsum("bsr,hvr->bshv", kv_c, w_uv, precision=precision)
    k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:-1], k_pe.shape[-1]))
    return jnp.concatenate([k_nope, k_pe], axis=-1), v
