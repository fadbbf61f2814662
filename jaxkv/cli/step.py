"""Time a decode step of a whole model on this machine, given its config.json, or a step of a prefill.

The weights are random, which does not change the time.  Every request has the same number of cached tokens.  On NVIDIA
GPUs, the time of a step is divided into kinds of kernels, and the gaps between kernels.
"""

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

import jaxkv
from jaxkv.bench import shares
from jaxkv.bench.kernel_times import kernels_of
from jaxkv.cli import random_models
from jaxkv.cli.options import output_file, positive
from jaxkv.terminal.files import write_json
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
    tokens = "cached tokens of each request, the new ones included (4096)"
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help=tokens)
    new = "new tokens of each request (1); with more, the step is that of a prefill"
    parser.add_argument("--new-tokens", type=positive, default=1, metavar="N", help=new)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and times")


def run(args: argparse.Namespace) -> int:
    """Prints the sizes, the time of a step and, on NVIDIA GPUs, the shares of kernels and gaps."""
    if args.new_tokens > args.tokens:
        raise ValueError(f"--new-tokens is {args.new_tokens}: expected at most the {args.tokens} --tokens")
    model = random_models.random_model(args, args.requests * _per_request(args.tokens), BLOCK_SIZE)
    config, batch = model.config, f"{counted(args.requests, 'requests')} x {counted(args.tokens, 'tokens')}"
    if args.new_tokens > 1:
        batch += f", {args.new_tokens:,} of them new"
    tables = _tables(args.requests, args.tokens)
    cache = jax.block_until_ready(
        _filled(model, tables.size)
    )  # raises here, before anything is printed, if the model does not fit
    print(f"{config.architecture} of {counted(config.num_layers, 'layers')} on {jax.devices()[0].device_kind}")
    print(f"weights {size(nbytes(model.params))}, cache {size(cache.buffer.nbytes)} of {model.entry_format} entries")
    lengths = jnp.full(args.requests, args.tokens, jnp.int32)
    positions = jnp.broadcast_to(
        jnp.arange(args.tokens - args.new_tokens, args.tokens), (args.requests, args.new_tokens)
    )
    slots = jaxkv.slots_for(jnp.asarray(tables), positions, block_size=BLOCK_SIZE)
    index = lengths, jnp.asarray(tables), slots
    steps = Steps(model, cache, jnp.zeros((args.requests, args.new_tokens), jnp.int32), index)
    del cache  # which the steps donate
    seconds = _seconds(steps)
    rate = args.requests * args.new_tokens / seconds
    print(f"a step of {batch}: {1e3 * seconds:.3f} ms, {rate:,.0f} tokens/s")
    found = _shares(steps, seconds)
    if args.json:
        about = {
            "device": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
            "model": {"architecture": config.architecture, "layers": config.num_layers, "entries": model.entry_format},
            "bytes": {"weights": nbytes(model.params), "cache": steps.cache.buffer.nbytes},
            "requests": args.requests,
            "tokens": args.tokens,
            "new_tokens": args.new_tokens,
            "ms": 1e3 * seconds,
            "shares_ms": {name: 1e3 * took for name, took in found.items()},
        }
        write_json(args.json, about)
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


class Steps:
    """A compiled step, of tokens [B, Q] of each request, and its state: each call makes the next step."""

    def __init__(self, model: "Model", cache: jaxkv.KVCache, tokens, index):
        self._model, self._index = model, index
        self.cache, self._tokens = cache, tokens
        self._run: Any = jax.jit(_step, donate_argnums=1)

    def __call__(self) -> jax.Array:
        """Makes a step; returns its tokens."""
        self.cache, self._tokens = self._run(self._model, self.cache, self._tokens, self._index)
        return self._tokens


def _step(model: "Model", cache: jaxkv.KVCache, tokens, index) -> tuple[jaxkv.KVCache, jax.Array]:
    """A step: the cache, and the tokens with the most likely next one of each request at the end."""
    from jaxkv.models import prefill

    cache, logits = prefill(model, cache, tokens, *index)
    drawn = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return cache, jnp.concatenate([tokens[:, 1:], drawn], axis=1)


def _seconds(steps: Steps) -> float:
    """Seconds per step, over steps that each use the previous one's tokens."""
    for _ in range(2):  # the first run compiles
        jax.block_until_ready(steps())
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < LEAST_SECONDS:
        jax.block_until_ready([steps() for _ in range(10)])
        count += 10
    return (time.perf_counter() - start) / count


def _shares(steps: Steps, seconds: float) -> dict[str, float]:
    """Prints and returns how a step of `seconds` is spent, as `shares` does; empty if kernels cannot be timed."""
    found = kernels_of(steps, repeats=3)
    if found is None:
        return {}
    divided = shares.shares(found.kernels, seconds)
    print(f"{len(found.kernels)} kernels per step: {shares.described(divided, seconds)}")
    return divided
