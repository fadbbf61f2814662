"""Whole steps of a model: caches with random entries, and consecutive steps that do not wait for the host."""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.models import Model, prefill

BLOCK_SIZE = 64
LEAST_SECONDS = 1.0
"""Consecutive steps are timed for about this long."""
RUNS = 4
"""How often the host waits for the device in this time.  After each wait, the device waits for the host's next step."""


def blocks_for(tokens: int) -> int:
    """Blocks of a request of so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def filled(model: Model, num_blocks: int) -> jaxkv.KVCache:
    """A cache with random entries in every slot of every layer; ValueError if the model has several block tables."""
    if len(model.tables) > 1:
        raise ValueError(
            f"`model` is a {model.config.architecture}, with block tables {', '.join(map(repr, model.tables))}: steps "
            "of models with one table are supported"
        )

    def fill():
        cache = model.cache(num_blocks, BLOCK_SIZE)
        slots = jnp.arange(cache.layout.num_slots, dtype=jnp.int32)

        def layer(i, cache):
            keys = jax.random.split(jax.random.key(i))
            entry, tokens = cache.layout.entry, (slots.size,)
            operation, scales = jaxkv.write_mla, ("kv_scale",)
            if isinstance(entry, jaxkv.KVEntry):
                tokens += (cache.layout.num_heads,)
                operation, scales = jaxkv.write_kv, ("k_scale", "v_scale")
            sizes = zip(keys, entry.sizes, strict=True)
            values = [jax.random.normal(key, (*tokens, n), jnp.bfloat16) for key, n in sizes]
            options = dict.fromkeys(scales, 1.0) if entry.codec.scaled else {}
            write: Any = partial(operation, implementation="xla", **options)
            return write(cache, *values, slots, layer=i)

        return lax.fori_loop(0, cache.layout.num_layers, layer, cache)

    return jax.jit(fill)()


class Steps:
    """Consecutive steps of requests with the same number of cached tokens; each call makes the next step.

    Args:
      model: the model.
      cache: with a block for each of `blocks_for(tokens) * requests`; steps donate it and replace it in `self.cache`.
      requests: rows of the batch.
      tokens: cached tokens of each request, the new ones included.
      new_tokens: new tokens of each request; 1 for a decode step.
    """

    def __init__(self, model: Model, cache: jaxkv.KVCache, *, requests: int, tokens: int, new_tokens: int = 1):
        self.cache, self._model = cache, model
        self.new_tokens = requests * new_tokens
        """New tokens per step, of all requests."""
        # Shuffled blocks, as after hours of service.
        tables = np.random.default_rng(0).permutation(requests * blocks_for(tokens)).astype(np.int32)
        tables = jnp.asarray(tables.reshape(requests, -1))
        positions = jnp.broadcast_to(jnp.arange(tokens - new_tokens, tokens), (requests, new_tokens))
        slots = jaxkv.slots_for(tables, positions, block_size=BLOCK_SIZE)
        self._index = jnp.full(requests, tokens, jnp.int32), tables, slots
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
