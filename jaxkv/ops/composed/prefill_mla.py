"""Attention of many new tokens to the cache, by keys and values that are expanded from latents."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, overload, override

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    check_cache,
    entry_scale,
    int32,
    layer_index,
    mla_dims,
    positive_int,
    running_sum,
    static_bool,
    static_scale,
)
from jaxkv.dispatch import Implementations
from jaxkv.ops.attention import check_entries, decode_mla
from jaxkv.ops.composed.parts import CHUNK_BYTES, Context, InParts, aligned, merged, only_xla, sums_from_0, with_chunks
from jaxkv.ops.gathers import gather_mla
from jaxkv.ops.plan import DecodePlan
from jaxkv_kernels import cudnn
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.xla import expanded


def attend_expanded(*args, **kwargs):
    """`attend_expanded` of `jaxkv_kernels.mosaic_gpu.prefill`, which imports Pallas."""
    from jaxkv_kernels.mosaic_gpu.prefill import attend_expanded

    return attend_expanded(*args, **kwargs)


def unsupported_heads(dtype, nope: int, rope: int, value: int) -> Iterable[str]:
    """The reasons against `attend_expanded` for such heads, also those of this machine."""
    from jaxkv_kernels.mosaic_gpu.prefill import unsupported_reasons

    return unsupported_reasons(dtype, nope, rope, value)


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
"""New tokens per request from which on models expand keys and values on GPUs, if only cuDNN attends to them.

