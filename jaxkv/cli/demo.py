"""Decode token by token on a cache of DeepSeek-V2-Lite's shape, and check the results.

The model is a toy: 27 layers with random projections and a hidden state of 64 values.  Its attention has the shape of
DeepSeek-V2-Lite's: 16 heads, latents of 512 values, rotary parts of 64, in bf16.  All layers live in one block-major
buffer and run under `lax.scan` with a traced layer.
"""

import argparse
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.terminal.memory import require_memory
from jaxkv.terminal.options import positive
from jaxkv.terminal.progress import progress

LAYERS, HEADS, LATENT, ROPE, HIDDEN = 27, 16, 512, 64, 64
SCALE = 192**-0.5  # DeepSeek-V2's query-key width is 128 + 64


class Weights(NamedTuple):
    """Random projections, stacked over the layers."""

    query: jax.Array
    entry: jax.Array
    output: jax.Array


class Requests(NamedTuple):
    """The state of the requests between steps."""

    hidden: jax.Array
    seq_lens: jax.Array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the sizes of the run."""
    prompts = "length of each prompt, in tokens (200 64 1)"
    parser.add_argument("--prompts", type=positive, nargs="+", default=[200, 64, 1], metavar="N", help=prompts)
    parser.add_argument("--tokens", type=positive, default=12, metavar="N", help="tokens to decode per request (12)")
    blocks = "blocks of 64 tokens in the cache (128)"
    parser.add_argument("--blocks", type=positive, default=128, metavar="N", help=blocks)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if every check held."""
    layout = _layout("BLNHC", args.blocks)
    require_memory(f"two caches of {args.blocks} blocks", 2 * layout.nbytes)
    tables, prompts = _tables(args), jnp.asarray(args.prompts, jnp.int32)
    weights = _weights(jax.random.key(0))
    print(f"jaxkv {jaxkv.__version__} on {jax.devices()[0].device_kind}\n\n{layout}\n")

    cross = jaxkv.KVCache.zeros(layout)
    step = jax.jit(partial(_step, weights, tables), donate_argnums=0)
    requests = Requests(jax.random.normal(jax.random.key(1), (len(args.prompts), HIDDEN)), prompts)
    compiled = step.lower(cross, requests).compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # CPUs and GPUs support the analysis
    # The temporary memory of kernels does not depend on the number of blocks, but a copy of the cache would.
    larger = _layout("BLNHC", 2 * args.blocks)
    buffer: Any = jax.ShapeDtypeStruct((larger.size,), larger.dtype)
    doubled = step.lower(jaxkv.KVCache(buffer, larger), requests).compile().memory_analysis()
    assert doubled is not None
    growth = doubled.temp_size_in_bytes - memory.temp_size_in_bytes
    in_place = memory.alias_size_in_bytes >= layout.nbytes and growth < (larger.nbytes - layout.nbytes) / 100
    print(f"one step of {LAYERS} layers: {memory.alias_size_in_bytes / 1e6:.1f} MB updated in place,")
    print(f"  {memory.temp_size_in_bytes / 1e6:.2f} MB of temporaries, cache of {layout.nbytes / 1e6:.1f} MB")

    cross, seconds, cross_trace = _serve(compiled, weights, cross, tables, requests, args)
    packed_layout = _layout("LBNHC", args.blocks)
    packed = jaxkv.KVCache.zeros(packed_layout)
    packed_step = step.lower(packed, requests).compile()
    packed, _, packed_trace = _serve(packed_step, weights, packed, tables, requests, args)

    same = all(np.array_equal(_bits(a), _bits(b)) for a, b in zip(cross_trace, packed_trace, strict=True))
    same &= all(np.array_equal(_bits(a), _bits(b)) for a, b in zip(_pages(cross), _pages(packed), strict=True))
    error = _error(cross, tables, np.asarray(args.prompts) + args.tokens, cross_trace)
    print(f"{args.tokens} steps of {len(args.prompts)} requests: median {np.median(seconds) * 1e3:.2f} ms per step")
    checks = {
        "the cache was updated in place, and temporaries do not grow with it": in_place,
        "every output and every entry equals the packed layer-major cache's, bit for bit": same,
        f"attention of the last step agrees with float64 (relative error {error:.1e} of at most 8e-3)": error < 8e-3,
    }
    for check, held in checks.items():
        print(f"  {'ok  ' if held else 'FAIL'} {check}")
    return 0 if all(checks.values()) else 1


def _layout(order: str, blocks: int) -> jaxkv.CacheLayout:
    entry = jaxkv.MLAEntry("bf16", latent=LATENT, rope=ROPE)
    return jaxkv.CacheLayout(num_layers=LAYERS, num_blocks=blocks, block_size=64, entry=entry, order=order)  # type: ignore[arg-type]


