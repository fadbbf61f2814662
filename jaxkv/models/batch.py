"""What every layer needs to know about the new tokens."""

from dataclasses import dataclass

import jax

from jaxkv.models import rope
from jaxkv.models.config import ModelConfig


@dataclass(frozen=True)
class Batch:
    """B requests of Q new tokens, aligned to the end."""

    cos: jax.Array
    """float32 [B, Q, qk_rope_head_dim / 2], as is `sin`."""
    sin: jax.Array
    seq_lens: jax.Array
    block_tables: jax.Array
    slots: jax.Array
    """int32 [B * Q]."""

    @classmethod
    def of(cls, config: ModelConfig, seq_lens, block_tables, slot_mapping) -> "Batch":
        """The batch of slot_mapping [B, Q]."""
        tokens = slot_mapping.shape[1]
        positions = seq_lens[:, None] - tokens + jax.numpy.arange(tokens)
        return cls(*rope.angles(config, positions), seq_lens, block_tables, slot_mapping.reshape(-1))
