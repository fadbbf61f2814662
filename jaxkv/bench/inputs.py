"""The arguments of a workload's calls: random values, shuffled blocks, a full cache."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.bench.workloads import BLOCK_OPERATIONS, Workload

PATTERN_BLOCKS = 64
"""Blocks with entries of their own; a longer cache repeats them."""


class Varying(NamedTuple):
    """What differs from layer to layer in a model, and so from call to call."""

    values: tuple[jax.Array, ...]
    """Queries, or new values."""
    chosen: tuple[jax.Array, ...]
    """Slots or blocks."""
    layers: jax.Array
    """int32 [n]; calls work on these in turn."""


class Shared(NamedTuple):
    """What all layers of a step share."""

    index: tuple[jax.Array, ...]
    """Tables and lengths, or slots of new tokens."""
    plan: jaxkv.DecodePlan | None = None
    """Of dense attention."""


def arguments(
    workload: Workload, cache, varying: Varying, shared: Shared, layer
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one call of the workload's operation."""
    options: dict[str, Any] = {} if workload.operation in BLOCK_OPERATIONS else {"layer": layer, **workload.scales}
    if workload.operation.startswith("decode"):
        options["scale"] = 192**-0.5
    if shared.plan is not None:
        options["plan"] = shared.plan
    if workload.operation.startswith("gather"):
        options["total"] = int(workload.lengths.sum())
    if workload.operation == "indexer_logits":
        options["max_len"] = workload.tokens
    values, index = varying.values, (*varying.chosen, *shared.index)
    return ((*values, cache, *index) if workload.has_queries else (cache, *values, *index)), options


def inputs(workload: Workload) -> tuple[Varying, Shared]:
    """Random ones, on the device."""
    rng = np.random.default_rng(1)
    lengths, size = workload.lengths, workload.block_size
    blocks, counts = rng.permutation(workload.layout.num_blocks).astype(np.int32), -(-lengths // size)
    tables = np.full((workload.requests, counts.max()), -1, np.int32)
    used = np.arange(counts.max()) < counts[:, None]
    tables[used] = blocks[: counts.sum()]
    running = np.cumsum([0, *lengths], dtype=np.int32)
    queries = (workload.requests, workload.q_len, workload.heads)

    def slots(requests, positions):
        return (tables[requests, positions // size] * size + positions % size).astype(np.int32)

    values, chosen, index = [], [], [tables, lengths]
    match workload.operation:
        case "write_mla" | "write_kv" | "write_indexer_k":
            values = _entry_shapes(workload, int(running[-1]))
            requests = np.repeat(np.arange(workload.requests), lengths)
            index = [slots(requests, np.arange(running[-1]) - running[requests])]
        case "gather_mla" | "gather_kv":
            index = [tables, running]
        case "decode_mla" | "decode_mla_sparse":
            values = [(*queries, n) for n in workload.entry.sizes]
            if workload.chosen:
                scores = rng.random((*queries[:2], workload.tokens), np.float32)
                positions = scores.argpartition(workload.chosen, axis=-1)[..., : workload.chosen]
                chosen, index = [slots(np.arange(workload.requests)[:, None, None], positions)], []
        case "decode_kv":
            values = [(*queries, workload.entry.sizes[0])]
        case "indexer_logits":
            values = [(*queries, workload.entry.sizes[0]), queries]
        case "copy_blocks":
            chosen, index = np.split(blocks, 2), []
        case "read_blocks":
            chosen, index = [blocks], []
    # Drawn on the host: a device would compile a program for every shape.
    drawn = [rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in values]
    drawn, chosen, index = (tuple(map(jnp.asarray, arrays)) for arrays in (drawn, chosen, index))
    return Varying(drawn, chosen, jnp.asarray(workload.visited, jnp.int32)), Shared(index)


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
    # The orders of benchmarked caches are block-major: a block is a row.
    return jaxkv.KVCache(_repeated(pattern.reshape(PATTERN_BLOCKS, -1), blocks), layout)


@jax.jit
def _repeated(rows, index):
    return rows[index].reshape(-1)


@lru_cache(maxsize=1)  # successive shapes often agree in all but the number of blocks
def _pattern(writer: str, scales, layers: int, block_size: int, heads: int, entry) -> jax.Array:
    """The buffer of a cross-layer cache of `PATTERN_BLOCKS` blocks, full."""
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


def _entry_shapes(workload: Workload, count: int) -> list[tuple[int, ...]]:
    heads = () if workload.entry.one_head else (workload.kv_heads,)
    return [(count, *heads, n) for n in workload.entry.sizes]