def _tables(args: argparse.Namespace) -> jax.Array:
    """Shuffled blocks for every request; unused entries stay -1."""
    needed = [-(-(prompt + args.tokens) // 64) for prompt in args.prompts]
    if sum(needed) > args.blocks:
        raise ValueError(f"--blocks is {args.blocks}: these requests need {sum(needed)} blocks of 64 tokens")
    free = iter(np.random.default_rng(0).permutation(args.blocks))
    tables = np.full((len(needed), max(needed)), -1, np.int32)
    for request, count in enumerate(needed):
        tables[request, :count] = [next(free) for _ in range(count)]
    return jnp.asarray(tables)


def _weights(key: jax.Array) -> Weights:
    query, entry, output = jax.random.split(key, 3)
    width = LATENT + ROPE
    return Weights(
        jax.random.normal(query, (LAYERS, HIDDEN, HEADS * width), jnp.bfloat16) / HIDDEN**0.5,
        jax.random.normal(entry, (LAYERS, HIDDEN, width), jnp.bfloat16) / HIDDEN**0.5,
        jax.random.normal(output, (LAYERS, LATENT, HIDDEN), jnp.bfloat16) / LATENT**0.5,
    )


def _normed(x: jax.Array) -> jax.Array:
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)


def _write(weights: Weights, layer: jax.Array, cache: jaxkv.KVCache, hidden, slots) -> jaxkv.KVCache:
    entries = _normed(hidden) @ weights.entry[layer]
    return jaxkv.write_mla(cache, entries[:, :LATENT], entries[:, LATENT:], slots, layer=layer)


def _prefill(weights: Weights, tables, lengths, total: int, cache: jaxkv.KVCache, hidden) -> jaxkv.KVCache:
    """Stores the entries of the prompts in every layer."""
    cu_seq_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])
    slots = jaxkv.ragged_slots(tables, cu_seq_lens, cache, total=total)
    return lax.fori_loop(0, LAYERS, lambda layer, cache: _write(weights, layer, cache, hidden, slots), cache)


def _step(weights: Weights, tables, cache: jaxkv.KVCache, requests: Requests):
    """Decodes one token per request; returns the cache, the requests, and the queries and outputs of each layer."""
    slots = jaxkv.slots_for(tables, requests.seq_lens, cache)
    seq_lens = requests.seq_lens + 1
    plan = jaxkv.plan_decode(cache, tables, seq_lens, num_heads=HEADS)

    def layer_step(carry, layer):
        cache, hidden = carry
        cache = _write(weights, layer, cache, hidden, slots)
        q = (_normed(hidden) @ weights.query[layer]).reshape(-1, HEADS, LATENT + ROPE)
        q_latent, q_pe = q[..., :LATENT], q[..., LATENT:]
        out = jaxkv.decode_mla(q_latent, q_pe, cache, tables, seq_lens, layer=layer, scale=SCALE, plan=plan)
        hidden = hidden + (out.mean(axis=1) @ weights.output[layer]).astype(jnp.float32)
        return (cache, hidden), (q, out)

    (cache, hidden), trace = lax.scan(layer_step, (cache, requests.hidden), jnp.arange(LAYERS))
    return cache, Requests(hidden, seq_lens), trace


def _serve(step, weights, cache, tables, requests, args) -> tuple[jaxkv.KVCache, list[float], Any]:
    """Prefill and decode; returns the cache, the seconds of each step, and the last step's queries and outputs."""
    total = sum(args.prompts)
    prompt = jax.random.normal(jax.random.key(2), (total, HIDDEN))
    prefill = jax.jit(_prefill, static_argnums=3, donate_argnums=4)
    cache = prefill(weights, tables, requests.seq_lens, total, cache, prompt)
    seconds, trace = [], None
    for _ in progress(range(args.tokens), "decoding"):
        start = time.perf_counter()
        cache, requests, trace = jax.block_until_ready(step(cache, requests))
        seconds.append(time.perf_counter() - start)
    return cache, seconds, trace


def _pages(cache: jaxkv.KVCache):
    """The entries of all slots, gathered layer by layer."""
    every = jnp.arange(cache.layout.num_blocks, dtype=jnp.int32)[None]
    total = cache.layout.num_slots
    for layer in range(LAYERS):
        yield from jaxkv.gather_mla(cache, every, jnp.asarray([0, total], jnp.int32), layer=layer, total=total)


def _bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def _error(cache, tables, lengths, trace) -> float:
    """The largest relative error of the last step's attention in any layer, against float64 on the stored entries."""
    queries, outs = (np.asarray(x.astype(jnp.float32), np.float64) for x in trace)
    worst = 0.0
    cu_seq_lens = jnp.asarray([0, *np.cumsum(lengths)], jnp.int32)
    for layer in range(LAYERS):
        kv_c, k_pe = jaxkv.gather_mla(
            cache, tables, cu_seq_lens, layer=layer, total=int(lengths.sum()), dtype=jnp.float32
        )
        keys = np.split(np.concatenate([kv_c, k_pe], axis=-1).astype(np.float64), np.cumsum(lengths)[:-1])
        right = []
        for q, k in zip(queries[layer], keys, strict=True):
            scores = q @ k.T * SCALE
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            right.append(p @ k[:, :LATENT] / p.sum(axis=-1, keepdims=True))
        right = np.stack(right)
        worst = max(worst, float(np.linalg.norm(outs[layer] - right) / np.linalg.norm(right)))
    return worst
