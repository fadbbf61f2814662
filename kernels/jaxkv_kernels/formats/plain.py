"""`bf16`, `f16`, `f32`: values rounded to one dtype and stored without gaps or scales."""

import jax.numpy as jnp

from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.format import Format, together


class Plain(Format):
    """Values rounded to the format's `dtype`."""

    kinds = (MLAEntry, KVEntry, IndexerEntry)

    def __init__(self, name: str, dtype: str):
        self.name, self.dtype = name, dtype

    def fields(self, sizes, block_size):
        """One field for each array of values (such as K and V)."""
        return together(*((name, self.dtype, count) for name, count in sizes.items()))

    def encode(self, values, scales):
        """Rounds to nearest even."""
        return jnp.concatenate([x.astype(self.dtype) for x in values], axis=-1)

    def decode(self, row, sizes, scales, dtype):
        """Converts to `dtype`."""
        return [field.read(row).astype(dtype) for field in self.fields(sizes, 1)]
