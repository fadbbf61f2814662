"""The derivatives of attention in both modes, for every implementation: from the results of its kernel, in plain JAX.

While the log-sum-exp L of a query is held fixed, its keys do not depend on each other.  For its scores s_i and values
v_i, let

    N = sum_i exp(s_i - L) v_i,    which is the result `out`,
    D = sum_i exp(s_i - L),        which is 1.

Because L is log(sum_i exp(s_i)), the tangents of the results are linear in those of N and D:

    d lse = dD
    d out = dN - out dD

`_sums` computes N and D over a chunk of keys, JAX differentiates it, and a scan adds the chunks up.  In reverse mode,
JAX transposes the scan.  A step keeps no scores for that: it computes those of its chunk again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxkv_kernels.addressing import (
    Buffer,
    lengths_in_table,
    load_entries,
    ragged_slots,
    scale_at,
    slots_for,
    sums_from_0,
    table_tokens,
)
from jaxkv_kernels.calls import Call, DecodeCall, DecodeKV, DecodeMLA, DecodeMLASparse, PrefillKV, PrefillMLA
from jaxkv_kernels.extra_slots import ExtraSlots
from jaxkv_kernels.gradients import INSTEAD
from jaxkv_kernels.scores import CHUNK_TOKENS, capped
from jaxkv_kernels.xla.attention import per_token
from jaxkv_kernels.xla.expanded import LEAST_KEYS, SCORES_BYTES, owners
from jaxkv_kernels.xla.paged import query_ranges
from jaxkv_kernels.xla.softmax import sums_of_seen
from jaxkv_kernels.xla.sparse import used_slots
from jaxkv_kernels.xla.visible import Visible

Attention = DecodeMLA | DecodeKV | DecodeMLASparse | PrefillMLA | PrefillKV
"""The calls whose derivatives are computed here."""


def has_tangents(call: Call[Any]) -> bool:
    """Whether `with_tangents` supports the call.

    The largest logits have no tangents here.  Only `xla` returns them, by a loop that JAX differentiates in both modes.
    """
    return isinstance(call, Attention) and not (isinstance(call, DecodeMLASparse) and call.max_logits)


@jax.custom_jvp
def with_tangents(call, results):
    """`results`, (out, lse) or (out, lse, None), of a kernel for `call`, with derivatives with respect to its floats.

    Entries have derivatives if their values are stored as they are, in a buffer of their dtype.  Otherwise,
    differentiating the buffer raises NotImplementedError.

    The kernel itself must not be differentiated: it gets the call behind `jax.lax.stop_gradient`.  It does not run
    within a `custom_jvp`, because programs with Pallas's references there do not compile with jax 0.11.
    """
    del call
    return results


def _rule(primals, tangents):
    (call, results), (moved, _) = primals, tangents
    # JAX may trace this later, when the user's program has stricter rules than JAX's default ones.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        results = with_tangents(call, results)
        return results, _tangents(call, results, moved)


with_tangents.defjvp(_rule, symbolic_zeros=True)


def _tangents(call: Attention, results, moved: Any):
    """The tangents of `results` (out, lse, ...), if those of the call are `moved`."""
    out, lse, *rest = results
    parts = _parts(call)
    if not parts:  # no requests
        return jax.tree.map(jnp.zeros_like, results)
    found = [_sum_tangents(part, call, moved, results) for part in parts]
    of_sums, of_weights = (reduce(jnp.add, x).reshape(*lse.shape, -1) for x in zip(*found, strict=True))
    of_total = of_weights
    if isinstance(call, DecodeMLASparse) and call.sinks is not None:
        # `out` is multiplied by the share that sinks leave to the keys.
        share = jax.nn.sigmoid(jnp.where(lse == -jnp.inf, 0, lse) - call.sinks)[..., None]
        of_sinks = 0 if _is_zero(moved.sinks) else moved.sinks[:, None]
        of_sums, of_total = share * of_sums, share * of_weights + (1 - share) * of_sinks
    of_out = of_sums - out.astype(jnp.float32) * of_total
    return (of_out.astype(out.dtype), of_weights[..., 0], *rest)


def _is_zero(tangent) -> bool:
    """Whether a tangent is known to be 0, because its argument does not depend on what is differentiated."""
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


@dataclass(frozen=True)
class _Part:
    """The keys of one cache: K for each of N sequences, whose Q query tokens attend to them."""

    of: Callable[[Any], Any]
    """The cache in a call: the call itself, or its `extra`."""
    slots: jax.Array
    """int32 [N, K]; keys at slots outside the cache are absent."""
    seen: Callable[[jax.Array], jax.Array]
    """Whether each query token sees the keys of these numbers [S], if they are in the cache: bool [N, Q, S]."""
    operands: Callable[[Any, Any, jax.Array, jax.Array], Sequence[jax.Array]]
    """`operands(call, entry, rows, slots)` returns queries [N, Q, H, G, D], keys [N, S, H, D] and values [N, S, H, V],
    all in float32, if `rows` [N, S, heads, width] are the encoded entries at `slots` [N, S]."""
    absent_seen: bool = False
    """Whether queries see keys outside the cache, too, as entries of 0."""


def _parts(call: Attention) -> list[_Part]:
    if isinstance(call, DecodeCall):
        return [_decode_part(call)]
    if isinstance(call, DecodeMLASparse):
        own = ExtraSlots(call.buffer, call.slots, call.counts, call.layer, call.kv_scale, call.pages, call.entry)
        parts = [_sparse_part(call, own, lambda call: call)]
        return parts if call.extra is None else [*parts, _sparse_part(call, call.extra, lambda call: call.extra)]
    if call.cu_q_lens is None:
        return [_prefill_part(call)]
    return [_ragged_part(call, call.cu_q_lens)] if len(call.block_tables) else []


def _decode_part(call: DecodeMLA | DecodeKV) -> _Part:
    slots, lengths = _slots_and_lengths(call)
    visible = Visible.of(call, lengths, call.q_len, call.trailing, call.tree)
    dtype, kv_heads = call.dtype, call.pages.num_heads

    def latents(call, entry, rows, slots):
        return _latent_queries(call), *_stored(entry, rows, slots, (call.kv_scale, call.kv_scale), dtype)

    def keys_and_values(call, entry, rows, slots):
        return _grouped(call.q, kv_heads), *_stored(entry, rows, slots, (call.k_scale, call.v_scale), dtype)

    return _Part(_itself, slots, visible.of_keys, latents if isinstance(call, DecodeMLA) else keys_and_values)


def _sparse_part(call: DecodeMLASparse, cache: ExtraSlots, of: Callable[[Any], Any]) -> _Part:
    """Each query token is a sequence of its own."""
    slots, dtype = used_slots(cache), call.q_latent.dtype

    def operands(call, entry, rows, slots):
        q = _latent_queries(call)
        return q.reshape(-1, 1, *q.shape[2:]), *_stored(entry, rows, slots, (of(call).kv_scale,) * 2, dtype)

    return _Part(of, slots, lambda keys: jnp.ones((len(slots), 1, keys.size), bool), operands)


def _prefill_part(call: PrefillMLA | PrefillKV) -> _Part:
    slots, lengths = _slots_and_lengths(call)
    begins, ends = query_ranges(lengths, _query_tokens(call), call.window, call.ahead)
    return _Part(_itself, slots, partial(_between, begins, ends), _expanded(call), absent_seen=True)


def _ragged_part(call: PrefillMLA | PrefillKV, cu_q_lens: jax.Array) -> _Part:
    """All query tokens are those of one sequence, in which the tokens of the requests follow one another."""
    rows, (slots, lengths) = _query_tokens(call), _slots_and_lengths(call)
    sums = jnp.clip(cu_q_lens, 0, rows)
    request, token = owners(sums[:-1], jnp.diff(sums), rows)
    # Query tokens past the last row are the last ones of their request.
    last = jnp.diff(jnp.maximum(cu_q_lens, rows)) + jnp.diff(sums) - 1
    trailing = last[request] - token
    begins, ends = query_ranges(lengths[request], 1, call.window, call.ahead, trailing)
    starts = sums_from_0(lengths)
    begins, ends = (starts[request] + jnp.where(token < 0, 0, x[:, 0]) for x in (begins, ends))
    slots = ragged_slots(call.block_tables, starts, total=slots.size, block_size=call.pages.block_size)
    seen = partial(_between, begins[None], ends[None])
    return _Part(_itself, slots[None], seen, _expanded(call), absent_seen=True)


def _query_tokens(call: PrefillMLA | PrefillKV) -> int:
    """Query tokens per request, or all of a ragged batch."""
    return (call.q_nope if isinstance(call, PrefillMLA) else call.q).shape[-3]


def _itself(call):
    return call


def _slots_and_lengths(call: DecodeCall | PrefillMLA | PrefillKV) -> tuple[jax.Array, jax.Array]:
    """The slots [B, K] of all tokens for which the tables have room, and how many tokens each request has."""
    block_size = call.pages.block_size
    positions = jnp.arange(table_tokens(call.block_tables, block_size), dtype=jnp.int32)
    wide = jnp.broadcast_to(positions, (len(call.block_tables), positions.size))
    lengths = lengths_in_table(call.seq_lens, call.block_tables, block_size)
    return slots_for(call.block_tables, wide, block_size=block_size), lengths


def _between(begins, ends, keys) -> jax.Array:
    """Whether query tokens see `keys` [S], those from `begins` to `ends` [N, Q]: bool [N, Q, S]."""
    return (keys >= begins[..., None]) & (keys < ends[..., None])


def _latent_queries(call) -> jax.Array:
    """Queries [B, Q, 1, Hq, R + P]."""
    return jnp.concatenate([call.q_latent, call.q_pe], axis=-1).astype(jnp.float32)[:, :, None]


def _grouped(q, kv_heads: int) -> jax.Array:
    """Queries [B, Q, Hq, D], or [1, Q, Hq, D] of ragged ones [Q, Hq, D], as [B, Q, H, Hq / H, D]."""
    *rows, heads, width = q.shape
    return q.astype(jnp.float32).reshape(-1, rows[-1], kv_heads, heads // kv_heads, width)


def _stored(entry, rows, slots, scales, dtype) -> list[jax.Array]:
    """Keys [N, S, H, D] and values [N, S, H, V] of encoded entries, converted and scaled as decodes do it."""
    if entry.codec.in_float32 or any(map(per_token, scales)):
        dtype = jnp.float32
    by_token = [scale_at(scale, slots) if per_token(scale) else None for scale in scales]
    found = entry.keys_and_values(rows, dtype, by_token)
    factors = [1 if scale is None or per_token(scale) else scale.reshape(-1, 1) for scale in scales]
    return [x.astype(jnp.float32) * factor for x, factor in zip(found, factors, strict=True)]


def _expanded(call: PrefillMLA | PrefillKV) -> Callable[[Any, Any, jax.Array, jax.Array], Sequence[jax.Array]]:
    """The `operands` of prefills, whose entries are gathered in the queries' dtype."""
    dtype, kv_heads, precision = call.dtype, call.pages.num_heads, _precision(call.dtype)

    def latents(call, entry, rows, slots):
        kv_c, k_pe = entry.decode(rows[..., 0, :], dtype, (call.kv_scale, call.kv_scale))
        k, v = (
            jnp.einsum("bsr,hdr->bshd", kv_c.astype(jnp.float32), w.astype(jnp.float32), precision=precision)
            for w in (call.w_uk, call.w_uv)
        )
        k_pe = jnp.broadcast_to(k_pe.astype(jnp.float32)[:, :, None], (*k.shape[:-1], k_pe.shape[-1]))
        q = jnp.concatenate([call.q_nope, call.q_pe], axis=-1)
        return _grouped(q, q.shape[-2]), jnp.concatenate([k, k_pe], axis=-1), v

    def keys_and_values(call, entry, rows, slots):
        scales = [scale_at(scale, slots) for scale in (call.k_scale, call.v_scale)]
        k, v = entry.keys_and_values(rows, dtype, scales)
        return _grouped(call.q, kv_heads), k.astype(jnp.float32), v.astype(jnp.float32)

    return latents if isinstance(call, PrefillMLA) else keys_and_values


