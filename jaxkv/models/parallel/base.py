"""The interface of `model.parallel`, how a model is divided over devices; one device, and the base of all meshes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, override

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxkv.cache import KVCache
from jaxkv.layout.layout import UNDIVIDED, CacheLayout, TokenShards
from jaxkv.models.config import ModelConfig
from jaxkv.ops.attention import decode_kv, decode_mla
from jaxkv.ops.indexer import select_slots
from jaxkv.ops.plan import DecodePlan, plan_decode
from jaxkv.ops.prefill import prefill_mla
from jaxkv.ops.sparse import decode_mla_sparse
from jaxkv.parallel.caches import check_axis, zeros


class Parallel(ABC):
    """Where a model's arrays lie, and which part of a step each device computes.

    The default methods are for a device that holds the whole model.
    """

    divides_tokens = False
    """Whether a device's cache has only some tokens of each request.  `prefill_mla` is not called then."""
    divides_layers = True
    """Whether devices divide the heads of a layer, or the tokens of a request.  States of requests are not divided."""
    exchanges_tokens = False
    """Whether a device computes its experts for tokens of other devices, too."""

    @property
    def divisions_of_rows(self) -> int:
        """In how many equal parts the rows of a batch are divided.  Each part has requests and a cache of its own."""
        return 1

    @property
    def inside(self) -> "Parallel":
        """This division for code inside `run` that calls steps of the model, on one device's arrays."""
        return self

    @abstractmethod
    def check(self, config: ModelConfig) -> None:
        """ValueError if a model of that configuration cannot be divided in this way."""

    @abstractmethod
    def sharding(self, path, ndim: int) -> Sharding | jax.Device | None:
        """Where a weight lies, given its path in the tree of weights and its number of axes, `ndim`.

        A weight in float8 has values and scales, of the same number of axes; both are divided alike.
        """

    def share(self, heads: int) -> int:
        """How many of the model's `heads` one device has."""
        return heads

    def cache_devices(self, layout: CacheLayout) -> int:
        """Over how many devices a cache is divided, of which each has a part with this layout."""
        return 1

    def cache_parts(self, layout: CacheLayout) -> tuple[int, ...]:
        """Which of these parts devices of this process have."""
        return (0,)

    @property
    def block_unit(self) -> int:
        """The size of blocks must be a multiple of this number of tokens."""
        return 1

    def device_block_size(self, block_size: int) -> int:
        """How many tokens of a block of `block_size` tokens one device holds."""
        return block_size

    @property
    def shards(self) -> TokenShards:
        """How the tokens of requests are divided over devices."""
        return UNDIVIDED

    @abstractmethod
    def zeros(self, layout: CacheLayout) -> KVCache:
        """A cache of zeros; `layout` is that of one device's part."""

    @abstractmethod
    def run(self, function: Callable[..., Any], model, cache: KVCache, *batch) -> tuple[KVCache, Any]:
        """Runs `function(model, cache, *batch)` on each device with its part of the arguments.

        The function and this method return a cache, and an array or a tuple of arrays with one row per request.
        """

    @abstractmethod
    def per_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A version of `function(cache, *ids)` that runs on every device's cache, with the same ids.

        It returns caches, or arrays with a first axis, along which those of different caches are joined.
        """

    # The methods below are called inside `run`, on one device.

    def total(self, x) -> jax.Array:
        """The sum over all devices of `x`, the partial result of this device's part of the weights."""
        return x

    def routed(self, experts: Callable[..., jax.Array], tokens, chosen, shares, count: int) -> jax.Array:
        """The weighted sums of the chosen experts [T, D], or this device's terms of sums over devices.

        Args:
          experts: `experts(tokens, chosen, shares)` computes the sums over the experts that this device holds.  Ids
            count from its first expert, and others are skipped.
          tokens: [T, D], the tokens of this device.
          chosen: int32 [T, K], ids of the layer's experts.
          shares: float32 [T, K], the weights of the chosen experts.
          count: number of the layer's experts.
        """
        return experts(tokens, chosen, shares)

    def slots(self, slots, layout: CacheLayout) -> jax.Array:
        """Converts slots int32 [T] of the whole cache to slots of this device's part; -1 for slots of other devices.

        `layout` is that of the part.
        """
        return slots

    def plan_decode(self, *args, **options) -> DecodePlan | tuple[DecodePlan, ...]:
        """`jaxkv.plan_decode` for this device's heads and tokens; several as in `context.plan_decode`."""
        return plan_decode(*args, **options)

    def decode_mla(self, *args, **options) -> jax.Array:
        """`jaxkv.decode_mla` of this device's heads over all cached tokens."""
        return decode_mla(*args, **options)

    def prefill_mla(self, *args, **options) -> jax.Array:
        """`jaxkv.prefill_mla` of this device's heads over all cached tokens."""
        return prefill_mla(*args, **options)

    def decode_kv(self, *args, **options) -> jax.Array:
        """`jaxkv.decode_kv` of this device's heads over all cached tokens."""
        return decode_kv(*args, **options)

    def select_slots(self, q, weights, cache: KVCache, block_tables, seq_lens, k: int, **options) -> jax.Array:
        """`jaxkv.select_slots` for the k best tokens of all devices.

        Returns those of the slots that are on this device, in min(k, max_len) columns.
        """
        return select_slots(q, weights, cache, block_tables, seq_lens, min(k, options["max_len"]), **options)

    def decode_mla_sparse(self, *args, **options) -> jax.Array:
        """`jaxkv.decode_mla_sparse` of this device's heads over the slots of all devices."""
        return decode_mla_sparse(*args, **options)


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
    def cache_devices(self, layout):
        return self.num_devices if self.divides_cache(layout) else 1

    @override
    def cache_parts(self, layout):
        sharding = NamedSharding(self.mesh, self._spec(self.divides_cache(layout)))
        places = sharding.addressable_devices_indices_map((self.cache_devices(layout),)).values()
        return tuple(sorted({place[0].start or 0 for place in places if place is not None}))

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
