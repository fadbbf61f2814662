"""Context parallelism: the tokens of each request are interleaved over n devices, each with its own cache.

The layout of a device's cache says which tokens it has: with `shards=jaxkv.TokenShards(n, interleave)`, shard
`i // interleave % n` has token i.  A shard stores its tokens packed, one after the other, in blocks of its own cache.
Each shard attends to its own tokens, and the partial results are merged by their log-sum-exps.  Shards differ by at
most `interleave` tokens and shard 0 has the most, so one block table serves all of them: its blocks must hold
`local_lengths(seq_len, shards=layout.shards, shard=0)` tokens.

With DeepSeek V3.2's indexer, each device scores its own tokens, and attends to those of them that are among the best of
all devices.  The calls are those of one device: `indexer_logits`, `select_topk`, `jaxkv.positions_to_slots`,
`decode_mla_sparse`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import FLOATS, QUERIES, Dims, check_cache, describe, index_below, int32, positive_int, window_of
from jaxkv.layout.layout import CacheLayout, TokenShards, checked_shards
from jaxkv.ops import attention, indexer, plan, sparse
from jaxkv.ops.query_chunks import LOGITS_BYTES, in_query_chunks, logits_bytes_of_a_token
from jaxkv.ops.ragged_queries import FEW_ROWS
from jaxkv.ops.slots import slots_for
from jaxkv_kernels.addressing import MAX_SLOTS, table_tokens
from jaxkv_kernels.formats.bits import ordered_bits
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry
from jaxkv_kernels.scores import merged, with_sinks

LAST = 2**31 - 1
"""The rank of positions that are not to be selected."""

MOST_ROWS = 1024
"""Rows of scores (query tokens x query heads of a KV head) for which keys are read once.

From 256 rows on, products take longer than reading does.  More rows need more memory on `xla`.
"""


def local_lengths(seq_lens, *, shards: TokenShards, shard) -> jax.Array:
    """How many of the first `seq_lens` tokens of each request a shard owns.

    Args:
      seq_lens: int32 [...], tokens of each request; negative ones count as 0.
      shards: how tokens are divided, `cache.layout.shards`.
      shard: int, or traced int32 scalar such as `lax.axis_index`.

    Returns:
      int32, the shape of `seq_lens`: the lengths within the shard, 0 where it owns nothing.

    Raises:
      ValueError: a dtype is wrong, `shards` is not TokenShards, or a static shard is out of range.
    """
    interleave = checked_shards(shards).interleave
    shard = index_below("shard", shard, shards.num_shards, "shards")
    seq_lens = jnp.maximum(_ints("seq_lens", seq_lens), 0)
    rounds, rest = jnp.divmod(seq_lens, shards.num_shards * interleave)
    return rounds * interleave + jnp.clip(rest - shard * interleave, 0, interleave)


def local_slots(block_tables, positions, *, layout: CacheLayout, shard) -> jax.Array:
    """Slots of token positions in a shard's cache.

    Every shard passes all new tokens to a write.  The write skips those that other shards own.

    For ragged tokens [T], pass the table of each token's request, `block_tables[request]` [T, M].

    Args:
      block_tables: int32 [B, M], the blocks of each request in the shard's cache, in order.
      positions: int32 [B, ...], token positions of each request, counted from its first token on any shard.
      layout: the layout of the shard's cache.
      shard: int, or traced int32 scalar such as `lax.axis_index`.

    Returns:
      int32, the shape of `positions`; -1 for tokens that other shards own, and where `slots_for` returns -1.

    Raises:
      ValueError: a shape or dtype is wrong, `layout` is not a CacheLayout, or a static shard is out of range.
    """
    if not isinstance(layout, CacheLayout):
        raise ValueError(f"`layout` is {describe(layout)}: expected a CacheLayout, that of a shard's cache")
    positions, shards = _ints("positions", positions), layout.shards
    shard = index_below("shard", shard, shards.num_shards, "shards")
    owner, index = shards.place(positions)
    return slots_for(block_tables, jnp.where((positions >= 0) & (owner == shard), index, -1), layout)


def _window_counts(window: int, shards: TokenShards) -> tuple[int, ...]:
    """How many of `window` consecutive tokens a shard may own, in ascending order: one number or more.

    There is one if `window` is a multiple of `num_shards` * `interleave`, and up to `interleave` + 1 otherwise.
    """
    owned, rounds = shards.largest_share, shards.num_shards * shards.interleave
    return tuple(sorted({owned(start + window) - owned(start) for start in range(rounds)}))


def _whole_lengths(block_tables, seq_lens, layout: CacheLayout) -> jax.Array:
    """Returns `seq_lens` int32 [B], the lengths on all shards together, clamped to what the tables of all shards hold.

    In checked mode, lengths outside that range are errors.
    """
    room = min(layout.shards.capacity(table_tokens(block_tables, layout.block_size)), MAX_SLOTS)
    if data_checks.checking():
        held = f"the tables of {layout.shards.num_shards} devices hold {room} tokens"
        data_checks.require((seq_lens >= 0) & (seq_lens <= room), "seq_lens", seq_lens, held)
    return jnp.clip(seq_lens, 0, room)


class _Requests(NamedTuple):
    """N requests as a shard sees them: one per query token, or per group of query tokens."""

    tables: jax.Array
    """int32 [N, M]."""
    lengths: jax.Array
    """int32 [N], the tokens of the shard that all query tokens of the request may see."""
    windows: tuple[int, ...] = ()
    """The windows on a shard that there are, from `_window_counts`; none without a window."""
    window: jax.Array | None = None
    """int32 [N], which of `windows` each request has."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Their tables and lengths, as arguments of operations."""
        return {"block_tables": self.tables, "seq_lens": self.lengths}


