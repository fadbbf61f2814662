"""Gradients of attention through pages, compared with those of dense attention in float64, which JAX differentiates.

In the dense model, every query row is compared with every slot of a layer, and `seen` says which slots it sees.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from support import oracle
from support.arrays import as_float64, on_device
from support.compare import assert_close

SCALE = 0.3


class Paged(NamedTuple):
    """Random entries in one layer of a cache, at the slots that are seen.  All other memory holds NaN."""

    cache: jaxkv.KVCache
    layer: int
    parts: tuple[np.ndarray, ...]
    """The values of the entries, [slots, H, n_i] in float64; 0 at slots that are not seen."""
    used: np.ndarray
    """bool [slots], which are seen."""

    @classmethod
    def of(cls, layout: jaxkv.CacheLayout, used: np.ndarray, layer: int = 0) -> "Paged":
        """Entries at slots `used`."""
        rng, count, heads = np.random.default_rng(3), used.size, layout.num_heads
        drawn = [rng.standard_normal((count, heads, size)).astype(layout.dtype) for size in layout.entry.sizes]
        parts = tuple(np.where(used[:, None, None], as_float64(part), 0) for part in drawn)
        nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), jaxkv.KVCache.zeros(layout))
        return cls(_with_entries(nan, layer, drawn, used), layer, parts, used)

    def check(self, gradient: Any, parts: list[np.ndarray], roundings: int) -> None:
        """Compares the gradient of the buffer with those of the parts; it is exactly 0 at all other elements."""
        layout, none = self.cache.layout, jaxkv.KVCache.zeros(self.cache.layout)
        right = _with_entries(none, self.layer, parts, self.used)
        ours = _with_entries(none, self.layer, [np.ones_like(part) for part in parts], self.used)
        found = jax.tree.leaves(gradient)
        for one, expected, own in zip(found, jax.tree.leaves(right), jax.tree.leaves(ours), strict=True):
            own = as_float64(own) == 1
            assert (as_float64(one)[~own] == 0).all(), "memory that no query sees has a gradient"
            assert_close(one, as_float64(expected), dtype=layout.dtype, roundings=roundings, what="the buffer")


def _with_entries(cache, layer, parts, used):
    slots = np.flatnonzero(used).astype(np.int32)
    rows = [on_device(np.asarray(part, cache.layout.dtype)[slots]) for part in parts]
    if cache.layout.entry.one_head:
        return jaxkv.write_mla(cache, *(row[:, 0] for row in rows), slots, layer=layer, implementation="xla")
    return jaxkv.write_kv(cache, *rows, slots, layer=layer, implementation="xla")


def slots_of(tables, length: int, block_size: int) -> list[int]:
    """The slots of the first tokens of a request with this table."""
    return [int(tables[p // block_size]) * block_size + p % block_size for p in range(length)]


def seen_slots(tables, lengths, counts, *, block_size: int, slots: int, tree_mask=None, **options) -> np.ndarray:
    """Which slots each of the last `counts` [B] query tokens of the requests sees, bool [T, slots].

    `tree_mask` and other options are those of `oracle.seen_by_last`.
    """
    found = []
    for b, (table, length, count) in enumerate(zip(tables, lengths, counts, strict=True)):
        shown = oracle.seen_by_last(length, count, tree=None if tree_mask is None else tree_mask[b], **options)
        rows = np.zeros((count, slots), bool)
        for position, slot in enumerate(slots_of(table, length, block_size)):
            if 0 <= slot < slots:
                rows[:, slot] |= shown[:, position]
        found.append(rows)
    return np.concatenate(found)


def dense(q, k, v, seen, *, logit_cap=None, sinks=None):
    """out [T, Hq, Dv] and lse [T, Hq] of q [T, Hq, D] to k [S, H, D] and v [S, H, Dv]; lse is 0 if no key is seen."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = jnp.einsum("thd,shd->ths", q, k) * SCALE
    s = s if logit_cap is None else logit_cap * jnp.tanh(s / logit_cap)
    weights = jnp.where(seen[:, None], jnp.exp(s), 0)
    total = weights.sum(axis=-1)
    lse = jnp.log(jnp.where(total == 0, 1, total))
    below = jnp.where(total == 0, 1, total) if sinks is None else total + jnp.exp(sinks)
    return jnp.einsum("ths,shv->thv", weights, v) / below[..., None], lse


def model_of(entry, seen, **options):
    """The dense model of a call, whose arguments are arrays of queries, sinks if there are, and parts of entries."""
    count = 2 if entry.one_head else 1

    def model(*arrays):
        qs, sinks, parts = arrays[:count], arrays[count:-2], arrays[-2:]
        q, (k, v) = jnp.concatenate(qs, axis=-1), parts
        if entry.one_head:
            k, v = jnp.concatenate(parts, axis=-1), parts[0]
        given = {"sinks": sinks[0]} if sinks else {}
        out, lse = dense(q.reshape(-1, *q.shape[-2:]), k, v, seen, **options, **given)
        return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])

    return model


def check(run, model, floats, paged: Paged, *, roundings: int) -> None:
    """Compares all gradients of `run(*floats, cache)` with those of `model(*floats, *parts)`.

    Both return (out, lse).  The gradients are those of a random linear function of both results.  `floats` are NumPy
    arrays.
    """
    cache = paged.cache

    def total(results):
        rng, sums = np.random.default_rng(7), 0
        for x in results:
            x = jnp.where(jnp.isfinite(x), x, 0)
            x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
            sums += (x * rng.standard_normal(x.shape).astype(np.float32)).sum()
        return sums

    def paged_total(floats, buffer):
        return total(run(*floats, jaxkv.KVCache(buffer, cache.layout)))

    given = [on_device(x) for x in floats], cache.buffer
    found, of_buffer = jax.jit(jax.grad(paged_total, (0, 1)))(*given)
    with jax.enable_x64(True):
        wide = [jnp.asarray(as_float64(x)) for x in floats], [jnp.asarray(x) for x in paged.parts]
        right, of_parts = jax.grad(lambda floats, parts: total(model(*floats, *parts)), (0, 1))(*wide)
        right, of_parts = jax.tree.map(np.asarray, (right, of_parts))
    for i, (one, expected) in enumerate(zip(found, right, strict=True)):
        assert_close(one, expected, roundings=roundings, what=f"argument {i}")
    paged.check(of_buffer, of_parts, roundings)
