"""Which rows of a buffer on the device hold which tokens: the map of a layer and request, an int32 array."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class HotMap:
    """The three parts of the map of a request with tokens at `positions` positions and `rows` rows on the device.

    - `place` [positions]: the row of each token, or -1.
    - `held` [rows]: the position of the token in each row, or -1.
    - `order` [rows]: the rows, the least recently used first.
    """

    positions: int
    rows: int

    @property
    def width(self) -> int:
        """Elements of the map."""
        return self.positions + 2 * self.rows

    def empty(self) -> jax.Array:
        """The map [width] of rows that hold no tokens."""
        nowhere = jnp.full(self.positions + self.rows, -1, jnp.int32)
        return jnp.concatenate([nowhere, jnp.arange(self.rows, dtype=jnp.int32)])

    def split(self, maps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`place`, `held` and `order` of maps [..., width]."""
        edges = self.positions, self.positions + self.rows
        return maps[..., : edges[0]], maps[..., edges[0] : edges[1]], maps[..., edges[1] :]
