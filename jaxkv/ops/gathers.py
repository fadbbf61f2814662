"""Reading entries: `gather_*` those of ragged runs of tokens, such as the context that a chunked prefill attends to;
`read_*` those at given slots, such as the ones that an indexer selects."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import (
    Dims,
    check_cache,
    entry_scale,
    float_dtype,
    int32,
    layer_index,
    positive_int,
    running_sum,
)
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import RAGGED, TOKENS, array, sample_dtype, sample_options
from jaxkv.ops.writes import checked_slots, entries_of
from jaxkv_kernels import calls
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry


def gather_mla(
    cache: KVCache[MLAEntry],
    block_tables: ArrayLike,
    cu_seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    total: int,
    dtype: DTypeLike = jnp.bfloat16,
    seq_starts: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads the latents and rotary keys of runs of tokens: one run per request, one after the other.

    Args:
      cache: a cache of `MLAEntry`.
      block_tables: int32 [B, M], the blocks of each request in order.
      cu_seq_lens: int32 [B + 1], running sum of the lengths of the runs, from 0.  A sum that is less than an
        earlier one is replaced by the earlier one, and its run is empty.  For unused requests at the end, pass the last
        sum again, 0, or a negative number (`checked` reports sums that fall).  The tables and `seq_starts` of empty
        runs may hold anything.
      layer: int, or traced int32 scalar.
      total: static number of rows of the result, below 2**31.  It may differ from the last sum: tokens past the first
        `total` are left out, and rows past the last run are 0.
      dtype: dtype of the result: bfloat16, float16 or float32.
      seq_starts: int32 [B], the position of the first token of each run; default 0.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      kv_c [total, R] and k_pe [total, P]; 0 in rows past the last run and for tokens outside the table or the cache.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, MLAEntry)
    kv_scale, dtype = entry_scale("kv_scale", kv_scale, cache), float_dtype("dtype", dtype)
    runs = _checked_runs(cache, block_tables, cu_seq_lens, seq_starts, layer, total)
    return run(calls.GatherMLA(**runs, kv_scale=kv_scale, dtype=dtype), implementation)


def gather_kv(
    cache: KVCache[KVEntry],
    block_tables: ArrayLike,
    cu_seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    total: int,
    dtype: DTypeLike = jnp.bfloat16,
    seq_starts: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads the keys and values of runs of tokens: like `gather_mla`, for a cache of `KVEntry`.

    Args:
      cache: a cache of `KVEntry`.
      block_tables: int32 [B, M], the blocks of each request in order.
      cu_seq_lens: int32 [B + 1], running sum of the lengths of the runs, as in `gather_mla`.
      layer: int, or traced int32 scalar.
      total: static number of rows of the result, below 2**31.  Tokens past the first `total` are left out.
      dtype: dtype of the result: bfloat16, float16 or float32.
      seq_starts: int32 [B], the position of the first token of each run; default 0.
      k_scale: float scalar, [H] or [num_blocks, block_size, H], required by format `fp8` and rejected by the others;
        value = stored * k_scale.  The last form is that of `decode_kv`.
      v_scale: the same for v and the format of values; value = stored * v_scale.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      k [total, H, D] and v [total, H, Dv]; 0 in rows past the last run and for tokens outside the table or the cache.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, KVEntry)
    k_scale = entry_scale("k_scale", k_scale, cache, heads=True)
    v_scale = entry_scale("v_scale", v_scale, cache, heads=True)
    dtype = float_dtype("dtype", dtype)
    runs = _checked_runs(cache, block_tables, cu_seq_lens, seq_starts, layer, total)
    return run(calls.GatherKV(**runs, k_scale=k_scale, v_scale=v_scale, dtype=dtype), implementation)


def gather_indexer_k(
    cache: KVCache[IndexerEntry],
    block_tables: ArrayLike,
    cu_seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    total: int,
    dtype: DTypeLike = jnp.bfloat16,
    seq_starts: ArrayLike | None = None,
    implementation: Implementations | None = None,
) -> jax.Array:
    """Reads the indexer keys of runs of tokens: like `gather_mla`, for a cache of `IndexerEntry`.

    Args:
      cache: a cache of `IndexerEntry`.
      block_tables: int32 [B, M], the blocks of each request in order.
      cu_seq_lens: int32 [B + 1], running sum of the lengths of the runs, as in `gather_mla`.
      layer: int, or traced int32 scalar.
      total: static number of rows of the result, below 2**31.  Tokens past the first `total` are left out.
      dtype: dtype of the result: bfloat16, float16 or float32.
      seq_starts: int32 [B], the position of the first token of each run; default 0.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      k [total, D]; 0 in rows past the last run and for tokens outside the table or the cache.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    check_cache(cache, IndexerEntry)
    dtype = float_dtype("dtype", dtype)
    runs = _checked_runs(cache, block_tables, cu_seq_lens, seq_starts, layer, total)
    return run(calls.GatherIndexerK(**runs, dtype=dtype), implementation)


