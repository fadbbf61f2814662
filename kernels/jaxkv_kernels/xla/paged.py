"""Iterating over requests in parts, and over their pages in chunks, both of bounded size."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.addressing import slots_for
from jaxkv_kernels.gradients import forward_mode_only
from jaxkv_kernels.scores import CHUNK_TOKENS

PART_BYTES = 2**28
"""The bound on the temporary memory of the requests that are computed together: what their keys and scores need, which
is several times as much as their queries and results.  A single request may need more."""


def in_parts(function: Callable[..., Any], *arrays: Any, bytes_per_request: int) -> Any:
    """`function(*arrays)`, computed for as many requests at a time as `PART_BYTES` allow, at least one.

    Args:
      function: a function whose arguments and results are pytrees of arrays with a leading axis of requests.  The
        result of a request must not depend on the others.
      *arrays: its arguments.  None, for an array that there is not, is passed as it is.
      bytes_per_request: its temporary memory.
    """
    requests = jax.tree.leaves(arrays)[0].shape[0]
    size = max(PART_BYTES // bytes_per_request, 1)
    if size >= requests:
        return function(*arrays)
    parts = -(-requests // size)
    size = -(-requests // parts)

    def one(first):
        return function(*jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size), arrays))

    # The last part has the full size: it starts earlier, and its first `overlap` requests are computed twice.
    overlap = parts * size - requests
    found = lax.map(one, jnp.minimum(jnp.arange(parts, dtype=jnp.int32) * size, requests - size))

    def whole(x):
        flat = x.reshape(parts * size, *x.shape[2:])
        if not overlap:
            return flat
        return jnp.concatenate([flat[: (parts - 1) * size], flat[(parts - 1) * size + overlap :]])

    return jax.tree.map(whole, found)


def bytes_per_request(keys: int, width: int, rows: int, dtype) -> int:
    """The temporary memory of attention of `rows` query rows of a request to `keys` keys and their values.

    Together, keys and values have `width` numbers of `dtype` per token.  They exist as they were loaded and masked, and
    in float32 on devices that multiply in float32.  The scores and their weights are float32, too.
    """
    return keys * (width * (2 * jnp.dtype(dtype).itemsize + 4) + rows * 12)


REVERSE_MODE = (
    "a loop whose number of steps depends on the data has no gradients in reverse mode: use forward mode (`jax.jvp`, "
    "`jax.jacfwd`), or operations that have both modes, such as `decode_mla_sparse` and `gather_mla`"
)
"""What differentiating such a loop in reverse mode raises."""


def chunk_tokens(block_size: int, block_tables: jax.Array) -> int:
    """Tokens per chunk: CHUNK_TOKENS rounded up to whole blocks, or those of the whole table if it is shorter."""
    return block_size * min(block_tables.shape[1], -(-CHUNK_TOKENS // block_size))


def query_ends(lengths: jax.Array, tokens: int) -> jax.Array:
    """The number of keys [B, tokens] that each of a request's last `tokens` tokens sees; causal, aligned to the end.

    `lengths` [B] must be clamped by `lengths_in_table`.
    """
    return lengths[:, None] - (tokens - 1) + jnp.arange(tokens, dtype=jnp.int32)[None]


def query_ranges(
    lengths: jax.Array, tokens: int, window: int | None, ahead: int | None = 0, trailing: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The first key [B, tokens] that each of a request's `tokens` query tokens sees, and the end of those.

    `lengths` [B] must be clamped by `lengths_in_table`.  `window`, `ahead` and `trailing` are those of `DecodeCall`.
    """
    ends = query_ends(lengths if trailing is None else lengths - trailing, tokens)
    begins = jnp.zeros_like(ends) if window is None else jnp.maximum(ends - window, 0)
    if ahead is None:
        ends = jnp.broadcast_to(lengths[:, None], ends.shape)
    elif ahead or trailing is not None:
        ends = jnp.minimum(ends, lengths[:, None] - ahead) + ahead  # in this order, no sum overflows
    return begins, ends


def chunks_seen(begins: jax.Array, ends: jax.Array, last_ends: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """The first chunk that some query token sees, and the end of those.

    `last_ends` are the ends of all query tokens, or only of the last ones of their requests, which are the largest.
    """
    # Requests without tokens must not cause the loop to begin at chunk 0.
    first = jnp.where(ends > 0, begins, jnp.iinfo(jnp.int32).max).min() // chunk
    return first, -(-last_ends.max() // chunk)


def chunk_slots(block_tables: jax.Array, i, *, chunk: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Positions [S] of chunk i and their slots [B, S] (-1 past the table)."""
    positions = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
    wide = jnp.broadcast_to(positions, (block_tables.shape[0], chunk))
    return positions, slots_for(block_tables, wide, block_size=block_size)


def walk(first, last, step: Callable[[Any, Any], Any], state):
    """A `lax.fori_loop` that also works in `shard_map`, where a carry must vary over the mesh from the start.

    With bounds that are data, it has gradients in forward mode only.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:  # elsewhere, a second copy of the step only takes time to compile
        state = jax.tree.map(lambda s, made: jnp.where(False, made, s), state, step(jnp.int32(0), state))
    state = lax.fori_loop(first, last, step, state)
    if isinstance(first, int) and isinstance(last, int):
        return state
    return forward_mode_only(state, REVERSE_MODE)
