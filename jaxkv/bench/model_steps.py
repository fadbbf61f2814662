"""Whole steps of a model: caches with random contents, and consecutive steps that do not wait for the host."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.models import Model, prefill
from jaxkv.serving.table import TableKind, tables_of

LEAST_SECONDS = 1.0
"""Consecutive steps are timed for about this long."""
RUNS = 4
"""How often the host waits for the device in this time.  After each wait, the device waits for the host's next step."""
RANDOM, SET = 0x87, 0x38
"""The bits of a byte that are random, and those that are set, so that it is a finite number, or part of one, in every
format: floats have magnitudes below 2.
"""


def blocks_for(model: Model, tokens: int, new_tokens: int = 1) -> int:
    """Blocks of a request of so many tokens, the new ones included."""
    return sum(_count(table, tokens, new_tokens) for table in _tables(model))


def blocks_per_cache(model: Model, requests: int, tokens: int, new_tokens: int = 1) -> int:
    """Blocks of each cache; ValueError if devices divide the requests and cannot do so evenly."""
    each, rest = divmod(requests, model.parallel.divisions_of_rows)
    if rest:
        raise ValueError(
            f"there are {requests} requests: expected a multiple of the {model.parallel.divisions_of_rows} devices, "
            "which divide them"
        )
    return each * blocks_for(model, tokens, new_tokens)


def _tables(model: Model) -> tuple[TableKind, ...]:
    return tables_of(model.layout(1), model.usual_block_size)


def _held(table: TableKind, tokens: int, new_tokens: int) -> list[int]:
    """The numbers of the blocks of a table that a step reads or writes."""
    start = tokens - new_tokens
    return sorted({*table.needed(start), *table.written(start, tokens)})


def _count(table: TableKind, tokens: int, new_tokens: int) -> int:
    """The length of `_held`, which may be too long to be made."""
    start = tokens - new_tokens
    needed, written = table.needed(start), table.written(start, tokens)
    both = range(max(needed.start, written.start), min(needed.stop, written.stop))
    return len(needed) + len(written) - len(both)


def filled(model: Model, num_blocks: int) -> jaxkv.KVCache:
    """A cache with random entries in every slot of every layer.

    If the model has several block tables, whose blocks differ, all bytes are random, but numbers are finite.
    """
    if len(model.tables) > 1:
        return jax.jit(partial(_with_random_bytes, model, num_blocks))()

    def fill():
        cache = model.cache(num_blocks)
        return model.parallel.per_device(partial(_with_random_entries, model))(cache)

    return jax.jit(fill)()


def _with_random_entries(model: Model, cache: jaxkv.KVCache) -> jaxkv.KVCache:
    """One device's cache with random entries, and random keys if the model has an indexer."""
    layout, entry = cache.layout, cache.layout.entry
    heads, operation, scales = (), jaxkv.write_mla, ("kv_scale",)
    if isinstance(entry, jaxkv.KVEntry):
        heads, operation, scales = (layout.num_heads,), jaxkv.write_kv, ("k_scale", "v_scale")
    options = dict.fromkeys(scales, 1.0) if entry.codec.scaled else {}
    cache = _written(cache, partial(operation, **options), [(*heads, n) for n in entry.sizes])
    if model.config.indexer is None:
        return cache
    packed = model.packed_layout(model.config.indexer, layout.num_blocks, layout.block_size)
    keys = cache.view(packed["indexer"])
    return _written(keys, jaxkv.write_indexer_k, [(model.config.indexer.head_dim,)]).view(layout)


def _written(cache: jaxkv.KVCache, operation: Any, shapes: Sequence[tuple[int, ...]]) -> jaxkv.KVCache:
    """The cache with normal values of those shapes in every slot of every layer."""
    slots = jnp.arange(cache.layout.num_slots, dtype=jnp.int32)

    def layer(i, cache):
        keys = jax.random.split(jax.random.key(i), len(shapes))
        drawn = zip(keys, shapes, strict=True)
        values = [jax.random.normal(key, (slots.size, *shape), jnp.bfloat16) for key, shape in drawn]
        return operation(cache, *values, slots, layer=i, implementation="xla")

    return lax.fori_loop(0, cache.layout.num_layers, layer, cache)


