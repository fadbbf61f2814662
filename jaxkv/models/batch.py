"""What every layer needs to know about the new tokens."""

from dataclasses import dataclass, field

import jax

from jaxkv.cache import KVCache
from jaxkv.models.config import MLA
from jaxkv.models.layers import rope
from jaxkv.models.model import Model
from jaxkv.ops.plan import DecodePlan
from jaxkv.ops.prefill import prefers_expansion


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
    """The plan of `decode_mla` or `decode_kv`, the same for all layers; None if a layer calls neither."""

    expanded: bool = field(metadata={"static": True})
    """Whether layers call `prefill_mla`, because the new tokens are so many that it is faster."""

    query_scales: jax.Array | None = None
    """float32 [B, Q], the factors of the queries of MLA; None if the model has none."""

    selected: jax.Array | None = None
    """int32 [B, Q, K], the slots that the last layer with an indexer has selected, for layers that share them; None
    before that layer, and if all layers have an indexer, or none.
    """

    @classmethod
    def of(cls, model: Model, cache: KVCache, seq_lens, block_tables, slot_mapping) -> "Batch":
        """Makes the batch from the arguments of `prefill`; `slot_mapping` is [B, Q]."""
        config, q_len = model.config, slot_mapping.shape[1]
        positions = seq_lens[:, None] - q_len + jax.numpy.arange(q_len)[None]
        expanded = not model.parallel.divides_tokens and _prefers_expansion(model, q_len)
        plan = None
        if config.indexer is None and not expanded:
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
        scale = config.attention.query_scale if isinstance(config.attention, MLA) else None
        scales = None if scale is None else rope.query_scales(scale, positions)
        return cls(*rope.angles(config, positions), seq_lens, block_tables, slots, plan, expanded, scales)


def _prefers_expansion(model: Model, q_len: int) -> bool:
    """Whether the model has dense latent attention, and calls `prefill_mla` for `q_len` new tokens per request."""
    attention = model.config.attention
    if not isinstance(attention, MLA) or attention.indexer is not None:
        return False
    return prefers_expansion(
        q_len,
        model.dtype,
        latent=attention.kv_lora_rank,
        rope=attention.qk_rope_head_dim,
        nope=attention.qk_nope_head_dim,
        value=attention.v_head_dim,
        implementation=model.implementation,
    )