With 512, that was not faster on an H200; with 8,192, it was.  Nothing in between was measured."""
LEAST_WITH_KERNEL = 256
"""The same if `attend_expanded` supports the heads."""


def prefers_expansion(q_len: int, dtype, *, latent: int, rope: int, nope: int, value: int, implementation=None) -> bool:
    """Whether models call `prefill_mla` instead of `decode_mla` for `q_len` new tokens of `dtype`.

    It must need fewer flops.  On a GPU, where `decode_mla` has kernels, cuDNN must also support the heads, and there
    must be at least `LEAST_WITH_KERNEL` or `LEAST_ON_GPUS` new tokens.

    Flops are not everything.  In a layer of DeepSeek-V2-Lite (16 heads, bfloat16) on an H200, the attention kernel of
    8,192 new tokens takes 0.8 ms instead of 5.4.  For 512 new tokens after 32,768 cached ones, the kernel takes 0.25 ms
    (cuDNN 0.34, absorbed attention 0.81), expanding the cached tokens 0.19, and joining their keys, which only cuDNN
    needs, 0.10.  Tables with room for more tokens than are cached make that worse (see `FEW_CHUNKS`).
    """
    pays = expansion_pays(q_len, latent=latent, nope=nope, value=value)
    if jax.default_backend() != "gpu" or only_xla(implementation):
        return pays
    if any(cudnn.unsupported_reasons(dtype, nope + rope, value)):
        return False
    by_kernel = not any(unsupported_heads(dtype, nope, rope, value))
    return pays and q_len >= (LEAST_WITH_KERNEL if by_kernel else LEAST_ON_GPUS)


@overload
def prefill_mla(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    kv_scale: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_decodes: int = 0,
    plan: DecodePlan | None = None,
    expanded_bytes: int = CHUNK_BYTES,
    return_lse: Literal[False] = False,
    implementation: Implementations | None = None,
) -> jax.Array: ...
@overload
def prefill_mla(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    kv_scale: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_decodes: int = 0,
    plan: DecodePlan | None = None,
    expanded_bytes: int = CHUNK_BYTES,
    return_lse: Literal[True],
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def prefill_mla(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    scale: float,
    kv_scale: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_decodes: int = 0,
    plan: DecodePlan | None = None,
    expanded_bytes: int = CHUNK_BYTES,
    return_lse: bool = False,
    implementation: Implementations | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
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

    With `cu_q_lens`, the batch is ragged: requests have different numbers of query tokens, and their rows follow one
    another.  The cached tokens of all requests are then expanded in chunks of one sequence, so that the work depends on
    how many there are, not on the longest request.  Requests that are decoding may come first: `decode_mla` computes
    the rows of the first `num_decodes` requests, because expanding cached tokens does not pay for one query token.

    On Hopper, cuDNN computes the attention of bfloat16 and float16 queries whose heads have up to 256 values, in
    multiples of 8; a kernel of this library that to earlier tokens, for keys of 128 + 64 and values of 128 and without
    `cu_q_lens`.  As in `decode_mla` on GPUs, inf or NaN in a token that some query tokens of the request see may
    then reach those that do not see it.  All other calls, and those with `implementation="xla"`, run on XLA.  Tokens
    that no query token sees have no influence.  Unlike in `decode_mla`, a token in a block outside the cache is not
    masked, but has an entry of zeros, and so have all tokens if a traced layer is outside the cache.

    Args:
      q_nope: float [B, Q, H, N], queries without their rotary part; [T, H, N] with `cu_q_lens`.
      q_pe: [B, Q, H, P] or [T, H, P], rotary queries after RoPE, the dtype of `q_nope`.
      w_uk: [H, N, R], the dtype of `q_nope`.
      w_uv: [H, V, R], the dtype of `q_nope`.
      cache: a cache of `MLAEntry`; its entries are converted to the queries' dtype.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length are ignored.
      seq_lens: int32 [B], tokens of each request, the new ones included; 0 for a request without tokens.  Values are
        clamped to the range from 0 to M * block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      scale: static number, the model's own softmax scale.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      cu_q_lens: int32 [B + 1], for a ragged batch: running sum of the numbers of query tokens, from 0, as in
        `decode_mla`.  The queries of request b are rows cu_q_lens[b] to cu_q_lens[b + 1] - 1, and belong to its last
        tokens.  Rows from the last sum on are padding, and query tokens past the last row are left out.
      num_decodes: static number of requests at the beginning of a ragged batch that are decoding.  Each has one row:
        cu_q_lens[b] is b for b = 0 to `num_decodes`.  Its `seq_lens` may be 0.
      plan: what `plan_decode` returned for the requests that are decoding, as in `decode_mla`.
      expanded_bytes: static bound on the bytes of the expanded keys and values of a chunk of earlier tokens; 256 MiB by
        default.  Temporary memory is up to about four times that.  A chunk has at least one token of each request (one
        token in all with `cu_q_lens`), even if that exceeds the bound.  The new tokens are expanded at once, because
        queries and results are as large.
      return_lse: also return the log-sum-exp of the scores.
      implementation: None (the best that supports the call), a name, or a sequence of names, for reading the cache.

    Returns:
      out [B, Q, H, V] or [T, H, V], of q_nope's dtype; with `return_lse` also lse, float32 [B, Q, H] or [T, H], natural
      logarithm.  A query that sees no token gets 0 and -inf, and so does padding.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong; `num_decodes` exceeds the requests or the rows;
        `num_decodes` or `plan` is passed without `cu_q_lens`, or `plan` was made for another shape or dtype.
    """
    return_lse = static_bool("return_lse", return_lse)
    check_cache(cache, MLAEntry)
    dims, dtype = mla_dims(cache), (str(getattr(q_nope, "dtype", None)),)
    rows = "B Q" if cu_q_lens is None else "T"
    q_nope = dims.check("q_nope", q_nope, f"{rows} H N")
    q_pe = dims.check("q_pe", q_pe, f"{rows} H P", dtype)
    w_uk = dims.check("w_uk", w_uk, "H N R", dtype)
    w_uv = dims.check("w_uv", w_uv, "H V R", dtype)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    scale = static_scale(scale)
    most_bytes = positive_int("expanded_bytes", expanded_bytes, below=None)
    block_tables, seq_lens, layer = int32(block_tables), int32(seq_lens), layer_index(layer, cache)
    options = {"layer": layer, "kv_scale": entry_scale("kv_scale", kv_scale, cache), "implementation": implementation}
    if cu_q_lens is not None:
        if not dims["T"]:
            raise ValueError(f"`q_nope` has shape {tuple(q_nope.shape)}: expected [T, H, N] with T at least 1")
        dims.check_running_sum("cu_q_lens", cu_q_lens)
    _check_decodes(num_decodes, plan, cu_q_lens, dims)
    # As for kernels: the user's program may have stricter rules than JAX's default ones.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        if data_checks.checking():
            seen = seq_lens if cu_q_lens is None else jnp.where(jnp.diff(int32(cu_q_lens)) > 0, seq_lens, 0)
            check_entries(cache, block_tables, jnp.zeros_like(seen), seen, layer)
            if cu_q_lens is not None:
                _check_rows(int32(cu_q_lens), len(q_nope), num_decodes)
        context = _Latents(cache, block_tables, seq_lens, scale, most_bytes, options, w_uk, w_uv)
        if cu_q_lens is None:
            out, lse = aligned(context, jnp.concatenate([q_nope, q_pe], axis=-1))
        else:
            out, lse = _ragged(context, q_nope, q_pe, running_sum(cu_q_lens), num_decodes, plan)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Latents(Context):
    """Attention to keys and values that are expanded from latents."""

    w_uk: jax.Array
    w_uv: jax.Array

    @property
    @override
    def value_shape(self):
        heads, value_dim, _ = self.w_uv.shape
        return heads, value_dim

    @override
    def entries(self, first, counts, total, dtype):
        runs = sums_from_0(counts)
        options: dict[str, Any] = {**self.options, "total": total, "dtype": dtype, "seq_starts": first}
        return gather_mla(self.cache, self.block_tables, runs, **options)

    @override
    def in_parts(self, q):
        nope, value = self.w_uk.shape[1], self.w_uv.shape[1]
        rope = q.shape[-1] - nope
        if self.attention(q) is not cudnn or any(unsupported_heads(q.dtype, nope, rope, value)):
            return None

        def attend(q, kv_c, k_pe, kv_lens):
            k_nope, v = self._products(kv_c)
            return attend_expanded(q, k_nope, k_pe, v, kv_lens, scale=self.scale)

        from jaxkv_kernels.mosaic_gpu.prefill import TILE_ROWS

        return InParts(attend, rope, TILE_ROWS)

    def _products(self, kv_c):
        """Keys [..., H, N], without their rotary part, and values [..., H, V] of latents [..., R]."""
        # Products of float32 values must not be rounded to tf32.
        precision = lax.Precision.HIGHEST if kv_c.dtype == jnp.float32 else None
        k_nope = jnp.einsum("...r,hnr->...hn", kv_c, self.w_uk, precision=precision)
        return k_nope, jnp.einsum("...r,hvr->...hv", kv_c, self.w_uv, precision=precision)

    @override
    def expand(self, first_part, second_part):
        k_pe = second_part
        k_nope, v = self._products(first_part)
        k_pe = jnp.broadcast_to(k_pe[..., None, :], (*k_nope.shape[:-1], k_pe.shape[-1]))
        return jnp.concatenate([k_nope, k_pe], axis=-1), v


