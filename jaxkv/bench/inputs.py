"""The arguments of a workload's calls: random values, shuffled blocks, a full cache."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.bench.workload import Requests, Shapes, Workload, unit_scales
from jaxkv_kernels.formats.entries import Entry

PATTERN_BLOCKS = 64
"""Blocks with distinct entries; a longer cache repeats them."""

WRITERS: dict[type[Entry], Callable[..., jaxkv.KVCache]] = {
    jaxkv.MLAEntry: jaxkv.write_mla,
    jaxkv.KVEntry: jaxkv.write_kv,
    jaxkv.IndexerEntry: jaxkv.write_indexer_k,
    jaxkv.StateEntry: jaxkv.write_state,
}
"""The operation that writes entries of each kind."""


class Varying(NamedTuple):
    """The inputs that differ from layer to layer in a model, and so from call to call."""

    values: tuple[jax.Array, ...]
    """Queries, or new values."""
    chosen: tuple[jax.Array, ...]
    """Slots or blocks that the calls use."""
    layers: jax.Array
    """int32 [n], the layers of successive calls, in rotation."""
    others: tuple[tuple[jax.Array, ...], ...] = ()
    """Other values like `values`, which successive calls use in turn."""


class Shared(NamedTuple):
    """The inputs that all layers of a step share."""

    index: tuple[jax.Array, ...]
    """Tables and lengths, or slots of new tokens."""
    plan: jaxkv.DecodePlan | None = None
    """The plan of dense attention; None for other operations."""


def attention_nbytes(entry: jaxkv.MLAEntry, requests: int, heads: int) -> int:
    """Bytes of the bf16 queries and results of one query token per request."""
    return 2 * requests * heads * (sum(entry.sizes) + entry.value_dim)


def arguments(
    workload: Workload, cache, varying: Varying, shared: Shared, layer
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one call of the workload's operation."""
    args, options = workload.arguments(cache, varying.values, (*varying.chosen, *shared.index), layer)
    return args, options if shared.plan is None else {**options, "plan": shared.plan}


def inputs(workload: Workload) -> tuple[Varying, Shared]:
    """Random inputs, on the device."""
    rng = np.random.default_rng(1)
    requests = shuffled_requests(workload, rng)
    chosen, index = workload.index(requests, rng)
    values, *others = (random_values(workload.value_shapes, rng) for _ in range(workload.sets))
    chosen, index = (tuple(map(jnp.asarray, arrays)) for arrays in (chosen, index))
    return Varying(values, chosen, jnp.asarray(workload.visited, jnp.int32), tuple(others)), Shared(index)


def random_values(shapes: Shapes, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Normal values, or random bytes."""

    # Drawn on the host, because a device would compile a program for every shape.
    def drawn(shape, dtype):
        if dtype == "uint8":
            return rng.integers(0, 256, shape, np.uint8)
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    return tuple(jnp.asarray(drawn(*each)) for each in shapes)


def shuffled_requests(workload: Workload, rng: np.random.Generator) -> Requests:
    """Requests whose blocks are shuffled."""
    lengths, blocks = workload.lengths, rng.permutation(workload.num_blocks).astype(np.int32)
    counts = -(-lengths // workload.block_size)
    tables = np.full((workload.requests, counts.max()), -1, np.int32)
    tables[np.arange(counts.max()) < counts[:, None]] = blocks[: counts.sum()]
    return Requests(tables, lengths, workload.block_size, blocks)


def filled(workload: Workload) -> jaxkv.KVCache:
    """A cache with random entries in every slot of every layer."""
    pattern = workload.layout_of(PATTERN_BLOCKS)
    return jaxkv.KVCache(random_buffer((pattern,), workload.layout.num_blocks), workload.layout)


def random_buffer(patterns: tuple[jaxkv.CacheLayout, ...], num_blocks: int) -> jax.Array:
    """The buffer of a cache of `num_blocks` blocks with random entries in every slot of every layer.

    Args:
      patterns: the layouts of the groups that share the buffer, of `PATTERN_BLOCKS` blocks, in a block-major order.
      num_blocks: blocks of the result.
    """
    blocks = jnp.arange(num_blocks, dtype=jnp.int32) % PATTERN_BLOCKS
    # The caches have block-major orders, so a block is a row of the buffer.
    return _repeated(_pattern(patterns).reshape(PATTERN_BLOCKS, -1), blocks)


def with_repeated_blocks(layout: jaxkv.CacheLayout, rows: jax.Array) -> jaxkv.KVCache:
    """A cache in any order, whose blocks have these contents in turn: [n, E], as `read_blocks` returns them."""
    count = len(rows)
    first = jnp.arange(count, dtype=jnp.int32)

    def some(i, cache):  # ids beyond the last block are skipped
        return jaxkv.write_blocks(cache, i * count + first, rows)

    return lax.fori_loop(0, -(-layout.num_blocks // count), some, jaxkv.KVCache.zeros(layout))


@jax.jit
def _repeated(rows, index):
    return rows[index].reshape(-1)


@lru_cache(maxsize=1)  # successive shapes often differ only in the number of blocks
def _pattern(layouts: tuple[jaxkv.CacheLayout, ...]) -> jax.Array:
    """A buffer with random entries in every slot of these layouts."""

    def of_layer(layer, cache):
        for layout in layouts:
            cache = with_random_layer(cache.view(layout), layer, jax.random.fold_in(jax.random.key(3), layer))
        return cache.view(layouts[0])

    zeros = jaxkv.KVCache.zeros
    return jax.jit(lambda: lax.fori_loop(0, layouts[0].num_layers, of_layer, zeros(layouts[0])))().buffer


def with_random_layer(cache: jaxkv.KVCache, layer, key: jax.Array) -> jaxkv.KVCache:
    """The cache with random entries in every slot of `layer`."""
    layout, entry = cache.layout, cache.layout.entry
    slots, heads = jnp.arange(layout.num_slots, dtype=jnp.int32), () if entry.one_head else (layout.num_heads,)
    keys = zip(jax.random.split(key, len(entry.sizes)), entry.sizes, strict=True)
    values: list[Any] = [jax.random.normal(key, (slots.size, *heads, n), jnp.bfloat16) for key, n in keys]
    if isinstance(entry, jaxkv.StateEntry):
        values = [entry.named(values)]
    return WRITERS[type(entry)](cache, *values, slots, layer=layer, implementation="xla", **unit_scales(entry))
