"""Expert parallelism: devices divide the experts, and all else as under tensor parallelism."""

from dataclasses import dataclass
from typing import override

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxkv.models.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class ExpertParallel(TensorParallel):
    """Each of n devices has 1 / n of the experts of every layer, whole; all else is divided as by `TensorParallel`.

    Every device has all tokens of a step, as tensor parallelism requires.  It computes those that chose its experts,
    and the sum over devices that ends a layer's feed-forward combines the experts of each token.  Compared with
    `TensorParallel`, which divides every expert, the products of an expert keep their size, so that fewer tokens are
    enough to use a device well.  In return, devices have unequal work if some experts are chosen more often.

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis over which the model is divided.

    Raises:
      ValueError: the mesh has no such axis.
    """

    @override
    def check(self, config):
        if config.experts is None:
            raise ValueError("`parallel` divides experts, and the model has none: expected TensorParallel")
        if config.experts.count % self.num_devices:
            raise ValueError(
                f"`parallel` divides the experts over {self.num_devices} devices, and the model has "
                f"{config.experts.count}: expected a multiple of the number of devices"
            )
        super().check(config)

    @override
    def spec(self, path, ndim):
        of_experts = any(getattr(key, "key", None) == "experts" for key in path)
        return PartitionSpec(self.axis) if of_experts else super().spec(path, ndim)

    @override
    def local_experts(self, experts, count):
        held = count // self.num_devices
        local = experts - lax.axis_index(self.axis) * held
        return jnp.where((local >= 0) & (local < held), local, -1)
