"""`bf16`, `f16`, `f32`: the parts one after the other, unscaled."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Plain:
    """Values rounded to `dtype` and stored side by side."""

    name: str
    dtype: str
    scaled: bool = False

    @property
    def alignment(self):
        """One element."""
        return jnp.dtype(self.dtype).itemsize

    def width(self, sizes):
        """One element a value."""
        return sum(sizes)

    def encode(self, parts, scales):
        """Parts [..., n_i] to [..., sum n_i]."""
        return jnp.concatenate([part.astype(self.dtype) for part in parts], axis=-1)

    def decode(self, row, sizes, scales, dtype):
        """Slices of the row, converted to `dtype`."""
        first, parts = 0, []
        for size in sizes:
            parts.append(row[..., first : first + size].astype(dtype))
            first += size
        return parts
