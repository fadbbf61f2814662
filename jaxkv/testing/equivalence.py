"""Checks that every operation returns the same bits on every order of a cache's axes.

Each operation runs on caches of every order, whose memory around the entries is full of random bytes, and on a twin: a
layer-major cache whose memory around the entries is 0.  Results must be equal bit for bit, and a write or a copy must
leave every other byte as it was.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from threading import Event
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.testing.buffers import address_map, get_entries, set_entries, to_bytes, to_cache
from jaxkv.testing.caches import differences

LENGTHS = (0, 1, 63, 64, 65, 190)
BLOCKS, BLOCK_SIZE, LAYERS, LAYER = 12, 64, 3, 1
K_SCALE, V_SCALE = 0.03, 0.02
"""The scales of formats that have them; latents have the first."""

ENTRIES = (
    *(jaxkv.MLAEntry.typical(name) for name in jaxkv.MLAEntry.formats),
    *(jaxkv.KVEntry.typical(name) for name in jaxkv.KVEntry.formats),
    *(jaxkv.IndexerEntry.typical(name) for name in jaxkv.IndexerEntry.formats),
    *(jaxkv.StateEntry.typical(name) for name in jaxkv.StateEntry.formats),
)


DIFFERS = "differs from the twin"


class Outcome(NamedTuple):
    """The outcome of one operation on a cache of one order."""

    operation: str
    order: str
    wrong: str = ""
    """What is wrong with the result; empty if it is right."""
    rejected: str = ""
    """The reasons why the implementation does not support the call."""


def verify_all(implementation: str) -> Iterator[list[Outcome]]:
    """The cases of each of `ENTRIES`.  Nearly all the time is that of compilers, which work in threads at once."""
    stopped = Event()

    def cases(entry):
        return list(takewhile(lambda case: not stopped.is_set(), verify(entry, implementation)))

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(cases, ENTRIES)
    finally:  # after Ctrl-C, too, which waits for the case that each thread is at
        stopped.set()
        pool.shutdown(cancel_futures=True)


def verify(entry, implementation: str) -> Iterator[Outcome]:
    """Runs every operation on caches of `entry` in each order."""
    heads = 1 if entry.one_head else 2
    layouts = {
        order: jaxkv.CacheLayout(
            num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_heads=heads, entry=entry, order=order
        )
        for order in jaxkv.ORDERS
    }
    # Several query tokens take XLA much longer to compile, and do not change how entries are decoded.
    calls = calls_of(entry, heads, q_len=1 if entry.quantised else 2)
    expected = {}
    for order, layout in layouts.items():
        noise = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
        twin_layout = layouts["LBNHC"]  # whose compiled programs the twin shares
        quiet = np.zeros(twin_layout.nbytes, np.uint8)
        set_entries(twin_layout, quiet, LAYER, get_entries(layout, noise, LAYER))
        cache, twin, unwritten = to_cache(layout, noise), to_cache(twin_layout, quiet), None
        for operation, call in calls.items():
            try:
                result = call(cache, implementation)
                if unwritten:  # the implementation reads what it cannot write
                    cache, twin, unwritten = unwritten(cache, "xla"), unwritten(twin, "xla"), None
                    result = call(cache, implementation)
            except NotImplementedError as error:
                unwritten = call if operation.startswith("write") else unwritten
                yield Outcome(operation, order, rejected=str(error))
                continue
            if isinstance(result, jaxkv.KVCache):
                cache, twin = result, call(twin, implementation)
                yield Outcome(operation, order, wrong=_bleed(noise, cache, twin))
                continue
            if operation == "decode_delta_rule":
                (result, cache), (right, twin) = result, call(twin, implementation)
                wrong = _bleed(noise, cache, twin) or ("" if _same(result, right) else DIFFERS)
                yield Outcome(operation, order, wrong=wrong)
                continue
            if operation not in expected:
                expected[operation] = call(twin, implementation)
            yield Outcome(operation, order, wrong="" if _same(result, expected[operation]) else DIFFERS)
        yield from verify_blocks(order, layout, noise, implementation)


def verify_blocks(order: str, layout: jaxkv.CacheLayout, noise: np.ndarray, implementation: str) -> Iterator[Outcome]:
    """Checks a block copied within the cache, and one exported to an empty cache.

    Padding is copied with the block where blocks are runs, and otherwise keeps its bytes, like those of other blocks.
    """
    one: dict[str, Any] = {"implementation": implementation}
    source, target = 5, 2
    elements, bits = address_map(layout).blocks, f"uint{8 * layout.itemsize}"
    cache, ids = to_cache(layout, noise), (jnp.asarray([source], jnp.int32), jnp.asarray([target], jnp.int32))

    def send():
        rows = jaxkv.read_blocks(cache, ids[0], **one)
        return jaxkv.write_blocks(to_cache(layout, np.zeros_like(noise)), ids[1], rows, **one)

    calls = {
        "copy_blocks": (lambda: jaxkv.copy_blocks(cache, *ids, **one), noise),
        "read/write_blocks": (send, np.zeros_like(noise)),
    }
    for operation, (call, before) in calls.items():
        expected = before.copy()
        expected.view(bits)[elements[target]] = noise.view(bits)[elements[source]]
        try:
            equal = np.array_equal(to_bytes(call()), expected)
            yield Outcome(operation, order, wrong="" if equal else "copied the wrong bytes")
        except NotImplementedError as error:
            yield Outcome(operation, order, rejected=str(error))


Run = Callable[[jaxkv.KVCache, str], Any]
"""The call of an operation, given a cache and an implementation."""


def calls_of(entry, heads: int, *, q_len: int) -> dict[str, Run]:
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
    single: dict[str, Any] = {"layer": LAYER, "dtype": jnp.float32}
    ragged = {**single, "total": total}

    def run(operation, *args, **options) -> Run:
        return lambda cache, implementation: operation(cache, *args, **options, implementation=implementation)

    def attend(operation, queries, *args, **options) -> Run:
        options |= {"layer": LAYER, "return_lse": True}
        return lambda cache, name: operation(*queries, cache, *args, **options, implementation=name)

    if isinstance(entry, jaxkv.MLAEntry):
        scale: dict[str, Any] = {"kv_scale": K_SCALE} if entry.codec.scaled else {}
        values = [normal(total, n) for n in entry.sizes]
        queries, sparse = ([normal(batch, q, 32 // q, n) for n in entry.sizes] for q in (q_len, 2))
        chosen = rng.integers(-1, BLOCKS * BLOCK_SIZE, (batch, 2, 48), np.int32)
        chosen = jnp.asarray(np.where(np.isin(chosen, stored), chosen, np.int32(-1)))
        return {
            "write_mla": run(jaxkv.write_mla, *values, slots, layer=LAYER, **scale),
            "gather_mla": run(jaxkv.gather_mla, tables, cu_seq_lens, **scale, **ragged),
            "read_mla": run(jaxkv.read_mla, slots[::-1], **scale, **single),
            "decode_mla": attend(jaxkv.decode_mla, queries, tables, lengths, scale=0.07, **scale),
            "decode_mla_sparse": attend(jaxkv.decode_mla_sparse, sparse, chosen, scale=0.07, **scale),
        }
    if isinstance(entry, jaxkv.KVEntry):
        scale: dict[str, Any] = {"k_scale": K_SCALE, "v_scale": V_SCALE} if entry.codec.scaled else {}
        values = [normal(total, heads, n) for n in entry.sizes]
        queries = [normal(batch, q_len, heads * 8 // q_len, entry.head_dim)]
        return {
            "write_kv": run(jaxkv.write_kv, *values, slots, layer=LAYER, **scale),
            "gather_kv": run(jaxkv.gather_kv, tables, cu_seq_lens, **scale, **ragged),
            "read_kv": run(jaxkv.read_kv, slots[::-1], **scale, **single),
            "decode_kv": attend(jaxkv.decode_kv, queries, tables, lengths, scale=0.09, **scale),
        }
    if isinstance(entry, jaxkv.StateEntry):
        states = {name: normal(total, *shape) for name, shape in entry.shapes.items()}
        (taps, channels), (value_heads, *_) = entry.shapes["conv"], entry.shapes["delta"]
        rates = jnp.asarray(rng.uniform(0, 1, (3, value_heads)), jnp.float32)
        token = normal(3, channels), -rates[..., None], rates, normal(channels, taps + 1)
        # In place, to another slot, and of a new request.
        step = jnp.asarray([*stored[:2], -1], jnp.int32), jnp.asarray([stored[0], *stored[2:4]], jnp.int32)
        return {
            "write_state": run(jaxkv.write_state, states, slots, layer=LAYER),
            "read_state": run(jaxkv.read_state, slots, layer=LAYER),
            "decode_delta_rule": lambda cache, name: jaxkv.decode_delta_rule(
                *token,
                cache,
                *step,
                layer=LAYER,
                implementation=name,  # type: ignore[arg-type]
            ),
        }
    key, q, weights = normal(total, entry.head_dim), normal(batch, 2, 4, entry.head_dim), normal(batch, 2, 4)
    return {
        "write_indexer_k": run(jaxkv.write_indexer_k, key, slots, layer=LAYER),
        "gather_indexer_k": run(jaxkv.gather_indexer_k, tables, cu_seq_lens, **ragged),
        "read_indexer_k": run(jaxkv.read_indexer_k, slots[::-1], **single),
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
    expected = noise.copy()
    set_entries(cache.layout, expected, LAYER, get_entries(twin.layout, to_bytes(twin), LAYER))
    return " ".join(differences(cache.layout, to_bytes(cache), expected, padding=True).split())


def _same(result, expected) -> bool:
    """Whether the arrays of two results are equal bit for bit."""
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(_bytes(a), _bytes(b)), result, expected)))


def _bytes(array: jax.Array) -> np.ndarray:
    return np.asarray(array).reshape(-1).view(np.uint8)
