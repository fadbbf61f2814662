"""Check on this machine that every operation returns the same bits on every layout.

Each operation runs on caches of every order, whose memory around the entries is full of random bytes, and on a twin: a
layer-major cache whose memory around the entries is 0.  Results must be equal bit for bit, and a write or a copy must
leave every other byte as it was.  With `--calls`, the fuzzer makes that many random calls on random layouts instead.

On GPUs, XLA chooses algorithms for products by timing them, for each program, so that results of `xla` may differ in
their last bits.  `XLA_FLAGS=--xla_gpu_autotune_level=0` avoids this.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from threading import Event
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.cli.options import positive, seed
from jaxkv.fuzz.check import address_map
from jaxkv.fuzz.fuzz import fuzz
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.progress import progress

LENGTHS = (0, 1, 63, 64, 65, 190)
BLOCKS, BLOCK_SIZE, LAYERS, LAYER = 12, 64, 3, 1

ENTRIES = (
    *(jaxkv.MLAEntry.typical(name) for name in jaxkv.MLAEntry.formats),
    *(jaxkv.KVEntry.typical(name) for name in jaxkv.KVEntry.formats),
    *(jaxkv.IndexerEntry.typical(name) for name in jaxkv.IndexerEntry.formats),
    *(jaxkv.StateEntry.typical(name) for name in jaxkv.StateEntry.formats),
)


class Case(NamedTuple):
    """The outcome of one operation on a cache of one order."""

    operation: str
    order: str
    wrong: str = ""
    """What is wrong with the result; empty if it is right."""
    rejected: str = ""
    """The reasons why the implementation does not support the call."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: which implementation to check, and how."""
    parser.add_argument("--implementation", choices=jaxkv.implementations(), default="xla")
    parser.add_argument("--calls", type=positive, metavar="N", help="make N random calls of random layouts and shapes")
    parser.add_argument("--seed", type=seed, default=0, metavar="S", help="first seed of --calls (0)")


def run(args: argparse.Namespace) -> int:
    """Prints one line per operation and format; returns 1 if any result differs.  ValueError if nothing was checked."""
    if args.calls is not None:
        return 1 if fuzz(calls=args.calls, seed=args.seed, implementation=args.implementation) else 0
    start, every = time.perf_counter(), []
    for entry, cases in zip(progress(ENTRIES, "verifying"), _verify_all(args.implementation), strict=True):
        for operation in dict.fromkeys(case.operation for case in cases):
            outcome = _outcome([case for case in cases if case.operation == operation])
            print(f"{operation:18} {entry.format:13} {outcome}")
        every += cases
    checked = [case for case in every if not case.rejected]
    if not checked:
        raise ValueError(
            f"nothing was checked: {args.implementation} supports no call on this machine ({every[0].rejected})"
        )
    wrong = sum(bool(case.wrong) for case in checked)
    total = f"{len(checked)} cases on {jax.devices()[0].device_kind} in {time.perf_counter() - start:.0f} s"
    print(f"{wrong} of {total} differ" if wrong else f"all of {total}: equal bit for bit")
    return 1 if wrong else 0


def _outcome(cases: list[Case]) -> str:
    """The outcomes of one operation, as one line of text."""
    right = [case for case in cases if not (case.wrong or case.rejected)]
    outcomes = [f"ok on {counted(len(right), 'orders')}"] if right else []
    outcomes += [f"{case.order}: {case.wrong}" for case in cases if case.wrong]
    for reason in dict.fromkeys(case.rejected for case in cases if case.rejected):
        orders = sum(case.rejected == reason for case in cases)
        outcomes.append(f"rejected on {counted(orders, 'orders')}: {reason}")
    return "; ".join(outcomes)


def _verify_all(implementation: str) -> Iterator[list[Case]]:
    """The cases of each of `ENTRIES`.  Nearly all the time is that of compilers, which work in threads at once."""
    stopped = Event()

    def cases(entry):
        return list(takewhile(lambda case: not stopped.is_set(), _verify(entry, implementation)))

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(cases, ENTRIES)
    finally:  # after Ctrl-C, too, which waits for the case that each thread is at
        stopped.set()
        pool.shutdown(cancel_futures=True)


