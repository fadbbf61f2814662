"""Time stores and loads of blocks between the device and host memory, and decode steps that run at the same time.

The ceiling is the transfer rate of one large array, measured in the same run.  Stores and loads are timed from the call
until everything has arrived; rates are medians.  `one copy per layer` shows the rate if blocks are not gathered: one
transfer for each layer of each block.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv import offload
from jaxkv.bench.inputs import attention_nbytes, with_repeated_blocks
from jaxkv.offload import transfers
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.memory import require_memory
from jaxkv.terminal.options import Sizes, add_sizes, output_file, with_defaults
from jaxkv_kernels.addressing import one_array

BLOCK_SIZE = 64
ENTRY = jaxkv.MLAEntry("bf16")
LARGE_BYTES = 2**31
"""Size of the array that shows the ceiling, unless the blocks together are smaller."""
CPU_LARGE_BYTES = 2**24
"""The same on CPUs, where the operating system takes back the memory of larger arrays: page faults would be timed."""
WARM_UP = 5
"""Untimed transfers of the large array, until its memory is pinned (on CPUs: touched)."""
PATTERN_BLOCKS = 16
"""Blocks with distinct entries; a larger cache repeats them."""
LAYERWISE_BLOCKS = 2
"""Blocks that are transferred with one copy per layer; few, because this is slow."""
STEPS = 20
"""Consecutive decode steps."""


SIZES: Sizes = {
    "layers": ("layers of latents of 512 + 64 bf16 values, in blocks of 64 tokens (61; 4 on CPUs)", 61, 4),
    "blocks": ("blocks to move (2048; 64 on CPUs)", 2048, 64),
    "requests": ("requests to decode (64; 2 on CPUs)", 64, 2),
    "tokens": ("cached tokens of each (4096; 256 on CPUs)", 4096, 256),
    "heads": ("query heads (128; 4 on CPUs)", 128, 4),
    "repeats": ("repetitions of each measurement (5; 3 on CPUs)", 5, 3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the blocks, and the batch that is decoded meanwhile.  Defaults depend on the device."""
    add_sizes(parser, SIZES)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the results")


def run(args: argparse.Namespace) -> int:
    """Prints the rates, as fractions of the ceiling, and the times of decode steps."""
    device = jax.devices()[0]
    sizes = with_defaults(args, SIZES, device)
    layout = _layout(args, "BLNHC", args.blocks)
    require_memory(f"a cache of {args.blocks} blocks, and a pool of them", layout.nbytes, on_host=layout.nbytes)
    batch = _layout(args, "BLNHC", args.requests * _per_request(args)).nbytes
    batch += attention_nbytes(ENTRY, args.requests, args.heads)
    what = (
        f"{args.requests} requests of {args.tokens} tokens with {args.heads} heads, and a pool of {args.blocks} blocks"
    )
    require_memory(what, batch, on_host=layout.nbytes)
    pool = offload.HostPool(layout, args.blocks)
    blocks = counted(args.blocks, "blocks")
    print(f"{device.device_kind}, jax {jax.__version__}: {blocks} of {layout.block_nbytes / 1e6:.2f} MB")
    large = large_rates(min(CPU_LARGE_BYTES if device.platform == "cpu" else LARGE_BYTES, layout.nbytes), args.repeats)
    print("one large array: to the host {store:.1f} GB/s, back {load:.1f} GB/s".format(**large))
    rows = {}
    for order in ("BLNHC", "LBNHC"):
        rows[order] = _whole(_filled(_layout(args, order, args.blocks)), pool, args.repeats)
    rows["LBNHC, one copy per layer"] = _layerwise(_filled(_layout(args, "LBNHC", LAYERWISE_BLOCKS)), args.repeats)
    for name, row in rows.items():
        parts = {way: f"({row[way] / large[way]:.2f} of one large array)" for way in row}
        print(f"{name}: " + ", ".join(f"{way} {rate:.1f} GB/s {parts[way]}" for way, rate in row.items()))
    steps = _steps(args, pool)
    names = "requests", "tokens", "heads", "layers"
    requests, tokens, heads, layers = (counted(getattr(args, name), name) for name in names)
    print(
        f"decode of {requests} x {tokens}, {heads}, {layers}: {steps['alone_ms']:.2f} ms per step; "
        f"{steps['beside_ms']:.2f} ms with {steps['blocks']} blocks stored after each step, "
        f"{steps['store']:.1f} GB/s"
    )
    if args.json:
        found = {"block_bytes": layout.block_nbytes, "large": large, "rows": rows, "steps": steps}
        about = {**when_and_how(args.argv), "device": device.device_kind, "jax": jax.__version__}
        write_json(args.json, {**about, **sizes, **found})
    return 0


def _layout(args: argparse.Namespace, order: str, num_blocks: int) -> jaxkv.CacheLayout:
    return jaxkv.CacheLayout(
        num_layers=args.layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        entry=ENTRY,
        order=order,  # type: ignore[arg-type]
    )


