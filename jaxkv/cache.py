"""A cache: one flat buffer and its layout."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import export

from jaxkv.dlpack import to_array
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
        _check_layout(layout)
        keys = jnp.zeros((layout.size,), layout.dtype, device=device)
        if layout.value_size is None:
            return KVCache(keys, layout)
        return KVCache((keys, jnp.zeros((layout.value_size,), layout.dtype, device=device)), layout)

    @staticmethod
    def from_dlpack(tensor: Any, layout: CacheLayout[Kind], *, copy: bool = False) -> "KVCache[Kind]":
        """A cache in the memory of a tensor of another library, such as NumPy or PyTorch.

        The cache shares the tensor's memory, and keeps it alive.  It is for reading: JAX does not own the memory, so a
        step that updates the cache works on a copy, even if the cache is donated.  Results are undefined if others
        write to the memory while programs that read the cache run.  Call it outside of `jit`.

        Args:
          tensor: any object with `__dlpack__` and `__dlpack_device__`, contiguous, of the layout's dtype and of any
            shape.  Elements beyond the first `layout.size` are not part of the cache.  If the layout has keys and
            values in an array each, a pair of tensors.
          layout: where entries lie in that memory (`CacheLayout.from_strides`).
          copy: whether to copy the memory.  By default it is shared, or an error is raised.

        Returns:
          The cache, on the device that has the tensor's memory.

        Raises:
          ValueError: `tensor` has another dtype, too few elements, or strides that are not contiguous; it is on a
            device that JAX does not have; or JAX cannot share its memory: on CPUs it must begin at a multiple of 64
            bytes, elsewhere of 128, and a JAX array must have the shape [layout.size].  The message has the numbers.
        """
        _check_layout(layout)
        if not isinstance(copy, bool):
            raise ValueError(f"`copy` is {copy!r}: expected True or False")
        if layout.value_size is None:
            return KVCache(to_array("tensor", tensor, layout.size, layout.dtype, copy=copy), layout)
        if not isinstance(tensor, list | tuple) or len(tensor) != 2:
            found = f"{len(tensor)} tensors" if isinstance(tensor, list | tuple) else f"a {type(tensor).__name__}"
            raise ValueError(f"`tensor` is {found}: expected the pair (keys, values) of the layout")
        sizes = layout.size, layout.value_size
        keys, values = (
            to_array(f"tensor[{i}]", part, size, layout.dtype, copy=copy)
            for i, (part, size) in enumerate(zip(tensor, sizes, strict=True))
        )
        return KVCache((keys, values), layout)

    def __repr__(self):
        return f"KVCache({self.layout!r})"  # without the buffer's values

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, or of both arrays if keys and values have one each."""
        return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(self.buffer))

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


export.register_pytree_node_serialization(
    KVCache,
    serialized_name="jaxkv.KVCache",
    serialize_auxdata=lambda static: static[0].to_json().encode(),
    deserialize_auxdata=lambda data: (CacheLayout.from_json(data.decode()),),
)


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, CacheLayout):
        raise ValueError(
            f"`layout` is a {type(layout).__name__}: expected a CacheLayout, such as packed[name] of a PackedLayout"
        )
