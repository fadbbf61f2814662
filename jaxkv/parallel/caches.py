"""A cache for each device of a mesh axis."""

import math

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.cache import KVCache
from jaxkv.checks import check_one_buffer
from jaxkv.layout.layout import CacheLayout


def zeros(layout: CacheLayout, mesh: Mesh, axis: str | tuple[str, ...]) -> KVCache:
    """A cache of zeros for each device along a mesh axis; the caches are replicated along the other axes.

    Args:
      layout: the layout of one device's cache.  If it is for context parallelism, its `shards` says how the tokens of
        each request are divided.
      mesh: the devices, those of other processes included.
      axis: the mesh axis, or several.  With `()`, one cache is replicated on every device.  Tokens are divided over the
        last axes, whose devices are as many as `layout.shards` says; the others divide requests.

    Returns:
      A cache whose buffer is the concatenation of the devices' buffers, `layout.dtype` [n * layout.size], sharded over
      `axis`.  `shard_map` with the spec `P(axis)` passes each device its own cache.  Outside of `shard_map`, operations
      on the result raise ValueError.

    Raises:
      ValueError: the mesh has no such axis, or the last axes do not have as many devices as `layout.shards`.
    """
    check_one_buffer("layout", layout)
    names = check_axis(mesh, axis)
    sizes = [mesh.shape[name] for name in names]
    devices = math.prod(sizes)
    if layout.shards.num_shards not in [math.prod(sizes[first:]) for first in range(len(sizes) + 1)]:
        raise ValueError(
            f"`layout` is for {layout.shards}: expected as many shards as there are devices along the last axes, and "
            f"{dict(zip(names, sizes, strict=True))} are given"
        )
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
