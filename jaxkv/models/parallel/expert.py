"""Expert parallelism: devices divide the experts, and all else as under tensor or data parallelism."""

from dataclasses import dataclass
from typing import override

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxkv.models.config import ModelConfig
from jaxkv.models.parallel import exchange
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class ExpertParallel(TensorParallel):
    """Each of n devices has 1 / n of the experts of every layer, whole; all else is divided as by `TensorParallel`.

    Every device has all tokens of a step, as tensor parallelism requires.  It computes those that chose its experts,
    and the sum over devices that ends a layer's feed-forward combines the experts of each token.  Compared with
    `TensorParallel`, which divides every expert, the products of an expert keep their size, so that fewer tokens are
    enough to use a device well.  In return, devices have unequal work if some experts are chosen more often.

    `DataExpertParallel` also divides the requests, so that devices do not all have the whole cache.

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis over which the model is divided.

    Raises:
      ValueError: the mesh has no such axis.
    """

    @override
    def check(self, config):
        check_experts(config, self.num_devices, "TensorParallel")
        super().check(config)

    @override
    def spec(self, path, ndim):
        return PartitionSpec(self.axis) if of_experts(path) else super().spec(path, ndim)

    @override
    def routed(self, experts, tokens, chosen, shares, count):
        return experts(tokens, local_experts(chosen, count, self.axis), shares)


@dataclass(frozen=True)
class DataExpertParallel(DataParallel):
    """Each of n devices attends for requests of its own, with its own cache, and has 1 / n of the experts, whole.

    This is how DeepSeek deploys V3 (arXiv 2412.19437, section 3.4).  No cache is replicated, and all weights of
    attention, dense feed-forwards, shared experts, embedding and head are on every device.  In each layer with
    experts, tokens go to the devices of their experts and the results return (`exchange.py`): by an all-gather and a
    reduce-scatter, or by all-to-alls if these are expected to move fewer bytes.  The number of tokens, experts and
    devices decides while tracing.

    The rows of a batch of `prefill` or `decode` are divided, as by `DataParallel`.  Devices run in lockstep, and those
    without a request take part.

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis over which requests and experts are divided.

    Raises:
      ValueError: the mesh has no such axis.
    """

    exchanges_tokens = True

    @property
    @override
    def inside(self):
        return _Inside(self.mesh, self.axis)

    @override
    def check(self, config):
        check_experts(config, self.num_devices, "DataParallel")

    @override
    def spec(self, path, ndim):
        return PartitionSpec(self.axis) if of_experts(path) else PartitionSpec()

    @override
    def routed(self, experts, tokens, chosen, shares, count):
        def held(tokens, chosen, shares):
            return experts(tokens, local_experts(chosen, count, self.axis), shares)

        room = exchange.capacity(len(tokens), chosen.shape[1], self.num_devices)
        if room is None:
            return exchange.gathered(held, tokens, chosen, shares, axis=self.axis)
        each = count // self.num_devices
        return exchange.sent(held, tokens, chosen, shares, axis=self.axis, held=each, capacity=room)


@dataclass(frozen=True)
class _Inside(DataExpertParallel):
    """`DataExpertParallel` on one device, which has its part of all arrays already."""

    @override
    def run(self, function, model, cache, *batch):
        return function(model, cache, *batch)


def check_experts(config: ModelConfig, devices: int, otherwise: str) -> None:
    """ValueError unless the model has experts, as many on each device.

    The message names the way `otherwise` to divide a model without experts.
    """
    if config.experts is None:
        raise ValueError(f"`parallel` divides experts, and the model has none: expected {otherwise}")
    if config.experts.count % devices:
        raise ValueError(
            f"`parallel` divides the experts over {devices} devices, and the model has {config.experts.count}: "
            "expected a multiple of the number of devices"
        )


def of_experts(path) -> bool:
    """Whether a weight, given its path, is a stack of those of experts."""
    return any(getattr(key, "key", None) == "experts" for key in path)


def local_experts(experts, count: int, axis: str) -> jax.Array:
    """Converts ids of `count` experts, int32 [T, K], to those of this device's stack; -1 for those of other devices."""
    held = count // lax.axis_size(axis)
    local = experts - lax.axis_index(axis) * held
    return jnp.where((local >= 0) & (local < held), local, -1)
