"""The arguments of a workload's calls: random values, shuffled blocks, a full cache."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.bench.workload import Requests, Workload

PATTERN_BLOCKS = 64
"""Blocks with distinct entries; a longer cache repeats them."""


class Varying(NamedTuple):
    """The inputs that differ from layer to layer in a model, and so from call to call."""

    values: tuple[jax.Array, ...]
    """Queries, or new values."""
    chosen: tuple[jax.Array, ...]
    """Slots or blocks that the calls use."""
    layers: jax.Array
    """int32 [n], the layers of successive calls, in rotation."""


class Shared(NamedTuple):
    """The inputs that all layers of a step share."""

    index: tuple[jax.Array, ...]
    """Tables and lengths, or slots of new tokens."""
    plan: jaxkv.DecodePlan | None = None
    """The plan of dense attention; None for other operations."""


def arguments(
    workload: Workload, cache, varying: Varying, shared: Shared, layer
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one call of the workload's operation."""
    args, options = workload.arguments(cache, varying.values, (*varying.chosen, *shared.index), layer)
    return args, options if shared.plan is None else {**options, "plan": shared.plan}


def inputs(workload: Workload) -> tuple[Varying, Shared]:
    """Random inputs, on the device."""
    rng = np.random.default_rng(1)
    requests = _requests(workload, rng)
    chosen, index = workload.index(requests, rng)
    # Drawn on the host, because a device would compile a program for every shape.
    drawn = [rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for shape, dtype in workload.value_shapes]
    values, chosen, index = (tuple(map(jnp.asarray, arrays)) for arrays in (drawn, chosen, index))
    return Varying(values, chosen, jnp.asarray(workload.visited, jnp.int32)), Shared(index)


def _requests(workload: Workload, rng: np.random.Generator) -> Requests:
    """Requests whose blocks are shuffled."""
    lengths, blocks = workload.lengths, rng.permutation(workload.num_blocks).astype(np.int32)
    counts = -(-lengths // workload.block_size)
    tables = np.full((workload.requests, counts.max()), -1, np.int32)
    tables[np.arange(counts.max()) < counts[:, None]] = blocks[: counts.sum()]
    return Requests(tables, lengths, workload.block_size, blocks)


def filled(workload: Workload) -> jaxkv.KVCache:
    """A cache with random entries in every slot of every layer."""
    layout = workload.layout
    pattern = _pattern(
        workload.writer,
        tuple(workload.scales.items()),
        layout.num_layers,
        workload.block_size,
        workload.kv_heads,
        workload.entry,
    )
    blocks = jnp.arange(layout.num_blocks, dtype=jnp.int32) % PATTERN_BLOCKS
    # The caches have block-major orders, so a block is a row of the buffer.
    return jaxkv.KVCache(_repeated(pattern.reshape(PATTERN_BLOCKS, -1), blocks), layout)


@jax.jit
def _repeated(rows, index):
    return rows[index].reshape(-1)


@lru_cache(maxsize=1)  # successive shapes often differ only in the number of blocks
def _pattern(writer: str, scales, layers: int, block_size: int, heads: int, entry) -> jax.Array:
    """The buffer of a cross-layer cache of `PATTERN_BLOCKS` blocks with random entries."""
    layout = jaxkv.CacheLayout(
        num_layers=layers, num_blocks=PATTERN_BLOCKS, block_size=block_size, num_heads=heads, entry=entry
    )
    slots = jnp.arange(layout.num_slots, dtype=jnp.int32)
    shapes = [(layout.num_slots, *(() if entry.one_head else (heads,)), n) for n in entry.sizes]
    write = partial(getattr(jaxkv, writer), **dict(scales), implementation="xla")

    def of_layer(layer, cache):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(3), layer), len(shapes))
        values = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        return write(cache, *values, slots, layer=layer)

    return jax.jit(lambda: lax.fori_loop(0, layers, of_layer, jaxkv.KVCache.zeros(layout)))().buffer
