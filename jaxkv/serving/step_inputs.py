"""`Rows`: the inputs of a step, as arrays of static shape."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.models.sampling import sample
from jaxkv.serving.request import Request


class Rows(NamedTuple):
    """One row per request; NumPy arrays on the host, JAX arrays inside a program."""

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
    def of(cls, requests: Sequence[Request], count: int, columns: int, *, table_blocks: int, block_size: int) -> "Rows":
        """The next tokens of each request, at most `columns`, in `count` rows.  Rows without a request are empty."""
        rows = cls(
            tokens=np.zeros((count, columns), np.int32),
            seq_lens=np.zeros(count, np.int32),
            block_tables=np.full((count, table_blocks), -1, np.int32),
            slot_mapping=np.full((count, columns), -1, np.int32),
            temperature=np.zeros(count, np.float32),
            top_p=np.ones(count, np.float32),
            seeds=np.zeros(count, np.uint32),
        )
        for row, request in enumerate(requests):
            new = min(columns, request.missing)
            end = request.cached + new
            positions, blocks = np.arange(request.cached, end), np.asarray(request.blocks, np.int32)
            rows.tokens[row, columns - new :] = request.tokens[request.cached : end]
            rows.seq_lens[row] = end
            rows.block_tables[row, : len(blocks)] = blocks
            slots = blocks[positions // block_size] * block_size + positions % block_size
            rows.slot_mapping[row, columns - new :] = slots
            rows.temperature[row] = request.sampling.temperature
            rows.top_p[row] = request.sampling.top_p
            rows.seeds[row] = request.sampling.seed
        return rows

    def draw(self, logits) -> jax.Array:
        """Samples the next token of each row, int32 [B], from logits [B, V]; -1 if they are NaN."""
        # The position of the next token is the length so far, so its random numbers do not depend on the step or the
        # row.
        return sample(logits, self.temperature, self.top_p, self.seeds, self.seq_lens)
