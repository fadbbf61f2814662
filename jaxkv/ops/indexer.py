"""The DeepSeek V3.2 indexer: it scores all cached keys and selects the tokens that sparse attention attends to."""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    QUERIES,
    Dims,
    check_cache,
    computed,
    describe,
    int32,
    layer_index,
    positive_int,
    running_sum,
)
from jaxkv.dispatch import Implementations, run
from jaxkv.layout.layout import CacheLayout
from jaxkv.ops.operation import Operation
from jaxkv.ops.query_chunks import LOGITS_BYTES, in_query_chunks, logits_bytes_of_a_token
from jaxkv.ops.ragged_queries import check_rises, owners
from jaxkv.ops.samples import BATCH, PAGED, array, sample_dtype, sample_options
from jaxkv.ops.slots import slots_for
from jaxkv_kernels import calls
from jaxkv_kernels.addressing import lengths_in_table, one_array
from jaxkv_kernels.formats.entries import IndexerEntry


def indexer_logits(
    q: ArrayLike,
    weights: ArrayLike,
    cache: KVCache[IndexerEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    max_len: int,
    cu_q_lens: ArrayLike | None = None,
    implementation: Implementations | None = None,
) -> jax.Array:
    """Scores of the indexer's queries against the cached keys of each request.

    logit[j] = sum over heads h of relu(q_h . k_j) * w_h, times the scale of key j (DeepGEMM's paged MQA logits).

    With `cu_q_lens`, or with a length per query token, kernels process each query token as a request of its own, and
    read the keys of a request once per query token.

    Args:
      q: float or float8_e4m3fn [B, Q, Hi, D] or, with `cu_q_lens`, [T, Hi, D].
      weights: float [B, Q, Hi] or [T, Hi]; include the scale of a quantised q here.
      cache: a cache of `IndexerEntry`.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length may hold anything.
      seq_lens: int32 [B], tokens of each request, the new ones included: query token t of Q sees the first `seq_len - Q
        + 1 + t`.  Without `cu_q_lens`, also int32 [B, Q], how many tokens each query token sees (DeepGEMM's
        two-dimensional `context_lens`).  Values are clamped to the range from 0 to M * block_size, the capacity of a
        table.
      layer: int, or traced int32 scalar.
      max_len: static number of positions of the result, below 2**31.
      cu_q_lens: int32 [B + 1], running sum of the query tokens of each request, as in `decode_mla`.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      float32 [B, Q, max_len] or [T, max_len]; -inf at positions that a query token does not see, and for query tokens
      of no request.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    if cu_q_lens is None and getattr(seq_lens, "ndim", 1) == 1:
        return run(_logits_call(q, weights, cache, block_tables, seq_lens, layer, max_len), implementation)
    call = _logits_call(q, weights, cache, block_tables, seq_lens, layer, max_len, by_token=True, cu_q_lens=cu_q_lens)
    return run(call, implementation).reshape(*jnp.shape(weights)[:-1], call.max_len)


def _logits_call(
    q: ArrayLike,
    weights: ArrayLike,
    cache: KVCache[IndexerEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    layer: ArrayLike,
    max_len: int,
    *,
    by_token: bool = False,
    cu_q_lens: ArrayLike | None = None,
) -> calls.IndexerLogits:
    """The call of `indexer_logits`, whose arguments it checks.  With `by_token`, each query token is a request."""
    entry = check_cache(cache, IndexerEntry)
    dims, tokens = Dims(D=(entry.sizes[0], "the entry's head_dim")), "B Q" if cu_q_lens is None else "T"
    q = dims.check("q", q, f"{tokens} Hi D", QUERIES)
    if not q.shape[0]:
        raise ValueError(f"`q` has shape {tuple(q.shape)}: expected [T, Hi, D] with T at least 1")
    weights = dims.check("weights", weights, f"{tokens} Hi")
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B Q" if by_token and cu_q_lens is None else "B")
    if cu_q_lens is not None:
        dims.check_running_sum("cu_q_lens", cu_q_lens)
    tables, lengths = int32(block_tables), int32(seq_lens)
    layer, pages = layer_index(layer, cache), cache.layout.pages
    max_len = positive_int("max_len", max_len)
    if data_checks.checking():
        data_checks.check_layer(layer, pages)
        longest = lengths.max(axis=1) if lengths.ndim == 2 else lengths
        if cu_q_lens is not None:
            check_rises(int32(cu_q_lens), dims["T"])
            longest = jnp.where(jnp.diff(int32(cu_q_lens)) > 0, longest, 0)
        data_checks.check_tables(tables, jnp.zeros_like(longest), longest, pages, most=max_len)
    if by_token:
        sums = None if cu_q_lens is None else running_sum(cu_q_lens)
        arranged = partial(_by_token, block_size=pages.block_size)
        q, weights, tables, lengths = computed(arranged, q, weights, tables, lengths, sums)
    return calls.IndexerLogits(
        q=cast(jax.Array, q),
        weights=cast(jax.Array, weights),
        buffer=one_array(cache.buffer),
        pages=pages,
        entry=entry,
        block_tables=tables,
        seq_lens=lengths,
        layer=layer,
        max_len=max_len,
    )


def _by_token(q, weights, block_tables, seq_lens, cu_q_lens, *, block_size: int):
    """Queries [N, 1, Hi, D], weights [N, 1, Hi], tables [N, M] and lengths [N] of N query tokens as requests.

    Without `cu_q_lens`, N = B * Q, and `seq_lens` [B, Q] are the lengths; otherwise N = T.
    """
    if cu_q_lens is None:
        requests, lengths = jnp.arange(seq_lens.size, dtype=jnp.int32) // seq_lens.shape[1], seq_lens.reshape(-1)
    else:
        owned, requests, after = owners(cu_q_lens, len(q))
        lengths = lengths_in_table(seq_lens, block_tables, block_size)[requests] - after
        lengths = jnp.where(owned, lengths, 0)
    q, weights = (jnp.reshape(x, (lengths.size, 1, *x.shape[-n:])) for x, n in ((q, 2), (weights, 1)))
    return q, weights, block_tables[requests], lengths


def select_topk(
    logits: ArrayLike,
    k: int,
    *,
    lengths: ArrayLike | None = None,
    block_tables: ArrayLike | None = None,
    block_size: int | None = None,
    implementation: Implementations | None = None,
) -> jax.Array:
    """The positions of the k largest logits of each row, or the slots at these positions.

    Args:
      logits: float32 [..., N]; -inf marks a position that is not to be selected.
      k: static number of positions, below 2**31.
      lengths: int32 [...]; only the first `lengths` positions of each row can be selected, and the other logits may
        hold anything.  Values are clamped to the range from 0 to N.  Default: all N.  The result of `indexer_logits`
        needs none: its logits are -inf from a length on.  For other logits, they are first replaced by -inf, which
        takes a pass over the logits.
      block_tables: int32 [B, M], the blocks of each request in order; the logits are then [B, Q, N], and the result are
        slots, as those of `positions_to_slots`.  `mosaic_gpu` looks them up in the kernel that selects.
      block_size: static int, tokens per block; required with `block_tables`, and rejected without.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      int32 [..., k], positions or slots, in order of decreasing logits.  NaN of either sign comes before all numbers,
      and the earlier of two positions with equal logits comes first.  -1 follows where a row has fewer than k
      selectable positions.  A logit of -inf is never selected.  vLLM's `top_k_per_row` kernels may select those before
      the length of a row, and list all positions of a row of up to k logits in their own order.

    Raises:
      ValueError: `logits` is not a float32 array with at least one axis, `k` is not a positive int, `lengths` or
        `block_tables` has the wrong shape or dtype, or only one of `block_tables` and `block_size` is given.
    """
    if getattr(logits, "dtype", None) != jnp.float32 or not getattr(logits, "shape", ()):
        raise ValueError(f"`logits` is {describe(logits)}: expected float32 [..., N]")
    if lengths is not None:
        rows = {f"n{axis}": (length, "that of `logits`") for axis, length in enumerate(jnp.shape(logits)[:-1], 1)}
        Dims(**rows).check_ints("lengths", lengths, " ".join(rows))
        logits = computed(_before, logits, int32(lengths))
    if (block_tables is None) != (block_size is None):
        given, missing = ("block_tables", "block_size") if block_size is None else ("block_size", "block_tables")
        raise ValueError(f"`{missing}` is None: expected it with `{given}`; pass neither for positions")
    if block_tables is not None:
        dims = Dims()
        dims.check("logits", logits, "B Q N", ("float32",))
        dims.check_ints("block_tables", block_tables, "B M")
        block_size = positive_int("block_size", block_size)
    call = calls.SelectTopk(
        logits=cast(jax.Array, logits),
        block_tables=int32(block_tables),
        k=positive_int("k", k),
        block_size=block_size,
    )
    return run(call, implementation)


def _before(logits, lengths):
    """`logits` [..., N], -inf from position `lengths` [...] of each row on."""
    if data_checks.checking():
        inside = (lengths >= 0) & (lengths <= logits.shape[-1])
        data_checks.require(inside, "lengths", lengths, f"expected 0 to {logits.shape[-1]}, the logits of a row")
    return jnp.where(jnp.arange(logits.shape[-1], dtype=jnp.int32) < lengths[..., None], logits, -jnp.inf)


def positions_to_slots(positions: ArrayLike, block_tables: ArrayLike, cache: KVCache | CacheLayout) -> jax.Array:
    """Returns the slots of selected positions.

    Args:
      positions: int32 [B, Q, K], positions in each request, as `select_topk` returns them.
      block_tables: int32 [B, M], the blocks of each request in order.
      cache: the cache whose blocks the tables list, or its layout.

    Returns:
      int32 [B, Q, K], the slots for `decode_mla_sparse`; -1 for negative positions and those past the table.

    Raises:
      ValueError: a shape or dtype is wrong, or `cache` is neither a KVCache nor a CacheLayout.
    """
    dims = Dims()
    dims.check_ints("positions", positions, "B Q K")
    return slots_for(block_tables, positions, cache)


def select_slots(
    q: ArrayLike,
    weights: ArrayLike,
    cache: KVCache[IndexerEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    k: int,
    *,
    layer: ArrayLike,
    max_len: int,
    logits_bytes: int = LOGITS_BYTES,
    implementation: Implementations | None = None,
) -> jax.Array:
    """Returns the slots of the k cached keys with the largest scores, for each query token.

    Serves prefills of any length: runs `indexer_logits` and `select_topk` on one chunk of query tokens at a time, so
    that the logits [B, Q, max_len] of all query tokens never exist at once.  The slots do not depend on the chunk size.

    Args:
      q: float or float8_e4m3fn [B, Q, Hi, D].
      weights: float [B, Q, Hi].
      cache: a cache of `IndexerEntry`.
      block_tables: int32 [B, M], the blocks of each request in order.
      seq_lens: int32 [B], tokens of each request, the new ones included; clamped as by `indexer_logits`.
      k: static number of slots.
      layer: int, or traced int32 scalar.
      max_len: static number of cached tokens that are scored, from the first of a request.
      logits_bytes: static bound on the bytes of a chunk's logits, and of the scores per head that `xla` computes at
        once; 256 MiB by default.  Temporary memory is up to about three times that, because selecting the largest
        logits makes copies of them.  A chunk has at least one query token of each request, even if that exceeds the
        bound.
      implementation: None (the best that supports the calls), a name, or a sequence of names.

    Returns:
      int32 [B, Q, k], the slots for `decode_mla_sparse`, in order of decreasing scores.  -1 follows where a query token
      sees fewer than k tokens.

    Raises:
      ValueError: a shape, dtype or static argument is wrong.
    """
    options = {"layer": layer, "max_len": max_len, "logits_bytes": logits_bytes, "implementation": implementation}
    return _select(q, weights, cache, block_tables, seq_lens, k, slots=True, **options)


def select_positions(
    q: ArrayLike,
    weights: ArrayLike,
    cache: KVCache[IndexerEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    k: int,
    *,
    layer: ArrayLike,
    max_len: int,
    implementation: Implementations | None = None,
) -> jax.Array:
    """`select_slots`, but returns the positions of the tokens in their request, for `HotRows.fetch`.

    There are min(k, max_len) columns.
    """
    options = {"layer": layer, "max_len": max_len, "logits_bytes": LOGITS_BYTES, "implementation": implementation}
    k = min(positive_int("k", k), max_len)
    return _select(q, weights, cache, block_tables, seq_lens, k, slots=False, **options)


def _select(q, weights, cache, block_tables, seq_lens, k, *, slots: bool, layer, max_len, logits_bytes, implementation):
    """What `select_slots` returns, or positions unless `slots`."""
    call = _logits_call(q, weights, cache, block_tables, seq_lens, layer, max_len)
    k, most_bytes = positive_int("k", k), positive_int("logits_bytes", logits_bytes, below=None)
    tables, block_size = call.block_tables, cache.layout.block_size
    found: dict[str, Any] = {"block_tables": tables, "block_size": block_size} if slots else {}

    def select(q, weights, lengths):
        options = {"layer": call.layer, "max_len": call.max_len, "implementation": implementation}
        logits = indexer_logits(q, weights, cache, tables, lengths, **options)
        return select_topk(logits, k, **found, implementation=implementation)

    return in_query_chunks(
        select, q, weights, lengths_in_table(call.seq_lens, tables, block_size),
        token_bytes=logits_bytes_of_a_token(weights, call.max_len), most_bytes=most_bytes,
    )  # fmt: skip


def _sample_logits(cache):
    q = array(sample_dtype(cache.layout.entry), BATCH, 1, 64, cache.layout.entry.head_dim)
    return (q, array("float32", BATCH, 1, 64), cache, *PAGED), {"max_len": 256, **sample_options(cache)}


OPERATIONS = (
    Operation(indexer_logits, _sample_logits, entries=(IndexerEntry,)),
    Operation(select_topk, lambda: ((array("float32", BATCH, 1, 512), 64), {})),
)