def _verify(entry, implementation: str) -> Iterator[Case]:
    """Runs every operation on caches of `entry` in each order."""
    heads = 1 if entry.one_head else 2
    layouts = {
        order: jaxkv.CacheLayout(
            num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_heads=heads, entry=entry, order=order
        )
        for order in jaxkv.ORDERS
    }
    calls = _calls(entry, heads)
    expected = {}
    for order, layout in layouts.items():
        noise = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
        twin_layout = layouts["LBNHC"]  # whose compiled programs the twin shares
        quiet = np.zeros(twin_layout.nbytes, np.uint8)
        _entries(twin_layout, quiet, LAYER)[...] = _entries(layout, noise, LAYER)
        cache, twin, unwritten = _cache(layout, noise), _cache(twin_layout, quiet), None
        for operation, call in calls.items():
            try:
                result = call(cache, implementation)
                if unwritten:  # the implementation reads what it cannot write
                    cache, twin, unwritten = unwritten(cache, "xla"), unwritten(twin, "xla"), None
                    result = call(cache, implementation)
            except NotImplementedError as error:
                unwritten = call if operation.startswith("write") else unwritten
                yield Case(operation, order, rejected=str(error))
                continue
            if isinstance(result, jaxkv.KVCache):
                cache, twin = result, call(twin, implementation)
                yield Case(operation, order, wrong=_bleed(noise, cache, twin))
                continue
            if operation not in expected:
                expected[operation] = call(twin, implementation)
            equal = jax.tree.map(lambda a, b: np.array_equal(_bytes(a), _bytes(b)), result, expected[operation])
            differs = not all(jax.tree.leaves(equal))
            yield Case(operation, order, wrong="differs from the twin" if differs else "")
        yield from _verify_blocks(order, layout, noise, implementation)


def _verify_blocks(order: str, layout: jaxkv.CacheLayout, noise: np.ndarray, implementation: str) -> Iterator[Case]:
    """Checks a block copied within the cache, and one exported to an empty cache.

    Padding is copied with the block where blocks are runs, and otherwise keeps its bytes, like those of other blocks.
    """
    one: dict[str, Any] = {"implementation": implementation}
    source, target = 5, 2
    elements, bits = address_map(layout).blocks, f"uint{8 * layout.itemsize}"
    cache, ids = _cache(layout, noise), (jnp.asarray([source], jnp.int32), jnp.asarray([target], jnp.int32))

    def send():
        rows = jaxkv.read_blocks(cache, ids[0], **one)
        return jaxkv.write_blocks(_cache(layout, np.zeros_like(noise)), ids[1], rows, **one)

    calls = {
        "copy_blocks": (lambda: jaxkv.copy_blocks(cache, *ids, **one), noise),
        "read/write_blocks": (send, np.zeros_like(noise)),
    }
    for operation, (call, before) in calls.items():
        expected = before.copy()
        expected.view(bits)[elements[target]] = noise.view(bits)[elements[source]]
        try:
            equal = np.array_equal(_bytes(call().buffer), expected)
            yield Case(operation, order, wrong="" if equal else "copied the wrong bytes")
        except NotImplementedError as error:
            yield Case(operation, order, rejected=str(error))


Run = Callable[[jaxkv.KVCache, str], Any]
"""The call of an operation, given a cache and an implementation."""


