"""Data parallelism: devices divide the requests."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, override

import jax

from jaxkv.models.parallel.on_mesh import OnMesh
from jaxkv.models.parallel.one_device import OneDevice

if TYPE_CHECKING:
    from jaxkv.models.model import Model


@dataclass(frozen=True)
class DataParallel(OnMesh):
    """Each device has all weights and a cache of its own requests.  Devices do not communicate.

    The rows of a batch of `prefill` or `decode` are divided; their number must be a multiple of the number of devices.
    Block tables and slots of a row refer to blocks of its device's cache.  `Replicas` is the engine for data
    parallelism.

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis over which the requests are divided.

    Raises:
      ValueError: the mesh has no such axis.
    """

    divides_rows = True
    divides_layers = False

    @property
    @override
    def divisions_of_rows(self):
        return self.num_devices

    @override
    def run(self, function, model, cache, *batch):
        for array in jax.tree.leaves(batch):
            if (rows := array.shape[0]) % self.num_devices:
                raise ValueError(f"`tokens` has {rows} rows: expected a multiple of the {self.num_devices} devices")
        return super().run(function, model, cache, *batch)

    def replicas(self, model: "Model") -> "Iterator[Model]":
        """Yields, for each device of this process, a model on that device alone.  No weight is copied."""
        arrays, structure = jax.tree.flatten(model.params)
        for shards in zip(*(array.addressable_shards for array in arrays), strict=True):
            params = jax.tree.unflatten(structure, [shard.data for shard in shards])
            yield replace(model, params=params, parallel=OneDevice(shards[0].device))
