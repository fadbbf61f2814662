"""Data-parallel attention with expert parallelism: devices divide the requests and the experts."""

from dataclasses import dataclass
from typing import override

from jax.sharding import PartitionSpec

from jaxkv.models.parallel import exchange
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.parallel.expert import check_experts, local_experts, of_experts


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
