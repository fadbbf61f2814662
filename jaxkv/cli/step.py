"""Time a decode step of a whole model on this machine, given its config.json.

The weights are random, which does not change the time.  Every request has the same number of cached tokens.
"""

import argparse
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.bench.kernel_times import time_kernels
from jaxkv.cli import random_models
from jaxkv.cli.options import positive
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import nbytes

if TYPE_CHECKING:
    from jaxkv.models import Model

BLOCK_SIZE = 64
LEAST_SECONDS = 1.0
"""Consecutive steps are timed for at least this long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the batch, and the format and layout of the cache."""
    random_models.add_arguments(parser)
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="rows of the batch (32)")
    tokens = "cached tokens of each request, the new one included (4096)"
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help=tokens)


def run(args: argparse.Namespace) -> int:
    """Prints the sizes, the time of a step and, on NVIDIA GPUs, the time of its kernels."""
    model = random_models.random_model(args, args.requests * _per_request(args.tokens), BLOCK_SIZE)
    config, batch = model.config, f"{counted(args.requests, 'requests')} x {counted(args.tokens, 'tokens')}"
    tables = _tables(args.requests, args.tokens)
    cache = jax.block_until_ready(
        _filled(model, tables.size)
    )  # raises here, before anything is printed, if the model does not fit
    print(f"{config.architecture} of {counted(config.num_layers, 'layers')} on {jax.devices()[0].device_kind}")
    print(f"weights {size(nbytes(model.params))}, cache {size(cache.buffer.nbytes)} of {model.entry_format} entries")
    lengths = jnp.full(args.requests, args.tokens, jnp.int32)
    slots = jnp.asarray(tables[:, -1] * BLOCK_SIZE + (args.tokens - 1) % BLOCK_SIZE)
    index = lengths, jnp.asarray(tables), slots
    first = jnp.zeros(args.requests, jnp.int32)
    seconds, cache = _seconds(model, cache, first, index)
    rate = args.requests / seconds
    print(f"a step of {batch}: {1e3 * seconds:.3f} ms, {rate:,.0f} tokens/s")
    _print_kernels(model, cache, first, index, seconds)
    return 0


def _per_request(tokens: int) -> int:
    """Blocks per request."""
    return -(-tokens // BLOCK_SIZE)


def _tables(requests: int, tokens: int) -> np.ndarray:
    """int32 [requests, blocks]: block tables with shuffled blocks, as after hours of service."""
    blocks = _per_request(tokens)
    return np.random.default_rng(0).permutation(requests * blocks).astype(np.int32).reshape(requests, blocks)


def _filled(model: "Model", num_blocks: int) -> jaxkv.KVCache:
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


def _step(model: "Model", cache: jaxkv.KVCache, tokens, index) -> tuple[jaxkv.KVCache, jax.Array]:
    """A decode step: the cache, and the most likely next token of each request."""
    from jaxkv.models import decode

    cache, logits = decode(model, cache, tokens, *index)
    return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _seconds(model, cache, tokens, index) -> tuple[float, jaxkv.KVCache]:
    """Seconds per step, over steps that each use the previous one's tokens; and the cache."""
    step: Any = jax.jit(_step, donate_argnums=1)
    for _ in range(2):  # the first run compiles
        cache, tokens = jax.block_until_ready(step(model, cache, tokens, index))
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < LEAST_SECONDS:
        for _ in range(10):
            cache, tokens = step(model, cache, tokens, index)
        jax.block_until_ready(tokens)
        count += 10
    return (time.perf_counter() - start) / count, cache


def _print_kernels(model, cache, tokens, index, seconds: float) -> None:
    """Prints the fraction of a step in which the GPU runs kernels, and the fraction of this library's kernels."""
    buffer, layout = jax.new_ref(cache.buffer), cache.layout
    del cache  # the steps below would otherwise need memory for a second cache

    def once(buffer, model, tokens, index):
        cache, tokens = _step(model, jaxkv.KVCache(buffer[...], layout), tokens, index)
        buffer[...] = cache.buffer
        return tokens

    found = time_kernels(once, buffer, model, tokens, index, repeats=3)
    if found is None:
        return
    own = [(name, took) for name, took in found.kernels if _is_own(name)]
    busy, ours = sum(took for _, took in found.kernels), sum(took for _, took in own)
    print(
        f"kernels: {len(found.kernels)} per step, {1e3 * busy:.3f} ms ({busy / seconds:.0%} of the step); "
        f"those of jaxkv: {len(own)}, {1e3 * ours:.3f} ms ({ours / seconds:.0%})"
    )


def _is_own(kernel: str) -> bool:
    """Whether the kernel of that name belongs to this library.  Those of `xla` cannot be recognised."""
    # The names of this library's Triton kernels begin with an underscore.
    return kernel.endswith("mosaic_gpu_kernel") or re.match("_[a-z]", kernel) is not None