def _calls(entry, heads: int) -> dict[str, Run]:
    """A call of each operation.  The write comes first; the others read what it stored."""
    rng = np.random.default_rng(1)

    def normal(*shape):
        # Inputs are made by NumPy: each shape would be another program to compile.
        return jnp.asarray(rng.standard_normal(shape).astype(entry.dtype if entry.dtype == "float32" else jnp.bfloat16))

    needed = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    pages = np.full((len(LENGTHS), max(needed)), -1, np.int32)
    free = iter(rng.permutation(BLOCKS))
    for request, count in enumerate(needed):
        pages[request, :count] = [next(free) for _ in range(count)]
    request, position = np.repeat(np.arange(len(LENGTHS)), LENGTHS), np.concatenate([np.arange(n) for n in LENGTHS])
    stored = pages[request, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    tables, slots, lengths, cu_seq_lens = (
        jnp.asarray(x, jnp.int32) for x in (pages, stored, LENGTHS, [0, *np.cumsum(LENGTHS)])
    )
    total, batch = sum(LENGTHS), len(LENGTHS)
    # Several query tokens take XLA much longer to compile, and do not change how entries are decoded.
    tokens = 1 if entry.quantised else 2
    ragged: dict[str, Any] = {"layer": LAYER, "total": total, "dtype": jnp.float32}

    def run(operation, *args, **options) -> Run:
        return lambda cache, implementation: operation(cache, *args, **options, implementation=implementation)

    def attend(operation, queries, *args, **options) -> Run:
        options |= {"layer": LAYER, "return_lse": True}
        return lambda cache, name: operation(*queries, cache, *args, **options, implementation=name)

    if isinstance(entry, jaxkv.MLAEntry):
        scale: dict[str, Any] = {"kv_scale": 0.03} if entry.codec.scaled else {}
        values = [normal(total, n) for n in entry.sizes]
        queries, sparse = ([normal(batch, q, 32 // q, n) for n in entry.sizes] for q in (tokens, 2))
        chosen = rng.integers(-1, BLOCKS * BLOCK_SIZE, (batch, 2, 48), np.int32)
        chosen = jnp.asarray(np.where(np.isin(chosen, stored), chosen, np.int32(-1)))
        return {
            "write_mla": run(jaxkv.write_mla, *values, slots, layer=LAYER, **scale),
            "gather_mla": run(jaxkv.gather_mla, tables, cu_seq_lens, **scale, **ragged),
            "decode_mla": attend(jaxkv.decode_mla, queries, tables, lengths, scale=0.07, **scale),
            "decode_mla_sparse": attend(jaxkv.decode_mla_sparse, sparse, chosen, scale=0.07, **scale),
        }
    if isinstance(entry, jaxkv.KVEntry):
        scale: dict[str, Any] = {"k_scale": 0.03, "v_scale": 0.02} if entry.codec.scaled else {}
        values = [normal(total, heads, n) for n in entry.sizes]
        queries = [normal(batch, tokens, heads * 8 // tokens, entry.head_dim)]
        return {
            "write_kv": run(jaxkv.write_kv, *values, slots, layer=LAYER, **scale),
            "gather_kv": run(jaxkv.gather_kv, tables, cu_seq_lens, **scale, **ragged),
            "decode_kv": attend(jaxkv.decode_kv, queries, tables, lengths, scale=0.09, **scale),
        }
    if isinstance(entry, jaxkv.StateEntry):
        states = {name: normal(total, *shape) for name, shape in entry.shapes.items()}
        return {
            "write_state": run(jaxkv.write_state, states, slots, layer=LAYER),
            "read_state": run(jaxkv.read_state, slots, layer=LAYER),
        }
    key, q, weights = normal(total, entry.head_dim), normal(batch, 2, 4, entry.head_dim), normal(batch, 2, 4)
    return {
        "write_indexer_k": run(jaxkv.write_indexer_k, key, slots, layer=LAYER),
        "gather_indexer_k": run(jaxkv.gather_indexer_k, tables, cu_seq_lens, **ragged),
        "indexer_logits": lambda cache, name: jaxkv.indexer_logits(
            q,
            weights,
            cache,
            tables,
            lengths,
            layer=LAYER,
            max_len=256,
            implementation=name,  # type: ignore[arg-type]
        ),
    }


def _bleed(noise: np.ndarray, cache: jaxkv.KVCache, twin: jaxkv.KVCache) -> str:
    """What is wrong with a cache after a write; empty if nothing.

    The layer that was written must hold the twin's entries, and everything else the random bytes `noise` of before.
    """
    after = _bytes(cache.buffer)
    if not np.array_equal(_entries(cache.layout, after, LAYER), _entries(twin.layout, _bytes(twin.buffer), LAYER)):
        return "stored different bytes from the twin"
    restored = after.copy()
    _entries(cache.layout, restored, LAYER)[...] = _entries(cache.layout, noise, LAYER)
    return "" if np.array_equal(restored, noise) else "changed bytes of other entries"


def _entries(layout: jaxkv.CacheLayout, buffer: np.ndarray, layer: int) -> np.ndarray:
    """The bytes [B, H, N, nbytes] of a layer, as a view of the buffer, by the layout's strides."""
    strides, item = layout.strides, layout.itemsize
    shape = (layout.num_blocks, layout.num_heads, layout.block_size, layout.entry.nbytes)
    steps = (strides.block * item, strides.head * item, strides.token * item, 1)
    return np.lib.stride_tricks.as_strided(buffer[(layout.offset + layer * strides.layer) * item :], shape, steps)


def _cache(layout: jaxkv.CacheLayout, buffer: np.ndarray) -> jaxkv.KVCache:
    return jaxkv.KVCache(jnp.asarray(buffer.view(layout.dtype)), layout)


def _bytes(array) -> np.ndarray:
    return np.asarray(array).reshape(-1).view(np.uint8)
