"""Exported blocks as rows: their shape and dtype, and the programs that read and write them."""

import jax

from jaxkv.cache import KVCache
from jaxkv.checks import check_cache
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.ops.blocks import read_blocks, write_blocks
from jaxkv_kernels.formats.entries import Entry

Layout = CacheLayout | PackedLayout

read_rows = jax.jit(read_blocks, static_argnames="implementation")
"""`read_blocks`, compiled."""
write_rows = jax.jit(write_blocks, static_argnames="implementation", donate_argnames="cache")
"""`write_blocks`, compiled; the cache is donated."""


def row_of(layout: Layout) -> jax.ShapeDtypeStruct:
    """Shape [E] and dtype of an exported block, including all groups.

    ValueError if `layout` is not a layout, or divides the tokens of requests over devices.
    """
    if not isinstance(layout, CacheLayout | PackedLayout):
        raise ValueError(f"`layout` is {layout!r}: expected a CacheLayout or a PackedLayout")
    group = next(iter(layout.values())) if isinstance(layout, PackedLayout) else layout
    if group.shards.num_shards > 1:
        raise ValueError(
            f"`layout` is that of a share of the tokens, {group.shards}: expected one of all tokens, because the key "
            "of a block does not say which share it has"
        )
    return jax.ShapeDtypeStruct((group.pages.block_elements,), group.dtype)


def check_exchange(cache: KVCache, layout: Layout) -> None:
    """ValueError unless `cache` has blocks of `layout`.  If `layout` is packed, `cache` may be a view of any group."""
    check_cache(cache, Entry)
    if cache.layout.fingerprint != layout.fingerprint:
        raise ValueError(
            "`cache` has other blocks than the pool: make another pool, or convert them with `jaxkv.convert_blocks`\n"
            f"the cache has\n{cache.layout}\nthe pool stores\n{layout}"
        )
