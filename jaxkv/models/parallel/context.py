"""Context parallelism: devices divide the tokens of every request."""

from dataclasses import dataclass
from typing import override

import jax.numpy as jnp
from jax import lax

from jaxkv.checks import positive_int
from jaxkv.layout.layout import TokenShards
from jaxkv.models.parallel.base import OnMesh
from jaxkv.parallel import context


@dataclass(frozen=True)
class ContextParallel(OnMesh):
    """Each of n devices has 1 / n of the tokens of every block, all heads and all weights.  The cache holds n times as
    many tokens as one device could.

    Token i is on device `i // interleave % n`.  The devices' partial attentions are merged with one gather per layer,
    or two with V3.2's indexer.  Every device computes everything else in full.  In a prefill, groups of new tokens
    attend together to the whole blocks before them, and each new token by itself to the rest (`context.decode_mla`).

    Args:
      mesh: the devices, those of other processes included.
      axis: the mesh axis over which the tokens are divided.
      interleave: number of consecutive tokens on one device.  The block size must be a multiple of n * interleave.

    Raises:
      ValueError: the mesh has no such axis, or `interleave` is not a positive int.
    """

    interleave: int = 1

    # The new tokens that a device has are neither consecutive nor as many for each request, and its earlier tokens are
    # not those before all new ones.  The masks of `prefill_mla` do not describe this.
    divides_tokens = True

    def __post_init__(self):
        super().__post_init__()
        positive_int("interleave", self.interleave)

    @property
    @override
    def block_unit(self):
        return self.num_devices * self.interleave

    @override
    def device_block_size(self, block_size):
        if positive_int("block_size", block_size) % self.block_unit:
            raise ValueError(
                f"`block_size` is {block_size}: expected a multiple of {self.num_devices} devices x interleave "
                f"{self.interleave}, so that every block is divided evenly"
            )
        return block_size // self.num_devices

    @override
    def slots(self, slots, layout):
        # Slots are positions in one long request whose blocks are all blocks of the cache.  A device's share of the
        # request is then packed in its own blocks, and its share of block b is block b there.
        blocks = jnp.arange(layout.num_blocks, dtype=jnp.int32)
        return context.local_slots(blocks[None], slots[None], layout=layout, shard=lax.axis_index(self.axis))[0]

    @property
    @override
    def shards(self):
        return TokenShards(self.num_devices, self.interleave)

    @override
    def plan_decode(self, *args, **options):
        return context.plan_decode(*args, axis=self.axis, **options)

    @override
    def decode_mla(self, *args, **options):
        return context.decode_mla(*args, axis=self.axis, **options)

    @override
    def decode_kv(self, *args, **options):
        return context.decode_kv(*args, axis=self.axis, **options)

    @override
    def select_slots(self, *args, **options):
        return context.select_slots(*args, axis=self.axis, **options)

    @override
    def decode_mla_sparse(self, *args, **options):
        return context.decode_mla_sparse(*args, axis=self.axis, **options)
