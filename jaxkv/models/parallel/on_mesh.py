"""What all ways to divide a model over a mesh have in common."""

from dataclasses import dataclass
from typing import override

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.layout.layout import CacheLayout
from jaxkv.models.parallel.base import Parallel
from jaxkv.parallel.caches import check_axis, zeros


@dataclass(frozen=True)
class OnMesh(Parallel):
    """Something is divided along a mesh axis; along the others all is replicated.

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis.

    Raises:
      ValueError: the mesh has no such axis.
    """

    mesh: Mesh
    axis: str

    divides_rows = False
    """Each device has requests of its own."""

    def __post_init__(self):
        check_axis(self.mesh, self.axis)
        # Outside of the steps, XLA shards as it sees fit: of embeddings and logits nothing is said here.
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))

    @property
    def num_devices(self) -> int:
        """Along the axis."""
        return self.mesh.shape[self.axis]

    @override
    def check(self, config):
        pass

    def spec(self, path, ndim: int) -> PartitionSpec:
        """How a weight is divided; as in `sharding`."""
        return PartitionSpec()

    def divides_cache(self, layout: CacheLayout) -> bool:
        """Whether each device has a cache of its own, with that layout.  If not, the cache is replicated."""
        return True

    @override
    def sharding(self, path, ndim):
        return NamedSharding(self.mesh, self.spec(path, ndim))

    @override
    def zeros(self, layout):
        return zeros(layout, self.mesh, self.axis if self.divides_cache(layout) else ())

    @override
    def run(self, function, model, cache, *batch):
        weights = jax.tree.map_with_path(lambda path, x: self.spec(path, x.ndim), model)
        held, rows = self._spec(self.divides_cache(cache.layout)), self._spec(self.divides_rows)
        specs = weights, held, *[rows] * len(batch)
        return self._on_each(function, specs, (held, rows))(model, cache, *batch)

    @override
    def per_device(self, function):
        def on_each(cache, *ids):
            held = self._spec(self.divides_cache(cache.layout))
            return self._on_each(function, (held, *[PartitionSpec()] * len(ids)), held)(cache, *ids)

        return on_each

    def _spec(self, divided: bool) -> PartitionSpec:
        return PartitionSpec(self.axis) if divided else PartitionSpec()

    def _on_each(self, function, in_specs, out_specs):
        # JAX cannot follow in Pallas's GPU kernels what varies over the mesh.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
