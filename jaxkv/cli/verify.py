"""Check on this machine that every operation returns the same bits on every layout.

Each operation runs on caches of every order and on a packed cache of one layer.  The memory around the entries is full
of random bytes.  Results must be equal bit for bit, and a write must leave every other byte as it was.  With `--calls`,
the fuzzer makes that many random calls on random layouts instead.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.cli.options import positive, seed
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
    for entry in progress(ENTRIES, "verifying"):
        cases = list(_verify(entry, args.implementation))
        for operation in dict.fromkeys(case.operation for case in cases):
            outcome = _outcome([case for case in cases if case.operation == operation])
            print(f"{operation:18} {entry.format:12} {outcome}")
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


def _verify(entry, implementation: str) -> Iterator[Case]:
    """Runs every operation on caches of `entry` in each order."""
    heads = 1 if entry.one_head else 2
    sizes = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "num_heads": heads, "entry": entry}
    packed = jaxkv.CacheLayout(num_layers=1, order="LBNHC", **sizes)
    calls = _calls(entry, heads, implementation)
    expected = {}
    for order in jaxkv.ORDERS:
        layout = jaxkv.CacheLayout(num_layers=LAYERS, order=order, **sizes)
        noise = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
        quiet = np.zeros(packed.nbytes, np.uint8)
        _entries(packed, quiet, 0)[...] = _entries(layout, noise, LAYER)
        cache, twin = _cache(layout, noise), _cache(packed, quiet)
        for operation, call in calls.items():
            try:
                result = call(cache, LAYER)
                if isinstance(result, jaxkv.KVCache):
                    cache, twin = result, call(twin, 0)
                    yield Case(operation, order, wrong=_bleed(noise, cache, twin))
                else:
                    if operation not in expected:
                        expected[operation] = call(twin, 0)
                    equal = jax.tree.map(lambda a, b: np.array_equal(_bytes(a), _bytes(b)), result, expected[operation])
                    differs = not all(jax.tree.leaves(equal))
                    yield Case(operation, order, wrong="differs from the packed cache" if differs else "")
            except NotImplementedError as error:
                yield Case(operation, order, rejected=str(error))
        yield from _verify_blocks(layout, noise, implementation)


def _verify_blocks(layout: jaxkv.CacheLayout, noise: np.ndarray, implementation: str) -> Iterator[Case]:
    """Checks a block copied within the cache, and one exported to an empty cache."""
    one: dict[str, Any] = {"implementation": implementation}
    source, target = 5, 2
    cache, ids = _cache(layout, noise), (jnp.asarray([source], jnp.int32), jnp.asarray([target], jnp.int32))

    def send():
        rows = jaxkv.read_blocks(cache, ids[0], **one)
        return jaxkv.write_blocks(jaxkv.KVCache.zeros(layout), ids[1], rows, **one)

    calls = {
        "copy_blocks": (lambda: jaxkv.copy_blocks(cache, *ids, **one), noise),
        "read/write_blocks": (send, np.zeros_like(noise)),
    }
    for operation, (call, before) in calls.items():
        expected = before.copy()
        for layer in range(layout.num_layers):
            _entries(layout, expected, layer)[target] = _entries(layout, noise, layer)[source]
        try:
            equal = np.array_equal(_bytes(call().buffer), expected)
            yield Case(operation, layout.order, wrong="" if equal else "copied the wrong bytes")
        except NotImplementedError as error:
            yield Case(operation, layout.order, rejected=str(error))


def _calls(entry, heads: int, implementation: str) -> dict[str, Callable[[jaxkv.KVCache, int], Any]]:
    """A function of a cache and a layer for each operation.  The write comes first; the others read what it stored."""
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32 if entry.dtype == jnp.float32 else jnp.bfloat16)

    needed = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    tables = np.full((len(LENGTHS), max(needed)), -1, np.int32)
    free = iter(rng.permutation(BLOCKS))
    for request, count in enumerate(needed):
        tables[request, :count] = [next(free) for _ in range(count)]
    tables, lengths = jnp.asarray(tables), jnp.asarray(LENGTHS, jnp.int32)
    total, batch = sum(LENGTHS), len(LENGTHS)
    cu_seq_lens = jnp.asarray([0, *np.cumsum(LENGTHS)], jnp.int32)
    slots = jaxkv.ragged_slots(tables, cu_seq_lens, total=total, block_size=BLOCK_SIZE)
    ragged: dict[str, Any] = {"total": total, "dtype": jnp.float32, "implementation": implementation}
    one: dict[str, Any] = {"implementation": implementation}
    if isinstance(entry, jaxkv.MLAEntry):
        scale: dict[str, Any] = {"kv_scale": 0.03} if entry.codec.scaled else {}
        (kv_c, k_pe), (q, q_pe) = ([normal(*shape, n) for n in entry.sizes] for shape in ((total,), (batch, 2, 16)))
        chosen = jnp.asarray(rng.integers(-1, BLOCKS * BLOCK_SIZE, (batch, 2, 48)), jnp.int32)
        attend: dict[str, Any] = {"scale": 0.07, "return_lse": True, **scale, **one}
        return {
            "write_mla": lambda c, i: jaxkv.write_mla(c, kv_c, k_pe, slots, layer=i, **scale, **one),
            "gather_mla": lambda c, i: jaxkv.gather_mla(c, tables, cu_seq_lens, layer=i, **scale, **ragged),
            "decode_mla": lambda c, i: jaxkv.decode_mla(q, q_pe, c, tables, lengths, layer=i, **attend),
            "decode_mla_sparse": lambda c, i: jaxkv.decode_mla_sparse(
                q, q_pe, c, jnp.where(jnp.isin(chosen, slots), chosen, -1), layer=i, **attend
            ),
        }
    if isinstance(entry, jaxkv.KVEntry):
        scale: dict[str, Any] = {"k_scale": 0.03, "v_scale": 0.02} if entry.codec.scaled else {}
        (k, v), q = [normal(total, heads, n) for n in entry.sizes], normal(batch, 2, 4 * heads, entry.head_dim)
        attend: dict[str, Any] = {"scale": 0.09, "return_lse": True, **scale, **one}
        return {
            "write_kv": lambda c, i: jaxkv.write_kv(c, k, v, slots, layer=i, **scale, **one),
            "gather_kv": lambda c, i: jaxkv.gather_kv(c, tables, cu_seq_lens, layer=i, **scale, **ragged),
            "decode_kv": lambda c, i: jaxkv.decode_kv(q, c, tables, lengths, layer=i, **attend),
        }
    if isinstance(entry, jaxkv.StateEntry):
        states = {name: normal(total, *shape) for name, shape in entry.shapes.items()}
        return {
            "write_state": lambda c, i: jaxkv.write_state(c, states, slots, layer=i, **one),
            "read_state": lambda c, i: jaxkv.read_state(c, slots, layer=i, **one),
        }
    key, q, weights = normal(total, entry.head_dim), normal(batch, 2, 4, entry.head_dim), normal(batch, 2, 4)
    return {
        "write_indexer_k": lambda c, i: jaxkv.write_indexer_k(c, key, slots, layer=i, **one),
        "gather_indexer_k": lambda c, i: jaxkv.gather_indexer_k(c, tables, cu_seq_lens, layer=i, **ragged),
        "indexer_logits": lambda c, i: jaxkv.indexer_logits(
            q, weights, c, tables, lengths, layer=i, max_len=256, **one
        ),
    }


def _bleed(noise: np.ndarray, cache: jaxkv.KVCache, twin: jaxkv.KVCache) -> str:
    """What is wrong with a cache after a write; empty if nothing.

    The layer that was written must hold the twin's entries, and everything else the random bytes `noise` of before.
    """
    after = _bytes(cache.buffer)
    if not np.array_equal(_entries(cache.layout, after, LAYER), _entries(twin.layout, _bytes(twin.buffer), 0)):
        return "stored different bytes from the packed cache"
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
