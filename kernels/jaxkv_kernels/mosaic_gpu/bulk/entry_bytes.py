"""Entries as bytes, for kernels that copy them whole."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class EntryBytes:
    """What such kernels need to know of an entry: it has one part, its bytes."""

    nbytes: int
    one_head: bool

    dtype = jnp.dtype(jnp.uint8)

    @property
    def sizes(self) -> tuple[int]:
        """The number of bytes."""
        return (self.nbytes,)
