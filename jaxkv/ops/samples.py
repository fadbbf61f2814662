"""Arguments for sample calls: small caches of each entry format, with `jax.ShapeDtypeStruct`s instead of arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv_kernels.formats.entries import Entry

BATCH, HEADS, TABLE, TOKENS = 2, 16, 4, 8


def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    """A `jax.ShapeDtypeStruct` in place of an array."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def sample_cache(entry: Entry) -> KVCache:
    """A small cache of `entry`, in the default order."""
    heads = 1 if entry.one_head else 4
    layout = CacheLayout(num_layers=4, num_blocks=16, block_size=64, num_heads=heads, entry=entry)
    return KVCache(array(layout.dtype, layout.size), layout)  # type: ignore[arg-type]


def sample_dtype(entry: Entry):
    """The dtype of queries, new values and results: the dtype of `entry` if models compute in it."""
    return entry.dtype if entry.format in ("bf16", "f16", "f32") else jnp.dtype("bfloat16")


def sample_new(cache: KVCache) -> list[jax.ShapeDtypeStruct]:
    """The arguments of a write with new values: one per part of an entry, for `TOKENS` tokens."""
    entry = cache.layout.entry
    heads = () if entry.one_head else (cache.layout.num_heads,)
    return [array(sample_dtype(entry), TOKENS, *heads, size) for size in entry.sizes]


def sample_queries(cache: KVCache, *sizes: int) -> list[jax.ShapeDtypeStruct]:
    """Queries of one token per request: one array for each of `sizes`, which is the length of its last axis."""
    return [array(sample_dtype(cache.layout.entry), BATCH, 1, HEADS, size) for size in sizes]


def sample_options(cache: KVCache, *scales: str) -> dict[str, Any]:
    """The keyword arguments `layer` and, if the format stores values divided by a scale, the named `scales`."""
    return {"layer": 0, **(dict.fromkeys(scales, 1.0) if cache.layout.entry.codec.scaled else {})}


PAGED = array("int32", BATCH, TABLE), array("int32", BATCH)
"""Block tables and the lengths of requests."""
RAGGED = array("int32", BATCH, TABLE), array("int32", BATCH + 1)
"""Block tables and the running sum of the lengths of runs."""