def _with_random_bytes(model: Model, num_blocks: int) -> jaxkv.KVCache:
    cache = model.cache(num_blocks)
    random = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8) & RANDOM | SET
    return jaxkv.KVCache(jnp.resize(random.view(cache.buffer.dtype), cache.buffer.shape), cache.layout)


class Steps:
    """Consecutive steps of requests with the same number of cached tokens; each call makes the next step.

    Args:
      model: the model.
      cache: from `filled`, with the blocks of `blocks_per_cache`; steps donate it and replace it in `self.cache`.
      requests: rows of the batch.
      tokens: cached tokens of each request, the new ones included.
      new_tokens: new tokens of each request; 1 for a decode step.
    """

    def __init__(self, model: Model, cache: jaxkv.KVCache, *, requests: int, tokens: int, new_tokens: int = 1):
        self.cache, self._model = cache, model
        self.new_tokens = requests * new_tokens
        """New tokens per step, of all requests."""
        # Shuffled blocks, as after hours of service.
        count, caches = blocks_per_cache(model, requests, tokens, new_tokens), model.parallel.divisions_of_rows
        rng, tables = np.random.default_rng(0), {}
        blocks = np.stack([rng.permutation(count) for _ in range(caches)]).astype(np.int32)
        for table in _tables(model):
            held = _held(table, tokens, new_tokens)
            own, blocks = np.split(blocks, [requests // caches * len(held)], axis=1)
            tables[table.name] = np.full((requests, table.up_to(tokens)), -1, np.int32)
            tables[table.name][:, held] = own.reshape(requests, -1)
        tables = {name: jnp.asarray(table) for name, table in tables.items()}
        first = next(iter(tables.values()))
        positions = jnp.broadcast_to(jnp.arange(tokens - new_tokens, tokens), (requests, new_tokens))
        slots = jaxkv.slots_for(first, positions, block_size=model.usual_block_size)
        self._index = jnp.full(requests, tokens, jnp.int32), tables if len(tables) > 1 else first, slots
        self._tokens = jnp.zeros((requests, new_tokens), jnp.int32)
        self._run: Any = jax.jit(_step, donate_argnums=(1, 2), compiler_options=model.compiler_options)

    def compile(self) -> None:
        """Compiles the step, which may be done in a thread."""
        self._run.lower(self._model, self.cache, self._tokens, self._index).compile()

    def __call__(self) -> jax.Array:
        """Makes a step; returns its tokens, which the next step donates."""
        self.cache, self._tokens = self._run(self._model, self.cache, self._tokens, self._index)
        return self._tokens

    def seconds(self) -> float:
        """Seconds per step, over steps that each use the previous one's tokens."""
        for _ in range(2):  # the first run compiles
            jax.block_until_ready(self())
        count = max(10, round(LEAST_SECONDS / RUNS / self._timed(10)))
        return sum(self._timed(count) for _ in range(RUNS)) / RUNS

    def _timed(self, count: int) -> float:
        """Seconds per step of `count` steps, after which the host waits for the device."""
        start = time.perf_counter()
        for _ in range(count - 1):
            self()
        jax.block_until_ready(self())
        return (time.perf_counter() - start) / count


def _step(model: Model, cache: jaxkv.KVCache, tokens, index) -> tuple[jaxkv.KVCache, jax.Array]:
    """A step: the cache, and the tokens with the most likely next one of each request at the end."""
    cache, logits = prefill(model, cache, tokens, *index)
    drawn = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return cache, jnp.concatenate([tokens[:, 1:], drawn], axis=1)