def _requests_of_tokens(
    cache: KVCache, block_tables, seq_lens, dims: Dims, tokens: int, axis, window: int | tuple[int, int] | None = None
) -> _Requests:
    """A request on this shard for each of Q = `tokens` query tokens of B requests, in order: N = B * Q.

    As on one device, lengths are clamped to the capacity of the tables, here of all shards together.  `window` is that
    of the whole request.
    """
    check_cache(cache, Entry)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    block_tables, seq_lens, shards = int32(block_tables), int32(seq_lens), cache.layout.shards
    shard = _shard_along(axis, shards)
    lengths = _whole_lengths(block_tables, seq_lens, cache.layout)
    seen = (lengths[:, None] - (tokens - 1) + jnp.arange(tokens, dtype=jnp.int32)[None]).reshape(-1)
    shares = local_lengths(seen, shards=shards, shard=shard)
    found = _Requests(jnp.repeat(block_tables, tokens, axis=0), shares)
    window, _ = window_of(window, True, table_tokens(block_tables, cache.layout.block_size) * shards.num_shards)
    if window is None:
        return found
    windows = _window_counts(window, shards)
    # As long as the window covers the whole request, so does the largest window of the shard.
    earlier = local_lengths(seen - window, shards=shards, shard=shard)
    before = jnp.where(seen <= window, shares - windows[-1], earlier)
    return found._replace(windows=windows, window=shares - before)


def _group_size(layout: CacheLayout, heads: int, tokens: int) -> int:
    """How many of the `tokens` query tokens of a request attend together: a divisor of this number."""
    few = isinstance(layout.entry, KVEntry) and layout.entry.quantised
    most = (FEW_ROWS if few else MOST_ROWS) // max(heads // layout.num_heads, 1)
    return max(size for size in range(1, tokens + 1) if tokens % size == 0 and size <= max(most, 1))


