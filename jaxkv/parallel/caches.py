"""A cache for each device of a mesh axis."""

import math

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout


def zeros(layout: CacheLayout, mesh: Mesh, axis: str | tuple[str, ...]) -> KVCache:
    """A cache of zeros for each device along a mesh axis; the caches are replicated along the other axes.

    Args:
      layout: the layout of one device's cache.
      mesh: the devices, those of other processes included.
      axis: the mesh axis, or several.  With `()`, one cache is replicated on every device.

    Returns:
      A cache whose buffer is the concatenation of the devices' buffers, `layout.dtype` [n * layout.size], sharded over
      `axis`.  `shard_map` with the spec `P(axis)` passes each device its own cache.  Outside of `shard_map`, operations
      on the result raise ValueError.

    Raises:
      ValueError: the mesh has no such axis.
    """
    names = check_axis(mesh, axis)
    devices = math.prod(mesh.shape[name] for name in names)
    sharding = NamedSharding(mesh, PartitionSpec(names))
    return KVCache(jnp.zeros((devices * layout.size,), layout.dtype, device=sharding), layout)


def check_axis(mesh: Mesh, axis: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names in `axis`; ValueError unless the mesh has them."""
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` is a {type(mesh).__name__}: expected a Mesh, from `jax.make_mesh`")
    if unknown := [name for name in names if name not in mesh.shape]:
        raise ValueError(f"`axis` is {unknown[0]!r}: expected one of the mesh's, {', '.join(mesh.shape)}")
    return names
