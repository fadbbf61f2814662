"""Slots of tokens, from block tables and positions."""

import jax
from jax.typing import ArrayLike

from jaxkv.cache import KVCache
from jaxkv.checks import Dims, describe, int32, layout_of, positive_int, running_sum
from jaxkv.layout.layout import CacheLayout
from jaxkv_kernels import addressing


def slots_for(block_tables: ArrayLike, positions: ArrayLike, cache: KVCache | CacheLayout) -> jax.Array:
    """Returns the slots of token positions.

    For a group that stores one entry per several tokens (`Group.rate`), these are the slots of entries: pass `positions
    // rate`, and the layout of the group, whose blocks have as many fewer entries.

    Args:
      block_tables: int32 [B, M], the blocks of each request in order.
      positions: int32 [B, ...], token positions of each request, counted from its first token.
      cache: the cache whose blocks the tables list, or its layout.

    Returns:
      int32, the shape of `positions`; -1 where the position is negative or past the table (M * block_size), or where
      the table's entry is not a valid block id (negative, or so large that its slots would not fit in int32).

    Raises:
      ValueError: a shape or dtype is wrong, or `cache` is neither a KVCache nor a CacheLayout.
    """
    dims = Dims()
    dims.check_ints("block_tables", block_tables, "B M")
    shape = getattr(positions, "shape", ())
    if not shape:
        raise ValueError(f"`positions` is {describe(positions)}: expected int32 [B, ...]")
    dims.check_ints("positions", positions, " ".join(["B", *(f"n{i}" for i in range(1, len(shape)))]))
    block_size = layout_of(cache).block_size
    return addressing.slots_for(int32(block_tables), int32(positions), block_size=block_size)


def ragged_slots(
    block_tables: ArrayLike,
    cu_seq_lens: ArrayLike,
    cache: KVCache | CacheLayout,
    *,
    total: int,
    seq_starts: ArrayLike | None = None,
) -> jax.Array:
    """Returns the slots of ragged runs of tokens: request b has a run of `cu_seq_lens[b + 1] - cu_seq_lens[b]` tokens.

    For a group with a `rate`, the runs are of entries: new tokens from position s to e - 1 complete the entries from
    s // rate to e // rate - 1.  Pass the running sum of their numbers, s // rate as `seq_starts`, and the layout of the
    group.

    Args:
      block_tables: int32 [B, M].
      cu_seq_lens: int32 [B + 1], running sum of the lengths, from 0.  A sum that is less than an earlier one is
        replaced by the earlier one, and its run is empty.  For unused requests at the end, pass the last sum again, 0,
        or a negative number.  The tables and `seq_starts` of empty runs may hold anything.
      cache: the cache whose blocks the tables list, or its layout.
      total: static length of the result.  It may differ from the last sum: tokens past the first `total` are left out,
        and rows past the last run are -1.
      seq_starts: int32 [B], position of the first token of each run (default 0): the offset of a prefill chunk.

    Returns:
      int32 [total]: the `slot_mapping` of a prefill write, or the slots of a gather.

    Raises:
      ValueError: a shape or dtype is wrong, or `cache` is neither a KVCache nor a CacheLayout.
    """
    dims = Dims()
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_running_sum("cu_seq_lens", cu_seq_lens)
    if seq_starts is not None:
        dims.check_ints("seq_starts", seq_starts, "B")
    return addressing.ragged_slots(
        int32(block_tables),
        running_sum(cu_seq_lens),
        total=positive_int("total", total),
        block_size=layout_of(cache).block_size,
        seq_starts=int32(seq_starts),
    )


def ragged_positions(cu_seq_lens: ArrayLike, *, total: int, seq_starts: ArrayLike | None = None) -> jax.Array:
    """Returns the positions of the tokens of ragged runs, for rotary embeddings for example.

    Args:
      cu_seq_lens: int32 [B + 1], running sum of the lengths of runs, as in `ragged_slots`.
      total: static length of the result, as in `ragged_slots`.
      seq_starts: int32 [B], position of the first token of each run (default 0).

    Returns:
      int32 [total]: the position of each token in its request, and -1 in rows past the last run.  `ragged_slots` with
      the same arguments returns their slots.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    dims = Dims()
    dims.check_ints("cu_seq_lens", cu_seq_lens, "B+1")
    if (count := dims["B+1"] - 1) == 0:
        raise ValueError("`cu_seq_lens` has 1 element: expected [B + 1], with B at least 1")
    if seq_starts is not None:
        Dims(B=(count, "one less than the elements of `cu_seq_lens`")).check_ints("seq_starts", seq_starts, "B")
    _, positions = addressing.ragged_positions(
        running_sum(cu_seq_lens), total=positive_int("total", total), seq_starts=int32(seq_starts)
    )
    return positions
