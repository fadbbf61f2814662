"""The DeepSeek V3.2 indexer: it scores all cached keys and selects the tokens that sparse attention attends to."""

from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import FLOATS, Dims, check_cache, describe, int32, layer_index, positive_int
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.query_chunks import LOGITS_BYTES, in_query_chunks, logits_bytes_of_a_token
from jaxkv.ops.samples import BATCH, PAGED, array, sample_dtype, sample_options
from jaxkv.ops.slots import slots_for
from jaxkv_kernels import calls
from jaxkv_kernels.addressing import lengths_in_table
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
    implementation: Implementations | None = None,
) -> jax.Array:
    """Scores of the indexer's queries against the cached keys of each request.

    logit[j] = sum over heads h of relu(q_h . k_j) * w_h, times the scale of key j (DeepGEMM's paged MQA logits).

    Args:
      q: float or float8_e4m3fn [B, Q, Hi, D].
      weights: float [B, Q, Hi]; include the scale of a quantised q here.
      cache: a cache of `IndexerEntry`.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length may hold anything.
      seq_lens: int32 [B], tokens of each request, the new ones included.  Values are clamped to the range from 0 to M *
        block_size, the capacity of a table.
      layer: int, or traced int32 scalar.
      max_len: static number of positions of the result, below 2**31.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      float32 [B, Q, max_len]; -inf at positions that query token t of Q does not see, from `seq_len - Q + 1 + t` on.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    return run(_logits_call(q, weights, cache, block_tables, seq_lens, layer, max_len), implementation)


def _logits_call(
    q: ArrayLike,
    weights: ArrayLike,
    cache: KVCache[IndexerEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    layer: ArrayLike,
    max_len: int,
) -> calls.IndexerLogits:
    """The call of `indexer_logits`, whose arguments it checks."""
    entry = check_cache(cache, IndexerEntry)
    dims = Dims(D=(entry.sizes[0], "the entry's head_dim"))
    q = dims.check("q", q, "B Q Hi D", (*FLOATS, "float8_e4m3fn"))
    weights = dims.check("weights", weights, "B Q Hi")
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    block_tables, seq_lens = int32(block_tables), int32(seq_lens)
    layer, pages = layer_index(layer, cache), cache.layout.pages
    max_len = positive_int("max_len", max_len)
    if data_checks.checking():
        data_checks.check_layer(layer, pages)
        data_checks.check_tables(block_tables, jnp.zeros_like(seq_lens), seq_lens, pages, most=max_len)
    return calls.IndexerLogits(
        q=q,
        weights=weights,
        buffer=cache.buffer,
        pages=pages,
        entry=entry,
        block_tables=block_tables,
        seq_lens=seq_lens,
        layer=layer,
        max_len=max_len,
    )


def select_topk(logits: ArrayLike, k: int, *, implementation: Implementations | None = None) -> jax.Array:
    """The positions of the k largest logits of each row.

    Args:
      logits: float32 [..., N]; -inf marks a position that is not to be selected.
      k: static number of positions, below 2**31.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      int32 [..., k], in order of decreasing logits.  NaN of either sign comes before all numbers, and the earlier of
      two positions with equal logits comes first.  -1 follows where a row has fewer than k selectable positions.

    Raises:
      ValueError: `logits` is not a float32 array with at least one axis, or `k` is not a positive int.
    """
    if getattr(logits, "dtype", None) != jnp.float32 or not getattr(logits, "shape", ()):
        raise ValueError(f"`logits` is {describe(logits)}: expected float32 [..., N]")
    logits = cast(jax.Array, logits)
    return run(calls.SelectTopk(logits=logits, k=positive_int("k", k)), implementation)


def positions_to_slots(positions: ArrayLike, block_tables: ArrayLike, *, block_size: int) -> jax.Array:
    """Returns the slots of selected positions.

    Args:
      positions: int32 [B, Q, K], positions in each request, as `select_topk` returns them.
      block_tables: int32 [B, M], the blocks of each request in order.
      block_size: tokens per block.

    Returns:
      int32 [B, Q, K], the slots for `decode_mla_sparse`; -1 for negative positions and those past the table.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    dims = Dims()
    dims.check_ints("positions", positions, "B Q K")
    return slots_for(block_tables, positions, block_size=block_size)


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

    Serves prefills of any length: runs `indexer_logits`, `select_topk` and `positions_to_slots` on one chunk of query
    tokens at a time, so that the logits [B, Q, max_len] of all query tokens never exist at once.  The slots do not
    depend on the chunk size.

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
    call = _logits_call(q, weights, cache, block_tables, seq_lens, layer, max_len)
    k, most_bytes = positive_int("k", k), positive_int("logits_bytes", logits_bytes, below=None)
    tables, block_size = call.block_tables, cache.layout.block_size

    def select(q, weights, lengths):
        options = {"layer": call.layer, "max_len": call.max_len, "implementation": implementation}
        logits = indexer_logits(q, weights, cache, tables, lengths, **options)
        positions = select_topk(logits, k, implementation=implementation)
        return positions_to_slots(positions, tables, block_size=block_size)

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
