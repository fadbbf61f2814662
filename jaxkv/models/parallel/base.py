"""What the programs of a model ask of `model.parallel`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv.models.config import ModelConfig
from jaxkv.ops.attention import decode_kv, decode_mla
from jaxkv.ops.indexer import indexer_logits, select_topk
from jaxkv.ops.plan import DecodePlan, plan_decode
from jaxkv.ops.sparse import decode_mla_sparse


class Parallel(ABC):
    """Where a model's arrays lie, and what one device does of a step; the defaults are for a device with all of it."""

    @abstractmethod
    def check(self, config: ModelConfig) -> None:
        """ValueError where a model of that configuration cannot be divided so."""

    @abstractmethod
    def sharding(self, path, ndim: int) -> Sharding | jax.Device | None:
        """Where a weight lies, by its path in the tree of weights; `ndim` axes, that of layers included or not."""

    def share(self, heads: int) -> int:
        """How many of so many heads one device has."""
        return heads

    def device_block_size(self, block_size: int) -> int:
        """How many tokens of a block of that many one device holds."""
        return block_size

    @abstractmethod
    def zeros(self, layout: CacheLayout) -> KVCache:
        """The empty cache, by the layout of one device's part."""

    @abstractmethod
    def run(self, function: Callable[..., Any], model, cache: KVCache, *batch) -> tuple[KVCache, jax.Array]:
        """`function(model, cache, *batch)`, a cache and rows, on each device with its part of everything."""

    @abstractmethod
    def per_device(self, function: Callable[..., KVCache]) -> Callable[..., KVCache]:
        """`function(cache, *ids)`, a cache, on each device's cache, with the same ids."""

    # The rest is queried by functions inside `run`, on one device.

    def total(self, x) -> jax.Array:
        """The sum over the devices of x, what one found with its part of the weights."""
        return x

    def slots(self, slots, layout: CacheLayout) -> jax.Array:
        """Slots int32 [T] of the blocks, as slots of the device's part of them, of that layout; -1 for another's."""
        return slots

    def plan_decode(self, *args, **options) -> DecodePlan:
        """`jaxkv.plan_decode` for the device's part."""
        return plan_decode(*args, **options)

    def decode_mla(self, *args, **options) -> jax.Array:
        """`jaxkv.decode_mla` of the device's heads to all cached tokens."""
        return decode_mla(*args, **options)

    def decode_kv(self, *args, **options) -> jax.Array:
        """`jaxkv.decode_kv` of the device's heads, over all cached tokens."""
        return decode_kv(*args, **options)

    def indexer_logits(self, *args, **options) -> jax.Array:
        """`jaxkv.indexer_logits` of the device's part of the cached tokens."""
        return indexer_logits(*args, **options)

    def select_topk(self, logits, k: int, **options) -> jax.Array:
        """`jaxkv.select_topk` of those that are of the device's part."""
        return select_topk(logits, min(k, logits.shape[-1]), **options)

    def decode_mla_sparse(self, *args, **options) -> jax.Array:
        """`jaxkv.decode_mla_sparse` of the device's heads to the slots of all devices."""
        return decode_mla_sparse(*args, **options)
