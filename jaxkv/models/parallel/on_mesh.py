"""The base of all ways to divide a model over a mesh."""

from dataclasses import dataclass
from typing import override

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.layout.layout import CacheLayout
from jaxkv.models.parallel.base import Parallel
from jaxkv.parallel.caches import check_axis, zeros


@dataclass(frozen=True)
class OnMesh(Parallel):
    """The model, its cache or its batch is divided along one mesh axis, and replicated along the others.

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis.

    Raises:
      ValueError: the mesh has no such axis.
    """

    mesh: Mesh
    axis: str

    divides_rows = False
    """Whether the rows of a batch are divided, so that each device has its own requests."""

    def __post_init__(self):
        check_axis(self.mesh, self.axis)
        # With automatic axes, so that XLA chooses the sharding outside of the steps (embeddings and logits).
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))

    @property
    def num_devices(self) -> int:
        """The number of devices along the axis."""
        return self.mesh.shape[self.axis]

    @override
    def check(self, config):
        pass

    def spec(self, path, ndim: int) -> PartitionSpec:
        """How a weight is divided; the arguments are those of `sharding`."""
        return PartitionSpec()

    def divides_cache(self, layout: CacheLayout) -> bool:
        """Whether each device has its own cache of that layout.  Otherwise, one cache is replicated."""
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
        # JAX cannot track which values vary over the mesh inside Pallas GPU kernels.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
