"""Which tokens of a request a shard owns, and where they lie in its cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache, describe, index_below, int32, window_of
from jaxkv.layout.layout import CacheLayout, TokenShards, checked_shards
from jaxkv.ops.slots import slots_for
from jaxkv_kernels.addressing.slots import MAX_SLOTS, table_tokens
from jaxkv_kernels.formats.entries import Entry


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
    # The index of an owned token in the shard is the number of earlier tokens that the shard owns.
    before = local_lengths(positions, shards=shards, shard=shard)
    mine = (positions >= 0) & (positions // shards.interleave % shards.num_shards == shard)
    return slots_for(block_tables, jnp.where(mine, before, -1), block_size=layout.block_size)


def window_counts(window: int, shards: TokenShards) -> tuple[int, ...]:
    """How many of `window` consecutive tokens a shard may own, in ascending order: one number or more.

    There is one if `window` is a multiple of `num_shards` * `interleave`, and up to `interleave` + 1 otherwise.
    """
    rounds = shards.num_shards * shards.interleave

    def owned(tokens: int) -> int:
        return tokens // rounds * shards.interleave + min(tokens % rounds, shards.interleave)

    return tuple(sorted({owned(start + window) - owned(start) for start in range(rounds)}))


def whole_lengths(block_tables, seq_lens, layout: CacheLayout) -> jax.Array:
    """Returns `seq_lens` int32 [B], the lengths on all shards together, clamped to what the tables of all shards hold.

    In checked mode, lengths outside that range are errors.
    """
    # Shard 0 has the largest share, so its table is full first.
    count, interleave = layout.shards.num_shards, layout.shards.interleave
    rounds, rest = divmod(table_tokens(block_tables, layout.block_size), interleave)
    room = min(rounds * interleave * count + rest, MAX_SLOTS)
    if data_checks.checking():
        held = f"the tables of {count} devices hold {room} tokens"
        data_checks.require((seq_lens >= 0) & (seq_lens <= room), "seq_lens", seq_lens, held)
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
    cache: KVCache, block_tables, seq_lens, dims: Dims, tokens: int, axis, window: int | None = None
) -> Requests:
    """The requests on this shard, for Q = `tokens` query tokens of each of B requests.

    As on one device, lengths are clamped to the capacity of the tables, here of all shards together.  `window` is that
    of the whole request.
    """
    check_cache(cache, Entry)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    block_tables, seq_lens, shards = int32(block_tables), int32(seq_lens), cache.layout.shards
    shard = shard_along(axis, shards)
    lengths = whole_lengths(block_tables, seq_lens, cache.layout)
    seen = (lengths[:, None] - (tokens - 1) + jnp.arange(tokens, dtype=jnp.int32)[None]).reshape(-1)
    shares = local_lengths(seen, shards=shards, shard=shard)
    found = Requests(jnp.repeat(block_tables, tokens, axis=0), shares)
    window = window_of(window, True, table_tokens(block_tables, cache.layout.block_size) * shards.num_shards)
    if window is None:
        return found
    windows = window_counts(window, shards)
    # As long as the window covers the whole request, so does the largest window of the shard.
    earlier = local_lengths(seen - window, shards=shards, shard=shard)
    before = jnp.where(seen <= window, shares - windows[-1], earlier)
    return found._replace(windows=windows, window=shares - before)


def shard_along(axis, shards: TokenShards) -> jax.Array:
    """The shard of the current device, an int32 scalar; ValueError unless the mesh axis has a device per shard."""
    if (size := axis_size(axis)) != shards.num_shards:
        raise ValueError(
            f"`axis` is {axis!r}, which has {size} devices, and the cache is one of {shards}: expected a cache whose "
            f"layout has `shards=jaxkv.TokenShards({size}, interleave)`"
        )
    return jax.lax.axis_index(axis)


def axis_size(axis) -> int:
    """The number of devices along a mesh axis; ValueError unless the enclosing `shard_map` has it."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        raise ValueError(f"`axis` is {axis!r}: expected a mesh axis of the shard_map around this call") from None


def _ints(name, values) -> jax.Array:
    Dims().check_ints(name, values, " ".join(f"n{i}" for i in range(len(getattr(values, "shape", ())))))
    return int32(values)
