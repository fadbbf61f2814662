"""A model on one device."""

from dataclasses import dataclass
from typing import Any, override

from jaxkv.cache import KVCache
from jaxkv.models.parallel.base import Parallel


@dataclass(frozen=True)
class OneDevice(Parallel):
    """The whole model, its cache and its batch are on one device.

    Args:
      device: the device; by default JAX's default device.
    """

    device: Any = None

    divides_layers = False

    @override
    def check(self, config):
        pass

    @override
    def sharding(self, path, ndim):
        return self.device

    @override
    def zeros(self, layout):
        return KVCache.zeros(layout, device=self.device)

    @override
    def run(self, function, model, cache, *batch):
        return function(model, cache, *batch)

    @override
    def per_device(self, function):
        return function
