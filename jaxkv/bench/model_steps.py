"""Whole steps of a model: caches with random entries, and consecutive steps that do not wait for the host."""

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
from jaxkv.models.parallel.base import Parallel

BLOCK_SIZE = 64
LEAST_SECONDS = 1.0
"""Consecutive steps are timed for at least this long."""


def blocks_for(tokens: int) -> int:
    """Blocks of a request of so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def blocks_per_cache(parallel: Parallel, requests: int, tokens: int) -> int:
    """Blocks of each cache; ValueError if devices divide the requests and cannot do so evenly."""
    each, rest = divmod(requests, parallel.divisions_of_rows)
    if rest:
        raise ValueError(
            f"there are {requests} requests: expected a multiple of the {parallel.divisions_of_rows} devices, which "
            "divide them"
        )
    return each * blocks_for(tokens)


def filled(model: Model, num_blocks: int) -> jaxkv.KVCache:
    """A cache with random entries in every slot of every layer; ValueError if the model has several block tables."""
    if len(model.tables) > 1:
        raise ValueError(
            f"`model` is a {model.config.architecture}, with block tables {', '.join(map(repr, model.tables))}: steps "
            "of models with one table are supported"
        )

    def fill():
        return model.parallel.per_device(partial(_filled, model))(model.cache(num_blocks, BLOCK_SIZE))

    return jax.jit(fill)()


def _filled(model: Model, cache: jaxkv.KVCache) -> jaxkv.KVCache:
    """One device's cache with random entries, and random keys of the indexer if the model has one."""
    layout, entry = cache.layout, cache.layout.entry
    heads, operation, scales = (), jaxkv.write_mla, ("kv_scale",)
    if isinstance(entry, jaxkv.KVEntry):
        heads, operation, scales = (layout.num_heads,), jaxkv.write_kv, ("k_scale", "v_scale")
    options = dict.fromkeys(scales, 1.0) if entry.codec.scaled else {}
    cache = _written(cache, partial(operation, **options), [(*heads, n) for n in entry.sizes])
    if model.config.indexer is not None:
        packed = model.packed_layout(model.config.indexer, layout.num_blocks, layout.block_size)
        keys = cache.view(packed["indexer"])
        cache = _written(keys, jaxkv.write_indexer_k, [(keys.layout.entry.head_dim,)]).view(layout)
    return cache


def _written(cache: jaxkv.KVCache, operation: Any, shapes: Sequence[tuple[int, ...]]) -> jaxkv.KVCache:
    """The cache with normal values of those shapes in every slot of every layer."""
    slots = jnp.arange(cache.layout.num_slots, dtype=jnp.int32)

    def layer(i, cache):
        drawn = zip(jax.random.split(jax.random.key(i)), shapes, strict=False)
        values = [jax.random.normal(key, (slots.size, *shape), jnp.bfloat16) for key, shape in drawn]
        return operation(cache, *values, slots, layer=i, implementation="xla")

    return lax.fori_loop(0, cache.layout.num_layers, layer, cache)


class Steps:
    """Consecutive steps of requests with the same number of cached tokens; each call makes the next step.

    Args:
      model: the model.
      cache: with `blocks_per_cache` blocks; steps donate it and replace it in `self.cache`.
      requests: rows of the batch.
      tokens: cached tokens of each request, the new ones included.
      new_tokens: new tokens of each request; 1 for a decode step.
    """

    def __init__(self, model: Model, cache: jaxkv.KVCache, *, requests: int, tokens: int, new_tokens: int = 1):
        self.cache, self._model = cache, model
        self.new_tokens = requests * new_tokens
        """New tokens per step, of all requests."""
        # Shuffled blocks, as after hours of service.
        rng, parts = np.random.default_rng(0), model.parallel.divisions_of_rows
        blocks = blocks_per_cache(model.parallel, requests, tokens)
        ids = np.concatenate([rng.permutation(blocks) for _ in range(parts)]).astype(np.int32)
        tables = jnp.asarray(ids.reshape(requests, -1))
        positions = jnp.broadcast_to(jnp.arange(tokens - new_tokens, tokens), (requests, new_tokens))
        slots = jaxkv.slots_for(tables, positions, block_size=BLOCK_SIZE)
        self._index = jnp.full(requests, tokens, jnp.int32), tables, slots
        self._tokens = jnp.zeros((requests, new_tokens), jnp.int32)
        self._run: Any = jax.jit(_step, donate_argnums=(1, 2))

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
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < LEAST_SECONDS:
            for _ in range(9):
                self()
            jax.block_until_ready(self())
            count += 10
        return (time.perf_counter() - start) / count


def _step(model: Model, cache: jaxkv.KVCache, tokens, index) -> tuple[jaxkv.KVCache, jax.Array]:
    """A step: the cache, and the tokens with the most likely next one of each request at the end."""
    cache, logits = prefill(model, cache, tokens, *index)
    drawn = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return cache, jnp.concatenate([tokens[:, 1:], drawn], axis=1)
