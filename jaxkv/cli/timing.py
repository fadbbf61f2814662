"""Device time of a workload, and the device's ceilings, measured the same way."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.cli.workloads import BLOCK_OPERATIONS, Workload

CHAIN_SECONDS = 0.02
"""A chain lasts at least this long, so that launching it and waiting for it are small beside it."""

GPU_TURN = 16
"""Calls a turn of a chain's loop on GPUs, where the host learns after each turn whether there is another."""

PIECE = 2**16
"""Slots filled at once: bounds the memory that random entries take on their way into a cache."""

Step = Callable[[jax.Array, Any, Any], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over several chains, and seconds to compile."""

    median: float
    least: float
    most: float
    calls: int
    """Calls a chain."""
    compile: float

    @property
    def spread(self) -> float:
        """The range of the chains, as a fraction of their median."""
        return (self.most - self.least) / self.median


def time_calls(step: Step, carry, fixed, *, repeats: int) -> Timing:
    """Times `carry = step(i, carry, fixed)`, as links of chains of calls that each run as one program.

    A step must depend on its carry: what does not change from call to call, XLA computes once for all of them.

    Args:
      step: one call; `i` counts the calls of a chain.
      carry: arrays, donated; caches in it are updated in place.
      fixed: arrays that no call changes.
      repeats: chains to time; the statistics are over these.
    """
    turn = 1 if jax.default_backend() == "cpu" else GPU_TURN

    @partial(jax.jit, donate_argnums=0)
    def chain(carry, fixed, turns):
        def one_turn(i, carry):
            return lax.fori_loop(0, turn, lambda j, carry: step(i * turn + j, carry, fixed), carry)

        return lax.fori_loop(0, turns, one_turn, carry)

    start = time.perf_counter()
    compiled = chain.lower(carry, fixed, jnp.int32(1)).compile()
    compile_seconds = time.perf_counter() - start

    def seconds(turns: int) -> float:
        nonlocal carry
        count = jax.block_until_ready(jnp.int32(turns))
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(carry, fixed, count))
        return time.perf_counter() - start

    jax.block_until_ready((carry, fixed))
    seconds(1)  # loads the program, and touches all memory
    turns, last = 1, min(seconds(1) for _ in range(3))
    while last < CHAIN_SECONDS:
        turns = max(turns + 1, round(1.1 * turns * min(CHAIN_SECONDS / last, 100)))
        last = min(seconds(turns) for _ in range(3))  # a hiccup must not end the search
    found = [seconds(turns) / (turns * turn) for _ in range(repeats)]
    return Timing(float(np.median(found)), min(found), max(found), turns * turn, compile_seconds)


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: bytes/s of reading, bytes/s read and written of copying, bf16 flops/s."""

    read: float
    copy: float
    matmul: float

    def seconds(self, *, traffic: int, flops: int, copies: bool) -> float:
        """The least time for that many bytes and operations; `copies` where half the bytes are written."""
        return max(traffic / (self.copy if copies else self.read), flops / self.matmul)


def measure_ceilings(device: jax.Device, *, repeats: int) -> Ceilings:
    """Measured now: a reduction over, and an update in place of, a large array; a large square matrix product."""
    cpu = device.platform == "cpu"
    size, side = (2**28, 1024) if cpu else (min(2**32, device_memory(device) // 16), 8192)
    tile = jax.random.normal(jax.random.key(0), (2**20,))
    tiles = size // tile.nbytes
    square = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)

    def read(i, carry, fixed):
        return lax.optimization_barrier((carry[0], carry[0].sum()))

    def copy(i, carry, fixed):
        return -carry

    def matmul(i, carry, fixed):
        return lax.optimization_barrier((carry[0], carry[0] @ fixed))

    reading = time_calls(read, (jnp.tile(tile, tiles), jnp.float32(0)), (), repeats=repeats)
    copying = time_calls(copy, jnp.tile(tile, tiles), (), repeats=repeats)
    product = time_calls(matmul, (square + 0, square + 0), square, repeats=repeats)
    moved = tiles * tile.nbytes
    return Ceilings(moved / reading.median, 2 * moved / copying.median, 2 * side**3 / product.median)


def device_memory(device: jax.Device) -> int:
    """Bytes that arrays may take on the device: what JAX's allocator gives, or the host's memory on CPUs."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Varying(NamedTuple):
    """What differs from layer to layer in a model, and so from call to call."""

    values: tuple[jax.Array, ...]
    """Queries, or new values."""
    chosen: tuple[jax.Array, ...]
    """Slots or blocks."""
    layers: jax.Array
    """int32 [n]; calls work on these in turn."""


def time_workload(workload: Workload, *, implementation: str | None, repeats: int) -> tuple[str, Timing]:
    """Who takes the workload's call, and its time; NotImplementedError where the named implementation does not."""
    function, layout = getattr(jaxkv, workload.operation), workload.layout
    varying, paged = _inputs(workload, layout)

    def call(i, cache, varying, paged):
        layer = varying.layers[lax.rem(i, jnp.int32(varying.layers.size))]
        args, options = _arguments(workload, cache, varying, paged, layer)
        return function(*args, **options, implementation=implementation)

    def write(i, carry, paged):
        cache, varying = carry
        return call(i, cache, varying, paged), lax.optimization_barrier(varying)

    def read(i, carry, fixed):
        varying, _ = carry
        return lax.optimization_barrier((varying, call(i, fixed[0], varying, fixed[1])))

    # Asked before gigabytes are filled for nothing.
    abstract = jax.eval_shape(lambda: jaxkv.KVCache.zeros(layout))
    result = jax.eval_shape(call, 0, abstract, varying, paged)
    args, options = _arguments(workload, abstract, varying, paged, 0)
    chosen = implementation or str(jaxkv.explain(function, *args, **options).chosen)
    if isinstance(result, jaxkv.KVCache):
        return chosen, time_calls(write, (_filled(workload, layout), varying), paged, repeats=repeats)
    outs = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), result)
    return chosen, time_calls(read, (varying, outs), (_filled(workload, layout), paged), repeats=repeats)