def _ragged(context: _Latents, q_nope, q_pe, cu_q_lens, decodes: int, plan) -> tuple[jax.Array, jax.Array]:
    """`prefill_mla` of queries [T, H, N] and [T, H, P]: out and lse.  The first `decodes` requests are decoding."""
    parts = []
    if decodes:
        first = replace(context, block_tables=context.block_tables[:decodes], seq_lens=context.seq_lens[:decodes])
        parts.append(_decoding(first, q_nope[:decodes], q_pe[:decodes], plan))
    if decodes < len(q_nope):
        others = replace(context, block_tables=context.block_tables[decodes:], seq_lens=context.seq_lens[decodes:])
        q = jnp.concatenate([q_nope[decodes:], q_pe[decodes:]], axis=-1)
        parts.append(_prefilling(others, q, cu_q_lens[decodes:] - decodes))
    out, lse = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    return out, lse


def _decoding(context: _Latents, q_nope, q_pe, plan) -> tuple[jax.Array, jax.Array]:
    """The rows of requests with one query token each: absorbed attention."""
    precision = lax.Precision.HIGHEST if q_nope.dtype == jnp.float32 else None
    q_latent = jnp.einsum("bhn,hnr->bhr", q_nope, context.w_uk, precision=precision)
    out, lse = decode_mla(
        q_latent, q_pe, context.cache, context.block_tables, context.seq_lens, scale=context.scale, plan=plan,
        return_lse=True, **context.options,
    )  # fmt: skip
    out = out[..., : context.w_uv.shape[-1]]  # formats of DeepSeek V4 also sum rotary parts
    return jnp.einsum("bhr,hvr->bhv", out, context.w_uv, precision=precision), lse