def _precision(dtype) -> lax.Precision | None:
    """Products of float32 values must not be rounded to tf32, which represents those of 16 bits well enough."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _sum_tangents(part: _Part, call: Attention, moved: Any, results) -> tuple[jax.Array, jax.Array]:
    """The tangents of N [N, Q, H, G, V] and D [N, Q, H, G] over the keys of a part."""
    (out, lse, *_), cache, (sequences, keys) = results, part.of(call), part.slots.shape
    size = min(keys, CHUNK_TOKENS, max(SCORES_BYTES // (4 * lse.size), LEAST_KEYS))
    chunks = -(-keys // size)
    slots = jnp.pad(part.slots, ((0, 0), (0, chunks * size - keys)), constant_values=-1)

    def in_chunks(x):
        return jnp.moveaxis(x.reshape(sequences, chunks, size, *x.shape[2:]), 1, 0)

    # The transpose of the scan adds up the cotangents of its chunks, in the dtype of the tangents: float32.
    leaves, structure = jax.tree_util.tree_flatten_with_path(call)
    arrays = [array for _, array in leaves]
    changes = {
        i: tangent.astype(jnp.float32)
        for i, ((path, _), tangent) in enumerate(zip(leaves, jax.tree.leaves(moved), strict=True))
        if not _is_zero(tangent) and not any(getattr(key, "name", None) == "buffer" for key in path)
    }
    values = {i: arrays[i].astype(jnp.float32) for i in changes}
    entry, row_changes, moved_buffer = cache.entry, None, _moved_buffer(call.operation, cache, part.of(moved).buffer)
    if moved_buffer is not None:
        entry = replace(entry, format="f32")  # the same elements, in a buffer of float32
        row_changes = in_chunks(load_entries(moved_buffer, cache.pages, entry, slots, cache.layer)[0])

    def sums(values, rows, slots, shown, present):
        given = jax.tree.unflatten(structure, [values.get(i, array) for i, array in enumerate(arrays)])
        q, k, v = part.operands(given, entry, rows, slots)
        k, v = (jnp.where(present[:, :, None, None], x, 0) for x in (k, v))
        return _sums(q, k, v, shown, lse.reshape(q.shape[:-1]), given.scale, call.logit_cap, _precision(out.dtype))

    def tangents(chunk, values, changes):
        numbers, slots, row_changes = chunk
        seen = part.seen(numbers)

        def compute():
            rows, valid = load_entries(cache.buffer, cache.pages, cache.entry, slots, cache.layer)
            shown = seen if part.absent_seen else seen & valid[:, None]
            present = valid & shown.any(axis=1)
            # Mask before anything is computed from the entries, because 0 * NaN is NaN.
            rows = jnp.where(present[:, :, None, None], rows, jnp.zeros((), rows.dtype))
            of_rows = partial(sums, slots=slots, shown=shown, present=present)
            if row_changes is None:
                return jax.jvp(lambda values: of_rows(values, rows), (values,), (changes,))[1]
            return jax.jvp(of_rows, (values, rows.astype(jnp.float32)), (changes, row_changes))[1]

        # Most chunks of a table may have no tokens.
        return lax.cond(seen.any(), compute, lambda: _zeros(compute))

    def step(totals, chunk):
        added = jax.checkpoint(tangents, prevent_cse=False)(chunk, values, changes)
        return jax.tree.map(jnp.add, totals, added), None

    numbers = jnp.arange(chunks * size, dtype=jnp.int32).reshape(chunks, size)
    every_chunk = numbers, in_chunks(slots), row_changes
    zeros = _zeros(lambda: tangents(jax.tree.map(lambda x: x[0], every_chunk), values, changes))
    return lax.scan(step, zeros, every_chunk)[0]


def _sums(q, k, v, shown, lse, scale, logit_cap: float | None, precision) -> tuple[jax.Array, jax.Array]:
    """N [N, Q, H, G, V] and D [N, Q, H, G] over the keys that are `shown`, bool [N, Q, S].

    `q` is [N, Q, H, G, D], `k` [N, S, H, D], `v` [N, S, H, V] and `lse` [N, Q, H, G].  Queries without any key may hold
    NaN, and have no influence.
    """
    empty = lse == -jnp.inf
    q, lse = jnp.where(empty[..., None], 0, q), jnp.where(empty, 0, lse)
    scores = jnp.einsum("bqhgd,bshd->bqhgs", q, k, precision=precision) * scale
    if logit_cap is not None:
        scores = capped(scores, logit_cap)
    weights = jnp.exp(jnp.where(shown[:, :, None, None], scores, -jnp.inf) - lse[..., None])
    return sums_of_seen(weights, v, shown, precision), weights.sum(axis=-1)


def _zeros(function: Callable[[], Any]):
    """Zeros of the shapes of `function()`, which vary over the mesh as its results do in `shard_map`."""

    def zeros(x):
        made, varying = jnp.zeros(x.shape, x.dtype), getattr(x.manual_axis_type, "varying", ())
        return lax.pcast(made, tuple(varying), to="varying") if varying else made

    return jax.tree.map(zeros, jax.eval_shape(function))


def _moved_buffer(operation: str, cache, tangents) -> Buffer | None:
    """The tangents of a buffer in float32, or None if all are 0; NotImplementedError if they have no meaning."""
    arrays, found = jax.tree.leaves(cache.buffer), jax.tree.leaves(tangents)
    if all(map(_is_zero, found)):
        return None
    entry, dtype = cache.entry, arrays[0].dtype
    if entry.quantised or not dtype == entry.dtype == entry.values_dtype:
        raise NotImplementedError(
            f"{operation}: entries of format {entry.label!r} in a buffer of {dtype} have no gradients: keep them in "
            f"format bf16, f16 or f32, in a buffer of the same dtype, {INSTEAD}"
        )
    filled = [
        jnp.zeros(array.shape) if _is_zero(tangent) else tangent.astype(jnp.float32)
        for array, tangent in zip(arrays, found, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(cache.buffer), filled)
