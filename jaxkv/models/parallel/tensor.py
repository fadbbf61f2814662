"""Tensor parallelism: the heads of attention and the inner dimension of feed-forwards are divided over devices."""

from dataclasses import dataclass
from typing import override

from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey

from jaxkv.models.config import GQA
from jaxkv.models.parallel.base import OnMesh

DIVIDED = {
    **{"q": -2, "k": -2, "v": -2, "kv_b": -2, "w_uk": -3, "w_uv": -3, "o": -1, "gate": -2, "up": -2, "down": -1},
    **{"k_scale": -1, "v_scale": -1},  # of cached entries, one per KV head
}
"""The divided weights and the axis that is divided.  Every expert is divided, so that all devices have equal work."""


@dataclass(frozen=True)
class TensorParallel(OnMesh):
    """Each device has a share of the weights of every layer and, for GQA, of the heads of the cache.

    MLA: all query heads share the latents, so each device holds and reads the whole cache.  The weights are divided,
    and so is the arithmetic of attention, which dominates if there are many heads.  GQA: each device has a cache of its
    share of the KV heads.

    Each layer has two all-reduces: after the attention and after the feed-forward.  Embedding, head, norms, routers and
    V3.2's indexer are replicated.

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis over which the model is divided.

    Raises:
      ValueError: the mesh has no such axis.
    """

    @override
    def check(self, config):
        if isinstance(config.attention, GQA) and config.attention.biases:
            raise ValueError(
                "`parallel` divides the heads, and the model has biases, which are not divided: expected OneDevice, "
                "ContextParallel, DataParallel or DataExpertParallel"
            )
        sizes = {"num_heads": config.num_heads}
        if isinstance(config.attention, GQA):
            sizes["num_kv_heads"] = config.attention.num_kv_heads
        if config.has_dense:
            sizes["intermediate_size"] = config.intermediate_size
        if config.experts is not None:
            sizes["the experts' intermediate_size"] = config.experts.intermediate_size
            sizes["the shared experts' intermediate_size"] = config.experts.shared_intermediate_size
        for name, size in sizes.items():
            if size % self.num_devices:
                raise ValueError(
                    f"`parallel` divides the model over {self.num_devices} devices, and {name} is {size}: "
                    f"expected a multiple of the number of devices"
                )

    @override
    def share(self, heads):
        return heads // self.num_devices

    @override
    def divides_cache(self, layout):
        return not layout.entry.one_head

    @override
    def spec(self, path, ndim):
        # The values and the scales of a weight in float8 are attributes of it, and divided in the same way.
        names = [key.key for key in path if isinstance(key, DictKey)]
        if names[-1] not in DIVIDED or "indexer" in names:
            return PartitionSpec()
        axis = ndim + DIVIDED[names[-1]]
        return PartitionSpec(*(self.axis if i == axis else None for i in range(ndim)))

    @override
    def total(self, x):
        return lax.psum(x, self.axis)