def _prefilling(context: _Latents, q, cu_q_lens) -> tuple[jax.Array, jax.Array]:
    """The rows of requests that follow one another in q [T, H, N + P]."""
    rows, heads, _ = q.shape
    if not len(context.block_tables):
        return jnp.zeros((rows, heads, context.w_uv.shape[1]), q.dtype), jnp.full((rows, heads), -jnp.inf)
    module = context.attention(q)
    attend = partial(module.ragged_attention, scale=context.scale)
    sums = jnp.clip(cu_q_lens, 0, rows)
    starts, ends = sums[:-1], sums[1:]
    # The query tokens of a request that are past the last row are its last ones.
    left_out = jnp.diff(jnp.maximum(cu_q_lens, rows))
    # Nothing is read for a request without query tokens.
    lengths = jnp.where(ends > starts, jnp.maximum(context.lengths - left_out, 0), 0)
    new = jnp.minimum(lengths, ends - starts)
    cached = lengths - new

    def part(first, counts, size, *, causal):
        """Attention to `counts` [B] tokens, at most `size` in all, from positions `first` [B] on."""
        k, v = context.expand(*context.entries(first, counts, size, q.dtype))
        return attend(q, k, v, ends - new, new, sums_from_0(counts)[:-1], counts, causal=causal)

    found = part(cached, new, rows, causal=True)
    before = sums_from_0(cached)
    size = context.chunk(len(lengths) * context.capacity, q)

    def with_chunk(i, state):
        first, last = (jnp.clip(bound - before[:-1], 0, cached) for bound in (i * size, (i + 1) * size))
        return merged(state, part(first, last - first, size, causal=False))

    most = None if module is expanded else -(-len(lengths) * context.capacity // size)
    return with_chunks(found, with_chunk, -(-before[-1] // size), most)


def _check_decodes(num_decodes, plan, cu_q_lens, dims) -> None:
    """ValueError unless `num_decodes` is the number of requests of the batch that may be decoding."""
    if isinstance(num_decodes, bool) or not isinstance(num_decodes, int) or num_decodes < 0:
        raise ValueError(f"`num_decodes` is {num_decodes!r}: expected a static int, 0 or more")
    if cu_q_lens is None and (num_decodes or plan is not None):
        raise ValueError("`num_decodes` and `plan` are for ragged batches: pass `cu_q_lens`, too")
    if cu_q_lens is not None and num_decodes > min(dims["B"], dims["T"]):
        raise ValueError(
            f"`num_decodes` is {num_decodes}: expected at most the {dims['B']} requests and {dims['T']} query tokens"
        )
    if plan is not None and not num_decodes:
        raise ValueError("`plan` is for the requests that are decoding, and `num_decodes` is 0: expected None")


def _check_rows(cu_q_lens, rows: int, decodes: int) -> None:
    """Checks that requests have rows of the queries, and those that are decoding one each."""
    steps = jnp.diff(cu_q_lens, prepend=cu_q_lens[:1])
    number = jnp.arange(len(cu_q_lens), dtype=jnp.int32)
    data_checks.require(cu_q_lens[:1] == 0, "cu_q_lens", cu_q_lens[:1], "a running sum starts at 0")
    data_checks.require(steps >= 0, "cu_q_lens", cu_q_lens, "a running sum never falls")
    data_checks.require(cu_q_lens <= rows, "cu_q_lens", cu_q_lens, f"there are {rows} query tokens")
    alone = (number > decodes) | (cu_q_lens == number)
    data_checks.require(alone, "cu_q_lens", cu_q_lens, f"each of the first {decodes} requests has one row")
