"""Data parallelism: devices divide the requests."""

from dataclasses import dataclass
from typing import override

import jax

from jaxkv.models.parallel.base import OnMesh


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