def _arguments(workload: Workload, cache, varying: Varying, paged, layer) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options: dict[str, Any] = {} if workload.operation in BLOCK_OPERATIONS else {"layer": layer}
    if workload.operation.startswith("decode"):
        options["scale"] = 192**-0.5
    if workload.operation.startswith("gather"):
        options["total"] = int(workload.lengths.sum())
    if workload.operation == "indexer_logits":
        options["max_len"] = workload.tokens
    values, index = varying.values, (*varying.chosen, *paged)
    return ((*values, cache, *index) if workload.has_queries else (cache, *values, *index)), options


def _inputs(workload: Workload, layout: jaxkv.CacheLayout) -> tuple[Varying, tuple[jax.Array, ...]]:
    """What varies, and tables and lengths, or slots of new tokens, which are the same for all layers."""
    rng = np.random.default_rng(1)
    lengths, size = workload.lengths, workload.block_size
    blocks, counts = rng.permutation(layout.num_blocks).astype(np.int32), -(-lengths // size)
    tables = np.full((workload.requests, counts.max()), -1, np.int32)
    used = np.arange(counts.max()) < counts[:, None]
    tables[used] = blocks[: counts.sum()]
    running = np.cumsum([0, *lengths], dtype=np.int32)
    queries = (workload.requests, workload.q_len, workload.heads)

    def slots(requests, positions):
        return (tables[requests, positions // size] * size + positions % size).astype(np.int32)

    values, chosen, paged = [], [], [tables, lengths]
    match workload.operation:
        case "write_mla" | "write_kv" | "write_indexer_k":
            values = _entry_shapes(workload, int(running[-1]))
            requests = np.repeat(np.arange(workload.requests), lengths)
            paged = [slots(requests, np.arange(running[-1]) - running[requests])]
        case "gather_mla" | "gather_kv":
            paged = [tables, running]
        case "decode_mla" | "decode_mla_sparse":
            values = [(*queries, n) for n in workload.entry.sizes]
            if workload.chosen:
                scores = rng.random((*queries[:2], workload.tokens), np.float32)
                positions = scores.argpartition(workload.chosen, axis=-1)[..., : workload.chosen]
                chosen, paged = [slots(np.arange(workload.requests)[:, None, None], positions)], []
        case "decode_kv":
            values = [(*queries, workload.entry.sizes[0])]
        case "indexer_logits":
            values = [(*queries, workload.entry.sizes[0]), queries]
        case "copy_blocks":
            chosen, paged = np.split(blocks, 2), []
        case "read_blocks":
            chosen, paged = [blocks], []
    chosen, paged = jax.tree.map(jnp.asarray, (tuple(chosen), tuple(paged)))
    layers = jnp.asarray(workload.visited, jnp.int32)
    return Varying(_normal(jax.random.key(2), values), chosen, layers), paged


def _filled(workload: Workload, layout: jaxkv.CacheLayout) -> jaxkv.KVCache:
    """A cache with random entries in every slot of the layers that are visited."""
    write, piece = getattr(jaxkv, workload.writer), min(PIECE, layout.num_slots)

    @partial(jax.jit, donate_argnums=0)
    def fill(cache, first, layer):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), first), layer)
        slots = first + jnp.arange(piece, dtype=jnp.int32)
        return write(cache, *_normal(key, _entry_shapes(workload, piece)), slots, layer=layer, implementation="xla")

    cache = jaxkv.KVCache.zeros(layout)
    for layer in workload.visited:
        for first in range(0, layout.num_slots, piece):
            cache = fill(cache, first, layer)
    return cache


def _entry_shapes(workload: Workload, count: int) -> list[tuple[int, ...]]:
    heads = () if workload.entry.one_head else (workload.kv_heads,)
    return [(count, *heads, n) for n in workload.entry.sizes]


def _normal(key: jax.Array, shapes: Sequence[tuple[int, ...]]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, len(shapes) or 1)
    return tuple(jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=False))
