"""What a step of the engine takes: a table of requests in static shapes."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.models.sampling import sample


class Batch(NamedTuple):
    """Rows of requests; the arrays are NumPy's on the host, JAX's inside a program."""

    tokens: Any
    """int32 [B, Q], new tokens, aligned to the end."""
    seq_lens: Any
    """int32 [B], the new tokens included; 0 for a row without a request."""
    block_tables: Any
    """int32 [B, M]."""
    slot_mapping: Any
    """int32 [B, Q]; -1 for padding."""
    temperature: Any
    """float32 [B]."""
    top_p: Any
    """float32 [B]."""
    seeds: Any
    """uint32 [B]."""

    @classmethod
    def empty(cls, rows: int, columns: int, table_blocks: int) -> "Batch":
        """Rows without requests, to be filled in place."""
        return cls(
            tokens=np.zeros((rows, columns), np.int32),
            seq_lens=np.zeros(rows, np.int32),
            block_tables=np.full((rows, table_blocks), -1, np.int32),
            slot_mapping=np.full((rows, columns), -1, np.int32),
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            seeds=np.zeros(rows, np.uint32),
        )

    def draw(self, logits) -> jax.Array:
        """The next token of each row, int32 [B], from its logits [B, V]; -1 where they are NaN."""
        # The next token's position is the length so far: its random numbers do not depend on the step or the row.
        return sample(logits, self.temperature, self.top_p, self.seeds, self.seq_lens)
