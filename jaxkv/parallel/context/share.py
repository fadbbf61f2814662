"""Which tokens of a request a shard owns, and where they lie in its cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.dispatch import checked as checks
from jaxkv.dispatch.validate import Dims, check_cache, index_below, int32, positive_int, window_of
from jaxkv.ops.slots import slots_for
from jaxkv_kernels.addressing.slots import MAX_SLOTS, table_tokens
from jaxkv_kernels.formats.entries import Entry


def local_lengths(seq_lens, *, shard, num_shards: int, interleave: int = 1) -> jax.Array:
    """How many of the first `seq_lens` tokens of each request a shard owns.

    Args:
      seq_lens: int32 [...], tokens of each request; negative ones count as 0.
      shard: int, or traced int32 scalar such as `lax.axis_index`.
      num_shards: static int, number of shards of a request.
      interleave: static int, consecutive tokens that one shard owns.

    Returns:
      int32, the shape of `seq_lens`: the lengths within the shard, 0 where it owns nothing.

    Raises:
      ValueError: a dtype is wrong, a static number is not positive, or a static shard is out of range.
    """
    num_shards, interleave = positive_int("num_shards", num_shards), positive_int("interleave", interleave)
    shard = index_below("shard", shard, num_shards, "shards")
    seq_lens = jnp.maximum(_ints("seq_lens", seq_lens), 0)
    rounds, rest = jnp.divmod(seq_lens, num_shards * interleave)
    return rounds * interleave + jnp.clip(rest - shard * interleave, 0, interleave)


def local_slots(block_tables, positions, *, block_size: int, shard, num_shards: int, interleave: int = 1) -> jax.Array:
    """Slots of token positions in a shard's cache.

    Every shard passes all new tokens to a write.  The write skips those that other shards own.

    For ragged tokens [T], pass the table of each token's request, `block_tables[request]` [T, M].

    Args:
      block_tables: int32 [B, M], the blocks of each request in the shard's cache, in order.
      positions: int32 [B, ...], token positions of each request, counted from its first token on any shard.
      block_size: tokens per block.
      shard: int, or traced int32 scalar such as `lax.axis_index`.
      num_shards: static int, number of shards of a request.
      interleave: static int, consecutive tokens that one shard owns.

    Returns:
      int32, the shape of `positions`; -1 for tokens that other shards own, and where `slots_for` returns -1.

    Raises:
      ValueError: a shape or dtype is wrong, a static number is not positive, or a static shard is out of range.
    """
    positions = _ints("positions", positions)
    shard = index_below("shard", shard, positive_int("num_shards", num_shards), "shards")
    # The index of an owned token in the shard is the number of earlier tokens that the shard owns.
    before = local_lengths(positions, shard=shard, num_shards=num_shards, interleave=interleave)
    mine = (positions >= 0) & (positions // interleave % num_shards == shard)
    return slots_for(block_tables, jnp.where(mine, before, -1), block_size=block_size)


def window_counts(window: int, *, num_shards: int, interleave: int) -> tuple[int, ...]:
    """How many of `window` consecutive tokens a shard may own, in ascending order: one number or more.

    There is one if `window` is a multiple of `num_shards` * `interleave`, and up to `interleave` + 1 otherwise.
    """
    rounds = num_shards * interleave

    def owned(tokens: int) -> int:
        return tokens // rounds * interleave + min(tokens % rounds, interleave)

    return tuple(sorted({owned(start + window) - owned(start) for start in range(rounds)}))


def whole_lengths(block_tables, seq_lens, *, block_size: int, axis, interleave: int) -> jax.Array:
    """Returns `seq_lens` int32 [B], the lengths on all shards together, clamped to what the tables of all shards hold.

    In checked mode, lengths outside that range are errors.
    """
    # Shard 0 has the largest share, so its table is full first.
    count = here(axis)["num_shards"]
    rounds, rest = divmod(table_tokens(block_tables, block_size), positive_int("interleave", interleave))
    room = min(rounds * interleave * count + rest, MAX_SLOTS)
    if checks.checking():
        held = f"the tables of {count} devices hold {room} tokens"
        checks.require((seq_lens >= 0) & (seq_lens <= room), "seq_lens", seq_lens, held)
    return jnp.clip(seq_lens, 0, room)


class Requests(NamedTuple):
    """One request per query token, as a shard sees it.  N = B * Q."""

    tables: jax.Array
    """int32 [N, M]."""
    lengths: jax.Array
    """int32 [N], the tokens of the shard that the query token may see."""
    windows: tuple[int, ...] = ()
    """The windows on a shard that there are, from `window_counts`; none without a window."""
    window: jax.Array | None = None
    """int32 [N], which of `windows` each request has."""


def requests_of_tokens(
    cache: KVCache, block_tables, seq_lens, dims: Dims, tokens: int, axis, interleave: int, window: int | None = None
) -> Requests:
    """The requests on this shard, for Q = `tokens` query tokens of each of B requests.

    As on one device, lengths are clamped to the capacity of the tables, here of all shards together.  `window` is that
    of the whole request.
    """
    check_cache(cache, Entry)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    block_tables, seq_lens, me = int32(block_tables), int32(seq_lens), here(axis)
    block_size = cache.layout.block_size
    lengths = whole_lengths(block_tables, seq_lens, block_size=block_size, axis=axis, interleave=interleave)
    seen = (lengths[:, None] - (tokens - 1) + jnp.arange(tokens, dtype=jnp.int32)[None]).reshape(-1)
    shares = local_lengths(seen, **me, interleave=interleave)
    found = Requests(jnp.repeat(block_tables, tokens, axis=0), shares)
    window = window_of(window, True, table_tokens(block_tables, block_size) * me["num_shards"])
    if window is None:
        return found
    windows = window_counts(window, num_shards=me["num_shards"], interleave=interleave)
    # As long as the window covers the whole request, so does the largest window of the shard.
    before = jnp.where(seen <= window, shares - windows[-1], local_lengths(seen - window, **me, interleave=interleave))
    return found._replace(windows=windows, window=shares - before)


def here(axis) -> dict[str, Any]:
    """The arguments `shard` and `num_shards` of the current device, along a mesh axis of the enclosing `shard_map`."""
    try:
        return {"shard": jax.lax.axis_index(axis), "num_shards": jax.lax.axis_size(axis)}
    except NameError:
        raise ValueError(f"`axis` is {axis!r}: expected a mesh axis of the shard_map around this call") from None


def _ints(name, values) -> jax.Array:
    Dims().check_ints(name, values, " ".join(f"n{i}" for i in range(len(getattr(values, "shape", ())))))
    return int32(values)
