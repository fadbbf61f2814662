"""What every layer needs to know about the new tokens."""

from dataclasses import dataclass

import jax

from jaxkv.cache import KVCache
from jaxkv.models.layers import rope
from jaxkv.models.model import Model
from jaxkv.ops.plan import DecodePlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """B requests with Q new tokens each, aligned to the end."""

    cos: jax.Array
    """float32 [B, Q, rotary_dim / 2], the same shape as `sin`: the rotary embedding of the tokens."""
    sin: jax.Array
    seq_lens: jax.Array
    block_tables: jax.Array
    slots: jax.Array
    """int32 [B * Q], the slots of the new tokens in this device's cache."""

    plan: DecodePlan | None
    """The plan of dense attention, the same for all layers; None with an indexer."""

    @classmethod
    def of(cls, model: Model, cache: KVCache, seq_lens, block_tables, slot_mapping) -> "Batch":
        """Makes the batch from the arguments of `prefill`; `slot_mapping` is [B, Q]."""
        config, q_len = model.config, slot_mapping.shape[1]
        positions = seq_lens[:, None] - q_len + jax.numpy.arange(q_len)[None]
        plan = None
        if config.indexer is None:
            plan = model.parallel.plan_decode(
                cache,
                block_tables,
                seq_lens,
                num_heads=model.num_heads,
                q_len=q_len,
                dtype=model.dtype,
                implementation=model.implementation,
            )
        slots = model.parallel.slots(slot_mapping.reshape(-1), cache.layout)
        return cls(*rope.angles(config, positions), seq_lens, block_tables, slots, plan)
