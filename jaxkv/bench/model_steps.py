"""Times of whole steps of a model: caches with random entries, and consecutive steps without waiting for the host."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.models import Model, decode, prefill

BLOCK_SIZE = 64
LEAST_SECONDS = 1.0
"""Consecutive steps are timed for at least this long."""
Index = tuple[jax.Array, jax.Array, jax.Array]
"""`seq_lens`, `block_tables` and `slot_mapping` of `prefill` or `decode`."""
Step = Callable[[Model, jaxkv.KVCache, jax.Array, Index], tuple[jaxkv.KVCache, jax.Array]]
"""`decode_step` or `prefill_step`."""


def blocks_for(tokens: int) -> int:
    """Blocks of a request of so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def block_tables(requests: int, tokens: int) -> np.ndarray:
    """int32 [requests, blocks]: block tables with shuffled blocks, as after hours of service."""
    blocks = blocks_for(tokens)
    return np.random.default_rng(0).permutation(requests * blocks).astype(np.int32).reshape(requests, blocks)


def filled(model: Model, num_blocks: int) -> jaxkv.KVCache:
    """A cache with random entries in every slot of every layer."""

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


def decode_index(requests: int, tokens: int) -> Index:
    """The index of a decode step of `requests` with `tokens` cached tokens each, the new one included."""
    tables = block_tables(requests, tokens)
    slots = tables[:, -1] * BLOCK_SIZE + (tokens - 1) % BLOCK_SIZE
    return jnp.full(requests, tokens, jnp.int32), jnp.asarray(tables), jnp.asarray(slots)


def prefill_index(requests: int, tokens: int) -> Index:
    """The index of a prefill of `requests` prompts of `tokens` tokens each."""
    tables = jnp.asarray(block_tables(requests, tokens))
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (requests, tokens))
    return jnp.full(requests, tokens, jnp.int32), tables, jaxkv.slots_for(tables, positions, block_size=BLOCK_SIZE)


def decode_step(model: Model, cache: jaxkv.KVCache, tokens, index: Index) -> tuple[jaxkv.KVCache, jax.Array]:
    """A decode step: the cache, and the most likely next token of each request."""
    cache, logits = decode(model, cache, tokens, *index)
    return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def prefill_step(model: Model, cache: jaxkv.KVCache, tokens, index: Index) -> tuple[jaxkv.KVCache, jax.Array]:
    """A prefill that begins each prompt with a token of the previous result; its result is that of `decode_step`."""
    chunk = jnp.broadcast_to(tokens[:, None], index[-1].shape)
    cache, logits = prefill(model, cache, chunk, *index)
    return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def compile_step(step: Step, model: Model, cache: jaxkv.KVCache, index: Index) -> None:
    """Compiles the program that `step_seconds` runs, which may be done in a thread."""
    _program(step).lower(model, cache, _first(index), index).compile()


def step_seconds(step: Step, model: Model, cache: jaxkv.KVCache, index: Index) -> tuple[float, jaxkv.KVCache]:
    """Seconds per step, over steps that each use the previous one's tokens; and the cache, which is donated."""
    program, tokens = _program(step), _first(index)
    for _ in range(2):  # the first run compiles
        cache, tokens = jax.block_until_ready(program(model, cache, tokens, index))
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < LEAST_SECONDS:
        for _ in range(10):
            cache, tokens = program(model, cache, tokens, index)
        jax.block_until_ready(tokens)
        count += 10
    return (time.perf_counter() - start) / count, cache


def _program(step: Step) -> Any:
    return jax.jit(step, donate_argnums=1)


def _first(index: Index) -> jax.Array:
    """The tokens with which the first step begins."""
    return jnp.zeros(len(index[0]), jnp.int32)
