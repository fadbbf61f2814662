"""Blocks as rows: what of a layout matters to who moves them, and the programs that read and write them."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.arguments import check_cache
from jaxkv.blocks import read_blocks, write_blocks
from jaxkv.cache import KVCache
from jaxkv.layout import CacheLayout
from jaxkv.packing import PackedLayout
from jaxkv_kernels.entries import Entry


def _groups(layout: CacheLayout | PackedLayout) -> list[CacheLayout]:
    if isinstance(layout, PackedLayout):
        return list(layout.values())
    if isinstance(layout, CacheLayout):
        return [layout]
    raise ValueError(f"`layout` is {layout!r}: expected a CacheLayout or a PackedLayout")


def row_elements(layout: CacheLayout | PackedLayout) -> int:
    """Elements of a block that travels, with all its groups."""
    return _groups(layout)[0].pages.block_elements


def row_dtype(layout: CacheLayout | PackedLayout):
    """Dtype of the buffer."""
    return _groups(layout)[0].dtype


def check_travels(cache: KVCache, layout: CacheLayout | PackedLayout) -> None:
    """ValueError unless blocks of `cache` are blocks of `layout`; of a packed one, `cache` views any group."""
    check_cache(cache, Entry)
    if cache.layout.fingerprint not in (group.fingerprint for group in _groups(layout)):
        raise ValueError(
            f"`cache` has other blocks than the pool: convert them by `jaxkv.convert_blocks`, or make a pool for them\n"
            f"the cache has\n{cache.layout}\nthe pool takes\n{layout}"
        )


@partial(jax.jit, static_argnames="implementation")
def read_rows(cache: KVCache, blocks: jax.Array, *, implementation) -> list[jax.Array]:
    """Blocks [n] as n arrays [E]: each may live and die on its own."""
    return list(read_blocks(cache, blocks, implementation=implementation))


@partial(jax.jit, static_argnames="implementation", donate_argnames="cache")
def write_rows(cache: KVCache, blocks: jax.Array, rows: list[jax.Array], *, implementation) -> KVCache:
    """Arrays [E] over blocks [n] of the cache, in place."""
    return write_blocks(cache, blocks, jnp.stack(rows), implementation=implementation)
