"""Checked mode: invalid data (slots, block ids, lengths) raises an error with the argument, position and value."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from jaxkv_kernels.addressing import load_entries, table_tokens

# The value is part of the keys of jit's caches, so a function that was traced without checks is traced again with them.
_checking = jax.make_user_context(default_value=False)


def checked[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """`function` compiled with checks on the data of every jaxkv call in it.

    Without checks, invalid data never touches the memory of other requests, but it is silently ignored: invalid slots
    are skipped and invalid blocks masked.  With checks, the first error raises ValueError with the argument's name, the
    position and the value.  The checks find slots and block ids out of range, a slot written twice in one call, states
    that one token of a call reads and another one writes, lengths beyond the table or other than those of a plan,
    traced layers out of range, and NaN in entries that a decode reads.

    `function` may use `jit` and `scan`, but not `vmap`.  Call the result outside of `jit`: there, it could not raise.
    The checks cost time and memory.  All arguments of `function` are traced and none is donated; put static arguments
    into a closure: `jaxkv.checked(lambda cache: jaxkv.decode_mla(q_latent, q_pe, cache, ..., return_lse=True))(cache)`.
    """

    compiled = jax.jit(checkify.checkify(function, errors=checkify.user_checks))

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with _checking(True):
            error, result = compiled(*args, **kwargs)
        error.throw()
        return result

    return wrapper


def checking() -> bool:
    """Whether the current trace includes checks."""
    return bool(_checking.value)


def require(ok: jax.Array, name: str, values: jax.Array, problem: str, **others: jax.Array):
    """Checks that `ok` holds everywhere; the error names the first element of `values` where it does not.

    `ok` and `others` have the shape of `values`; `problem` may refer to `others` by name, in braces.
    """
    if not ok.size:
        return
    first = jnp.argmin(ok)
    index = jnp.unravel_index(first, ok.shape) if ok.ndim else ()
    where = "[" + ", ".join(f"{{i{n}}}" for n in range(ok.ndim)) + "]" if ok.ndim else ""
    position: dict[str, Any] = {f"i{n}": i for n, i in enumerate(index)}
    position |= {other: array.ravel()[first] for other, array in others.items()}
    checkify.check(ok.all(), f"`{name}`{where} is {{value}}: {problem}", value=values.ravel()[first], **position)


def check_layer(layer, pages, name="layer"):
    """Checks that a traced layer is in the cache."""
    require((layer >= 0) & (layer < pages.num_layers), name, layer, f"the cache has {pages.num_layers} layers")


def check_slots(name, slots, pages):
    """Checks that slots are in the cache, or negative (skipped)."""
    require(slots < pages.num_slots, name, slots, f"the cache has {pages.num_slots} slots")


def check_written_once(name, slots, what):
    """Checks that no slot or block is written twice; negative ones are not written."""
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    again = jnp.concatenate([jnp.zeros(1, bool), (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)])
    require(
        ~jnp.zeros(slots.shape, bool).at[order].set(again), name, slots, f"this {what} is written twice in one call"
    )


def check_read_apart(name, slots, written):
    """Checks that no slot is read that another element of `written` is; negative ones are not written."""
    others = ~jnp.eye(slots.size, dtype=bool) & (slots[:, None] == written[None]) & (written[None] >= 0)
    # An element that writes nothing reads nothing.
    require(~others.any(axis=1) | (written < 0), name, slots, "this slot is written by another token of the call")


def check_tables(block_tables, first, lengths, pages, name="seq_lens", tables_name="block_tables", *, most=None):
    """Checks that positions first <= p < lengths lie in the table, and that those below `most` have valid blocks."""
    capacity = table_tokens(block_tables, pages.block_size)
    fits = (lengths >= 0) & (lengths <= capacity)
    require(fits, name, lengths, f"the table holds {block_tables.shape[1]} blocks, {capacity} tokens")
    begins = jnp.arange(block_tables.shape[1], dtype=jnp.int32)[None] * pages.block_size
    last = lengths if most is None else jnp.minimum(lengths, most)
    live = (begins + pages.block_size > first[:, None]) & (begins < last[:, None])
    inside = (block_tables >= 0) & (block_tables < pages.num_blocks)
    require(inside | ~live, tables_name, block_tables, f"the cache has blocks 0 to {pages.num_blocks - 1}")


def check_ids(name, blocks, pages, used=None):
    """Checks that block ids are in the cache, where `used` is true."""
    inside = (blocks >= 0) & (blocks < pages.num_blocks)
    require(
        inside if used is None else inside | ~used, name, blocks, f"the cache has blocks 0 to {pages.num_blocks - 1}"
    )


def check_live_entries(cache, slots, live, layer, name="cache"):
    """Checks that no entry at `slots` [...] holds NaN where `live` [...] is true."""
    layout = cache.layout
    rows, valid = load_entries(cache.buffer, layout.pages, layout.entry, slots, layer)
    parts = layout.entry.decode(rows, jnp.float32)
    nan = jnp.isnan(jnp.concatenate(parts, axis=-1)).any(axis=(-2, -1))
    require(~(nan & valid & live), name, slots, "the entry at this slot holds NaN and is attended to")
