"""Reading and writing the states of requests."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.entry_rows import load_entries, store_entries


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_state(buffer, states, slots, layer, *, pages, entry):
    """Stores states, by name [T, ...], at slots [T] of a layer; returns the new buffer."""
    values = [states[name].reshape(slots.size, size) for name, size in entry.named_sizes.items()]
    return store_entries(buffer, pages, entry, entry.encode(values)[:, None], slots, layer)


@partial(jax.jit, static_argnames=("pages", "entry"))
def read_state(buffer, slots, layer, *, pages, entry):
    """Returns the states, by name [T, ...], at slots [T] of a layer; those of slots outside the cache are 0."""
    rows, valid = load_entries(buffer, pages, entry, slots, layer)
    return entry.named([jnp.where(valid[:, None], x, 0) for x in entry.decode(rows[:, 0], None)])