def gather_entries(
    cache: KVCache,
    block_tables: ArrayLike,
    cu_seq_lens: ArrayLike,
    *,
    layer: ArrayLike,
    total: int,
    seq_starts: ArrayLike | None = None,
    implementation: Implementations | None = None,
) -> jax.Array:
    """Reads the entries of runs of tokens as they are stored: like `gather_mla`, for any cache, without decoding.

    Args:
      cache: a cache.
      block_tables: int32 [B, M], the blocks of each request in order.
      cu_seq_lens: int32 [B + 1], running sum of the lengths of the runs, as in `gather_mla`.
      layer: int, or traced int32 scalar.
      total: static number of rows of the result, below 2**31.  Tokens past the first `total` are left out.
      seq_starts: int32 [B], the position of the first token of each run; default 0.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      uint8 [total, nbytes], or [total, H, nbytes] for a cache of `KVEntry`: the bytes of each entry, its parts in the
      order of the format, also if pages are split or keys and values lie apart.  0 in rows past the last run and for
      tokens outside the table or the cache.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    check_cache(cache, Entry)
    runs = _checked_runs(cache, block_tables, cu_seq_lens, seq_starts, layer, total)
    return run(calls.GatherEntries(**runs), implementation)


def read_mla(
    cache: KVCache[MLAEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    dtype: DTypeLike = jnp.bfloat16,
    kv_scale: ArrayLike | None = None,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads the latents and rotary keys at slots: the counterpart of `write_mla`.

    Args:
      cache: a cache of `MLAEntry`.
      slots: int32 [T], in any order; a slot may occur several times.
      layer: int, or traced int32 scalar.
      dtype: dtype of the result: bfloat16, float16 or float32.
      kv_scale: float scalar, required by format `fp8` and rejected by the others; value = stored * kv_scale.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      kv_c [T, R] and k_pe [T, P]; 0 where the slot is negative or past the cache, or the layer is outside the cache.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, MLAEntry)
    kv_scale, dtype = entry_scale("kv_scale", kv_scale, cache), float_dtype("dtype", dtype)
    return run(calls.ReadMLA(**_checked_read(cache, slots, layer), kv_scale=kv_scale, dtype=dtype), implementation)


def read_kv(
    cache: KVCache[KVEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    dtype: DTypeLike = jnp.bfloat16,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads the keys and values at slots: like `read_mla`, for a cache of `KVEntry`.

    Args:
      cache: a cache of `KVEntry`.
      slots: int32 [T], as in `read_mla`.
      layer: int, or traced int32 scalar.
      dtype: dtype of the result: bfloat16, float16 or float32.
      k_scale: float scalar, [H] or [num_blocks, block_size, H], required by format `fp8` and rejected by the others;
        value = stored * k_scale.  The last form is that of `decode_kv`.
      v_scale: the same for v and the format of values; value = stored * v_scale.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      k [T, H, D] and v [T, H, Dv]; 0 where the slot is negative or past the cache, or the layer is outside the cache.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong.
    """
    check_cache(cache, KVEntry)
    k_scale = entry_scale("k_scale", k_scale, cache, heads=True)
    v_scale = entry_scale("v_scale", v_scale, cache, heads=True)
    dtype = float_dtype("dtype", dtype)
    read = _checked_read(cache, slots, layer)
    return run(calls.ReadKV(**read, k_scale=k_scale, v_scale=v_scale, dtype=dtype), implementation)