def _per_request(args: argparse.Namespace) -> int:
    """Blocks per request."""
    return -(-args.tokens // BLOCK_SIZE)


def _filled(layout: jaxkv.CacheLayout) -> jaxkv.KVCache:
    """A cache of random entries."""

    @jax.jit
    def fill():
        shape = (PATTERN_BLOCKS, layout.pages.block_elements)
        return with_repeated_blocks(layout, jax.random.normal(jax.random.key(0), shape, layout.dtype))

    # Committed to its device, like the caches that `load` returns, so that programs are not compiled twice.
    return jax.block_until_ready(jax.device_put(fill(), jax.devices()[0]))


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the result of `call` has arrived, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def _rates(nbytes: int, stores: list[float], loads: list[float], *, warm_up: int = 1) -> dict[str, float]:
    """Median GB/s of stores and of loads, without the first `warm_up` transfers, the first of which compiles."""
    return {way: nbytes / float(np.median(s[warm_up:])) / 1e9 for way, s in (("store", stores), ("load", loads))}


def large_rates(nbytes: int, repeats: int) -> dict[str, float]:
    """The ceiling: GB/s of one large array, after untimed transfers that touch its memory."""
    stores, loads = [], []
    array = jax.device_put(jax.random.bits(jax.random.key(0), (nbytes // 4,)), jax.devices()[0])
    for _ in range(WARM_UP + repeats):
        seconds, there = _seconds(lambda: transfers.to_host(array))
        stores.append(seconds)
        loads.append(_seconds(partial(transfers.to_device, there, array.sharding))[0])
    return _rates(nbytes, stores, loads, warm_up=WARM_UP)


def _keys(*about: Any, count: int) -> list[bytes]:
    """Keys of `count` blocks that were never stored, made from `about`."""
    return [repr((*about, i)).encode() for i in range(count)]


def _whole(cache: jaxkv.KVCache, pool: offload.HostPool, repeats: int) -> dict[str, float]:
    """Transfers all blocks of a cache, in random order, to the pool and back."""
    stores, loads = [], []
    count, order = cache.layout.num_blocks, cache.layout.order
    blocks = np.random.default_rng(0).permutation(count).tolist()
    for repeat in range(1 + repeats):
        keys = _keys(order, repeat, count=count)

        def store(keys=keys, cache=cache):
            pool.store(cache, blocks, keys)
            pool.flush()

        stores.append(_seconds(store)[0])
        seconds, cache = _seconds(partial(pool.load, cache, blocks, keys))
        loads.append(seconds)
    return _rates(count * pool.block_nbytes, stores, loads)


def _layerwise(cache: jaxkv.KVCache, repeats: int) -> dict[str, float]:
    """Transfers blocks with one transfer per layer."""
    pages = jax.jit(lambda x: list(x.reshape(-1, x.size // (cache.layout.num_layers * cache.layout.num_blocks))))
    stores, loads = [], []
    for _ in range(1 + repeats):
        there = jax.block_until_ready(pages(cache.buffer))
        seconds, there = _seconds(lambda there=there: list(map(transfers.to_host, there)))
        stores.append(seconds)
        back = partial(transfers.to_device, sharding=one_array(cache.buffer).sharding)
        loads.append(_seconds(lambda there=there, back=back: list(map(back, there)))[0])
    return _rates(one_array(cache.buffer).nbytes, stores, loads)


def _steps(args: argparse.Namespace, pool: offload.HostPool) -> dict[str, float]:
    """Milliseconds per decode step, alone and with a store after each step.

    A store copies as many blocks as may be in flight.
    """
    per_request = _per_request(args)
    blocks = np.random.default_rng(1).permutation(args.requests * per_request)
    cache = _filled(_layout(args, "BLNHC", blocks.size))
    tables = jnp.asarray(blocks.reshape(args.requests, per_request), jnp.int32)
    lengths = jnp.full(args.requests, args.tokens, jnp.int32)
    keys = jax.random.split(jax.random.key(0))
    sizes = zip(keys, cache.layout.entry.sizes, strict=True)
    queries = [jax.random.normal(key, (args.requests, args.heads, n), jnp.bfloat16) for key, n in sizes]
    step = jax.jit(_step, donate_argnums=0)
    stored = blocks[: pool.blocks_in_flight].tolist()

    def steps(store: bool) -> float:
        nonlocal cache
        start = time.perf_counter()
        for i in range(STEPS):
            cache, _ = step(cache, *queries, tables, lengths)
            if store:
                pool.store(cache, stored, _keys(args.requests, start, i, count=len(stored)))
        jax.block_until_ready(cache.buffer)
        return (time.perf_counter() - start) / STEPS

    alone, beside = (np.median([steps(store) for _ in range(1 + args.repeats)][1:]) for store in (False, True))
    moved = len(stored) * pool.block_nbytes / beside / 1e9
    return {"alone_ms": 1e3 * alone, "beside_ms": 1e3 * beside, "blocks": len(stored), "store": moved}


def _step(cache: jaxkv.KVCache, q_latent, q_pe, block_tables, seq_lens):
    """A decode step: writes the new tokens and computes attention in all layers."""
    slots = jaxkv.slots_for(block_tables, seq_lens[:, None] - 1, cache)[:, 0]
    plan = jaxkv.plan_decode(cache, block_tables, seq_lens, num_heads=q_pe.shape[1])

    def layer(carry, i):
        cache, x = carry
        cache = jaxkv.write_mla(cache, x[:, 0], q_pe[:, 0], slots, layer=i)
        out = jaxkv.decode_mla(x, q_pe, cache, block_tables, seq_lens, layer=i, scale=192**-0.5, plan=plan)
        return (cache, out), None

    (cache, x), _ = lax.scan(layer, (cache, q_latent), jnp.arange(cache.layout.num_layers))
    return cache, x
