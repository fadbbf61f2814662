"""A cache: one flat buffer and its layout."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.layout.layout import CacheLayout
from jaxkv_kernels.addressing import Buffer
from jaxkv_kernels.formats.entries import Entry

# Not a type parameter of the functions: pdoc resolves the names in quoted annotations in this module.
Kind = TypeVar("Kind", bound=Entry)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class KVCache[E: Entry]:
    """A pytree of one flat array and its static layout; it can be passed through `jit`, `scan` and `shard_map`.

    Operations return a new cache.  If the cache is donated to the outermost `jit`, the buffer is updated in place: both
    arrays, if keys and values have one each.
    """

    buffer: Buffer
    """`layout.dtype` [layout.size].  If values have an array of their own (`layout.value_size`), this is the pair
    (keys, values), `layout.dtype` [layout.size] and [layout.value_size]."""
    layout: CacheLayout[E] = field(metadata={"static": True})

    @staticmethod
    def zeros(layout: CacheLayout[Kind], *, device: Any = None) -> "KVCache[Kind]":
        """A cache of zeros, on `device` (or with that sharding).

        All groups of a `PackedLayout` have one buffer: a cache of any of them can be viewed as one of the others.
        ValueError unless `layout` is a CacheLayout.
        """
        if not isinstance(layout, CacheLayout):
            raise ValueError(
                f"`layout` is a {type(layout).__name__}: expected a CacheLayout, such as packed[name] of a PackedLayout"
            )
        keys = jnp.zeros((layout.size,), layout.dtype, device=device)
        if layout.value_size is None:
            return KVCache(keys, layout)
        return KVCache((keys, jnp.zeros((layout.value_size,), layout.dtype, device=device)), layout)

    def __repr__(self):
        return f"KVCache({self.layout!r})"  # without the buffer's values

    def view(self, layout: CacheLayout[Kind]) -> "KVCache[Kind]":
        """The same buffer with another layout, such as that of another group of a `PackedLayout`.

        ValueError unless the two layouts have buffers of the same size and dtype, and divide tokens over devices in the
        same way.
        """
        if not isinstance(layout, CacheLayout):
            raise ValueError(f"`layout` is {layout!r}: expected a CacheLayout")
        sizes, own = ((each.size, each.value_size) for each in (layout, self.layout))
        if (sizes, layout.dtype) != (own, self.layout.dtype):
            elements, here = (" and ".join(map(str, filter(None, each))) for each in (sizes, own))
            raise ValueError(
                f"`layout` describes a buffer of {elements} elements of {layout.dtype}; this cache has {here} of "
                f"{self.layout.dtype}"
            )
        if layout.shards != self.layout.shards:
            raise ValueError(f"`layout` has tokens of {layout.shards}; this cache has those of {self.layout.shards}")
        return KVCache(self.buffer, layout)