def read_indexer_k(
    cache: KVCache[IndexerEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: Implementations | None = None,
) -> jax.Array:
    """Reads the indexer keys at slots: like `read_mla`, for a cache of `IndexerEntry`.

    Args:
      cache: a cache of `IndexerEntry`.
      slots: int32 [T], as in `read_mla`.
      layer: int, or traced int32 scalar.
      dtype: dtype of the result: bfloat16, float16 or float32.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      k [T, D]; 0 where the slot is negative or past the cache, or the layer is outside the cache.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    check_cache(cache, IndexerEntry)
    dtype = float_dtype("dtype", dtype)
    return run(calls.ReadIndexerK(**_checked_read(cache, slots, layer), dtype=dtype), implementation)


def _checked_read(cache: KVCache, slots, layer) -> dict[str, Any]:
    """The fields that all reads at slots have, checked."""
    slots, layer = checked_slots("slots", slots, layer, cache, Dims(), written=False)
    return {**entries_of(cache), "slots": slots, "layer": layer}


def _checked_runs(cache: KVCache, block_tables, cu_seq_lens, seq_starts, layer, total) -> dict[str, Any]:
    """The fields that all gathers have, checked."""
    dims = Dims()
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_running_sum("cu_seq_lens", cu_seq_lens)
    if seq_starts is not None:
        dims.check_ints("seq_starts", seq_starts, "B")
    block_tables, seq_starts = int32(block_tables), int32(seq_starts)
    layer, pages = layer_index(layer, cache), cache.layout.pages
    total = positive_int("total", total)
    if data_checks.checking():
        cu_seq_lens = int32(cu_seq_lens)
        lengths = cu_seq_lens[1:] - cu_seq_lens[:-1]
        first = jnp.zeros_like(lengths) if seq_starts is None else jnp.where(lengths > 0, seq_starts, 0)
        data_checks.require(first >= 0, "seq_starts", first, "the first token of a request is token 0")
        data_checks.require(cu_seq_lens[:1] == 0, "cu_seq_lens", cu_seq_lens[:1], "a running sum starts at 0")
        data_checks.check_layer(layer, pages)
        data_checks.require(lengths >= 0, "cu_seq_lens", cu_seq_lens[1:], "a running sum never falls")
        data_checks.require(cu_seq_lens[-1] <= total, "cu_seq_lens", cu_seq_lens[-1], f"`total` is {total}")
        data_checks.check_tables(block_tables, first, first + lengths, pages, "seq_starts + lengths")
    return {
        **entries_of(cache),
        "block_tables": block_tables,
        "cu_seq_lens": running_sum(cu_seq_lens),
        "seq_starts": seq_starts,
        "layer": layer,
        "total": total,
    }


def _sample(*scales):
    def sample(cache):
        options = {"total": TOKENS, "dtype": sample_dtype(cache.layout.entry), **sample_options(cache, *scales)}
        return (cache, *RAGGED), options

    return sample


def _sample_read(*scales):
    def sample(cache):
        options = {"dtype": sample_dtype(cache.layout.entry), **sample_options(cache, *scales)}
        return (cache, array("int32", TOKENS)), options

    return sample


def _sample_entries(cache):
    return (cache, *RAGGED), {"total": TOKENS, "layer": 0}


OPERATIONS = (
    Operation(gather_mla, _sample("kv_scale"), entries=(MLAEntry,)),
    Operation(gather_kv, _sample("k_scale", "v_scale"), entries=(KVEntry,)),
    Operation(gather_indexer_k, _sample(), entries=(IndexerEntry,)),
    Operation(gather_entries, _sample_entries, entries=(MLAEntry, KVEntry, IndexerEntry)),
    Operation(read_mla, _sample_read("kv_scale"), entries=(MLAEntry,)),
    Operation(read_kv, _sample_read("k_scale", "v_scale"), entries=(KVEntry,)),
    Operation(read_indexer_k, _sample_read(), entries=(IndexerEntry,)),
)