def _parts(requests: _Requests, group: int, layout: CacheLayout) -> tuple[_Requests, _Requests]:
    """Divides what `requests`, those of query tokens, see.  Each `group` of them are of the same request.

    Returns:
      A request per group: the whole blocks that all query tokens of the group see.
      A request per query token: what it sees after those blocks, in as few columns as suffice.
    """
    size, columns = layout.block_size, requests.tables.shape[1]
    tables, blocks = requests.tables[::group], requests.lengths[::group] // size
    # The rest: less than a block of what the first query token sees, and the tokens that only later ones see.
    most = size - 1 + layout.shards.largest_share(group - 1)
    later = blocks[:, None] + jnp.arange(min(-(-most // size), columns), dtype=jnp.int32)
    after = jnp.take_along_axis(tables, jnp.minimum(later, columns - 1), axis=1)
    rest = _Requests(jnp.repeat(after, group, axis=0), requests.lengths - jnp.repeat(blocks * size, group))
    return _Requests(tables, blocks * size), rest


def _shard_along(axis, shards: TokenShards) -> jax.Array:
    """The shard of the current device, an int32 scalar; ValueError unless the mesh axis has a device per shard."""
    if (size := _axis_size(axis)) != shards.num_shards:
        raise ValueError(
            f"`axis` is {axis!r}, which has {size} devices, and the cache is one of {shards}: expected a cache whose "
            f"layout has `shards=jaxkv.TokenShards({size}, interleave)`"
        )
    return jax.lax.axis_index(axis)


def _axis_size(axis) -> int:
    """The number of devices along a mesh axis; ValueError unless the enclosing `shard_map` has it."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        raise ValueError(f"`axis` is {axis!r}: expected a mesh axis of the shard_map around this call") from None


def _ints(name, values) -> jax.Array:
    Dims().check_ints(name, values, " ".join(f"n{i}" for i in range(len(getattr(values, "shape", ())))))
    return int32(values)


def decode_mla(
    q_latent, q_pe, cache: KVCache, block_tables, seq_lens, *, axis, sinks=None, return_lse=False, **options
) -> Any:
    """`jaxkv.decode_mla` over the tokens of all devices along a mesh axis.  Call it inside `shard_map`.

    Query token t of Q sees the first `seq_len - Q + 1 + t` tokens of the request.  Within a shard, this causal mask is
    not aligned to the end.  The query tokens of a request therefore attend together to the whole blocks that all of
    them see, which are read once, and each one by itself to the few tokens after these.  (They are divided into groups
    if there are more than 1,024 rows, query tokens x query heads of a KV head, or 16 with quantised keys and values.)
    On every implementation, the result of a query token is independent of the contents of tokens that it does not see.

    With a `window`, each query token is computed as a request of its own, which reads its window.  If the window is not
    a multiple of `num_shards` * `interleave`, a device owns one of several numbers of the tokens in it.  Attention is
    then computed once for each such number, at most `interleave` + 1 times.

    Args:
      q_latent: float [B, Hq, R] or [B, Q, Hq, R], the same on all devices along `axis`.
      q_pe: [B, Hq, P] or [B, Q, Hq, P], the same on all devices along `axis`.
      cache: the cache of this device, whose `layout.shards` says which tokens it has.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      sinks: float32 [Hq], attention sinks, as in `jaxkv.decode_mla`.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `q_scale`, `kv_scale`, `logit_cap`, `window` and `implementation`, as in
        `jaxkv.decode_mla`, and `plan`, from `context.plan_decode`.

    Returns:
      The result of `jaxkv.decode_mla`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, `axis` does not have a device per shard, or an
        argument is given that `context.decode_mla` does not have, such as `causal`.
    """
    queries = {"q_latent": (q_latent, "R"), "q_pe": (q_pe, "P")}
    return _decode(attention.decode_mla, queries, cache, block_tables, seq_lens, axis, sinks, return_lse, options)


def decode_kv(q, cache: KVCache, block_tables, seq_lens, *, axis, sinks=None, return_lse=False, **options) -> Any:
    """`jaxkv.decode_kv` over the tokens of all devices along a mesh axis.  Call it inside `shard_map`.

    Args:
      q: float [B, Hq, D] or [B, Q, Hq, D], the same on all devices along `axis`.
      cache: the cache of this device, whose `layout.shards` says which tokens it has.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      sinks: float32 [Hq], attention sinks, as in `jaxkv.decode_mla`.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `q_scale`, `k_scale`, `v_scale`, `logit_cap`, `window` and `implementation`, as in
        `jaxkv.decode_kv`, and `plan`, from `context.plan_decode`.

    Returns:
      The result of `jaxkv.decode_kv`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, `axis` does not have a device per shard, or an
        argument is given that `context.decode_kv` does not have, such as `causal`.
    """
    return _decode(
        attention.decode_kv, {"q": (q, "D")}, cache, block_tables, seq_lens, axis, sinks, return_lse, options
    )


def plan_decode(
    cache: KVCache,
    block_tables,
    seq_lens,
    *,
    axis,
    num_heads: int,
    q_len: int = 1,
    window: int | tuple[int, int] | None = None,
    **options,
) -> plan.DecodePlan | tuple[plan.DecodePlan, ...]:
    """`jaxkv.plan_decode` for `context.decode_mla` and `context.decode_kv`.  Call it inside `shard_map`.

    Each device makes the plan for its own share.

    Args:
      cache: the cache of this device, whose `layout.shards` says which tokens it has.
      block_tables: int32 [B, M], as passed to the calls.
      seq_lens: int32 [B], as passed to the calls.
      axis: as passed to the calls.
      num_heads: query heads of the calls.
      q_len: query tokens per request of the calls.
      window: the `window` of the calls.
      **options: `dtype`, `batch_invariant` and `implementation`, as in `jaxkv.plan_decode`.

    Returns:
      This device's plan.  With a window, one for each number of tokens in it that a device may own.  For several query
      tokens without a window, one for the whole blocks that all of them see, and one for the rest.

    Raises:
      ValueError: a shape or dtype is wrong, `axis` does not have a device per shard, or an argument is given that
        `context.plan_decode` does not have, such as `causal`.
    """
    _check_options(options, ("dtype", "batch_invariant", "implementation"))
    num_heads, q_len = positive_int("num_heads", num_heads), positive_int("q_len", q_len)
    requests = _requests_of_tokens(cache, block_tables, seq_lens, Dims(), q_len, axis, window)
    planned = partial(plan.plan_decode, cache, num_heads=num_heads, **options)
    if requests.windows:
        return tuple(planned(**requests.arguments, window=count) for count in requests.windows if count)
    if (group := _group_size(cache.layout, num_heads, q_len)) == 1:
        return planned(**requests.arguments)
    whole, rest = _parts(requests, group, cache.layout)
    return planned(**whole.arguments, q_len=group, causal=False), planned(**rest.arguments)


def _decode(operation, queries, cache, block_tables, seq_lens, axis, sinks, return_lse, options):
    scales = ("kv_scale",) if "q_latent" in queries else ("k_scale", "v_scale")
    window, plans = options.pop("window", None), options.pop("plan", None)
    _check_options(options, ("layer", "scale", "q_scale", *scales, "logit_cap", "implementation"))
    dims, name = Dims(), next(iter(queries))
    first = queries[name][0]
    axes = attention.query_axes(name, first)
    for name, (q, content) in queries.items():
        dims.check(name, q, f"{axes} {content}", QUERIES)
    tokens = dims["Q"] if "Q" in axes.split() else 1
    requests = _requests_of_tokens(cache, block_tables, seq_lens, dims, tokens, axis, window)
    rows = [q.reshape(-1, *q.shape[-2:]) for q, _ in queries.values()]
    call = partial(operation, cache=cache, return_lse=True, **options)
    group = _group_size(cache.layout, dims["Hq"], tokens)
    if requests.windows:
        out, lse = _windowed(partial(call, *rows, **requests.arguments), requests.windows, requests.window, plans)
    elif group == 1:
        (alone,) = _plans_of(plans, 1)
        out, lse = call(*rows, **requests.arguments, plan=alone)
    else:
        groups = [q.reshape(-1, group, *q.shape[1:]) for q in rows]
        (whole, rest), (plan_of_whole, plan_of_rest) = _parts(requests, group, cache.layout), _plans_of(plans, 2)
        of_whole = call(*groups, **whole.arguments, causal=False, plan=plan_of_whole)
        of_rest = call(*rows, **rest.arguments, plan=plan_of_rest)
        out, lse = (x.reshape(y.shape) for x, y in zip(of_whole, of_rest, strict=True))
        both, lse = merged([(out, lse), of_rest])
        out = both.astype(out.dtype)
    out, lse = merge_states(out, lse, axis=axis)
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
        out = with_sinks(out, lse, sinks)
    out, lse = out.reshape(*first.shape[:-1], out.shape[-1]), lse.reshape(first.shape[:-1])
    return (out, lse) if return_lse else out


def _windowed(call, windows, own, plans) -> tuple[jax.Array, jax.Array]:
    """The results of `call`, in which each request has a window of its own, `own` [N], which is one of `windows`."""
    used = [count for count in windows if count]
    results = [call(window=count, plan=one) for count, one in zip(used, _plans_of(plans, len(used)), strict=True)]
    out, lse = results[0]
    out, lse = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for count, (found, found_lse) in zip(used, results, strict=True):
        mine = own == count
        out, lse = jnp.where(mine[:, None, None], found, out), jnp.where(mine[:, None], found_lse, lse)
    return out, lse


def _plans_of(plans, count: int) -> Sequence[plan.DecodePlan | None]:
    """The plan of each of `count` calls, from what `plan_decode` returned, or None; ValueError for other `plans`."""
    if plans is None:
        return [None] * count
    found = plans if isinstance(plans, tuple) else (plans,)
    if len(found) != count or not all(isinstance(one, plan.DecodePlan) for one in found):
        given = f"{len(found)} plans" if isinstance(plans, tuple) else f"a {type(plans).__name__}"
        raise ValueError(
            f"`plan` is {given}: expected {count}, which context.plan_decode returns for this `window` and this number "
            "of query tokens (`q_len`)"
        )
    return found


def _check_options(options, known):
    """ValueError if an option is not among the `known` ones."""
    for name, value in options.items():
        if name not in known and value is not None:
            form = "as many for each request, its last ones, under a causal mask or a `window`"
            raise ValueError(f"`{name}` is {value}: expected None, because query tokens must be {form}")


def merge_states(out, lse, *, axis) -> tuple[jax.Array, jax.Array]:
    """Merges one partial result per device into the attention over the keys of all devices along a mesh axis.

    Every device gathers all parts and merges them itself.  On GPUs, XLA gathers results and log-sum-exps in one
    collective.  Reductions would take two: first the maximum of the log-sum-exps, then the sum of the results.  On more
    than 4 devices, gathering parts in their own dtype moves more bytes than float32 sums, which matters only for large
    batches.

    Args:
      out: float [..., D], this device's partial result.  All devices must have the same queries.
      lse: float32 [...], its log-sum-exp, natural logarithm; -inf (or +inf or NaN) for a device without keys, whose
        result is ignored.
      axis: mesh axis (or several) of the `shard_map` around this call.

    Returns:
      out [..., D] of the part's dtype and lse float32 [...], the same on all devices along `axis`; 0 and -inf where
      every part is empty.

    Raises:
      ValueError: shapes or dtypes do not fit, or there is no such axis.
    """
    _axis_size(axis)  # ValueError if there is no such axis
    dims, axes = Dims(), " ".join(f"n{i}" for i in range(len(getattr(out, "shape", ())) - 1))
    dims.check("out", out, f"{axes} D", FLOATS)
    dims.check("lse", lse, axes, ("float32",))
    outs, lses = lax.all_gather((out, lse), axis, to="invarying")
    # As `jaxkv.merge_states`, but without an array of all parts: on two GPUs, XLA then merges them in one kernel.
    both, lse = merged([_without_keys_as_0(*part) for part in zip(outs, lses, strict=True)])
    return both.astype(out.dtype), lse


def _without_keys_as_0(out, lse) -> tuple[jax.Array, jax.Array]:
    """A part as `merged` expects it: 0 and -inf where it has no keys."""
    lse = jnp.where(lse < jnp.inf, lse, -jnp.inf)
    return jnp.where((lse == -jnp.inf)[..., None], 0, out), lse


def indexer_logits(q, weights, cache: KVCache, block_tables, seq_lens, *, axis, **options) -> jax.Array:
    """`jaxkv.indexer_logits` for the device's own share of the tokens.  Call it inside `shard_map`.

    Args:
      q: [B, Q, Hi, D], the same on all devices along `axis`.
      weights: [B, Q, Hi], the same on all devices along `axis`.
      cache: the cache of this device.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      **options: `layer`, `max_len` (of the share) and `implementation`, as in `jaxkv.indexer_logits`.

    Returns:
      float32 [B, Q, max_len], by position in the share; -inf at positions that a query token does not see.

    Raises:
      ValueError: a shape, dtype or static layer is wrong, or `axis` does not have a device per shard.
    """
    dims = Dims()
    dims.check("q", q, "B Q Hi D", (str(getattr(q, "dtype", None)),))
    dims.check("weights", weights, "B Q Hi")
    tables, lengths, *_ = _requests_of_tokens(cache, block_tables, seq_lens, dims, dims["Q"], axis)
    q_rows, weight_rows = (x.reshape(-1, 1, *x.shape[2:]) for x in (q, weights))
    logits = indexer.indexer_logits(q_rows, weight_rows, cache, tables, lengths, **options)
    return logits.reshape(*weights.shape[:2], -1)


def select_topk(logits, k: int, *, shards: TokenShards, axis, implementation=None) -> jax.Array:
    """Selects the positions in the device's share whose logits are among the k largest of all devices.

    Call it inside `shard_map`.

    Every device finds its own k largest logits.  These are gathered, and the k largest of them are selected, in the
    order of `jaxkv.select_topk`.  All devices together therefore select the same tokens as one device would.

    Args:
      logits: float32 [..., N], of this share; -inf marks a position that is not to be selected.
      k: static number of tokens, on all devices together.
      shards: how tokens are divided, `cache.layout.shards`.
      axis: mesh axis (or several) of the `shard_map` around this call.
      implementation: as in `jaxkv.select_topk`, for the selection within the share.

    Returns:
      int32 [..., min(k, N)], positions in the share; -1 where the share has fewer selected tokens.

    Raises:
      ValueError: `logits` is not a float32 array with at least one axis, `k` is not a positive int, or `axis` does not
        have a device per shard.
    """
    shard = _shard_along(axis, checked_shards(shards))
    positions = indexer.select_topk(logits, k, implementation=implementation)[..., : logits.shape[-1]]
    ranks = _ranks(jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=-1))
    ranks = jnp.where(positions < 0, LAST, ranks)
    rounds, rest = jnp.divmod(positions, shards.interleave)
    tokens = (rounds * shards.num_shards + shard) * shards.interleave + rest
    gathered = [jnp.moveaxis(x, 0, -1) for x in lax.all_gather((ranks, tokens), axis)]
    best = lax.sort([x.reshape(*positions.shape[:-1], -1) for x in gathered], num_keys=2)
    last_rank, last_token = (x[..., min(k, x.shape[-1]) - 1, None] for x in best)
    chosen = (ranks < last_rank) | ((ranks == last_rank) & (tokens <= last_token))
    return jnp.where(chosen, positions, -1)


def _ranks(logits):
    """int32 ranks in the order of `jaxkv.select_topk`: NaN has the lowest rank, then the largest logit; -0 equals 0."""
    return ~ordered_bits(logits)


def select_slots(
    q, weights, cache: KVCache, block_tables, seq_lens, k: int, *, axis, max_len: int,
    logits_bytes=LOGITS_BYTES, implementation=None, **options,
) -> jax.Array:  # fmt: skip
    """`jaxkv.select_slots` for the device's own share of the tokens.  Call it inside `shard_map`.

    Runs `indexer_logits`, `select_topk` and `jaxkv.positions_to_slots` on one chunk of query tokens at a time.

    Args:
      q: [B, Q, Hi, D], the same on all devices along `axis`.
      weights: [B, Q, Hi], the same on all devices along `axis`.
      cache: the cache of this device.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included.
      k: static number of tokens, on all devices together.
      axis: mesh axis (or several) of the `shard_map` around this call.
      max_len: static number of cached tokens of the share that are scored.
      logits_bytes: as in `jaxkv.select_slots`, for the logits of the share.
      implementation: as in `jaxkv.select_slots`.
      **options: `layer`.

    Returns:
      int32 [B, Q, min(k, max_len)], slots in the cache of this device; -1 where the share has fewer selected tokens.

    Raises:
      ValueError: a shape, dtype or static argument is wrong, or `axis` does not have a device per shard.
    """
    dims = Dims()
    dims.check("q", q, "B Q Hi D", (str(getattr(q, "dtype", None)),))
    dims.check("weights", weights, "B Q Hi")
    check_cache(cache, IndexerEntry)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    layout = cache.layout
    most_bytes = positive_int("logits_bytes", logits_bytes, below=None)
    positive_int("max_len", max_len)

    def select(q, weights, lengths):
        scored = {"axis": axis, "max_len": max_len, "implementation": implementation, **options}
        logits = indexer_logits(q, weights, cache, block_tables, lengths, **scored)
        positions = select_topk(logits, k, shards=layout.shards, axis=axis, implementation=implementation)
        return indexer.positions_to_slots(positions, block_tables, layout)

    return in_query_chunks(
        select, q, weights, _whole_lengths(block_tables, int32(seq_lens), layout),
        token_bytes=logits_bytes_of_a_token(weights, max_len), most_bytes=most_bytes,
    )  # fmt: skip


def decode_mla_sparse(q_latent, q_pe, cache: KVCache, slots, *, axis, return_lse=False, **options) -> Any:
    """`jaxkv.decode_mla_sparse` over the selected slots of all devices.  Call it inside `shard_map`.

    Each device attends to the slots in its own cache, and the partial results are merged.

    Args:
      q_latent: float [B, Q, Hq, R], the same on all devices along `axis`.
      q_pe: [B, Q, Hq, P], the same on all devices along `axis`.
      cache: the cache of this device.
      slots: int32 [B, Q, K], slots in the cache of this device; negative ones are masked.
      axis: mesh axis (or several) of the `shard_map` around this call.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `q_scale`, `kv_scale`, `counts`, `extra` (slots in another cache of this device),
        `logit_cap` and `implementation`, as in `jaxkv.decode_mla_sparse`.

    Returns:
      The result of `jaxkv.decode_mla_sparse`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, there is no such axis, `sinks` are given, or
        `return_max_logits` is True.
    """
    if options.get("sinks") is not None:
        raise ValueError("`sinks` are given: expected None, because every device would add them to its share")
    if options.get("return_max_logits"):
        raise ValueError("`return_max_logits` is True: expected False, because only results and `lse` are merged")
    parts = sparse.decode_mla_sparse(q_latent, q_pe, cache, slots, return_lse=True, **options)
    out, lse = merge_states(*parts, axis=axis)
    return (out, lse) if return_lse else out
