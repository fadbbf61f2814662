"""Which rows of a buffer on the device hold which tokens: the map of a layer and request, an int32 array."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class HotMap:
    """The parts of the map of a request with tokens at `positions` positions and `rows` rows on the device.

    - `place` [positions]: the row in which a token was stored last, from 0 to rows - 1.
    - `held` [rows]: the position whose token a row holds, or -1.  The token at position p is in row r = place[p] if
      held[r] is p; otherwise it is in no row.
    - `order` [rows]: the rows, the least recently used first.
    - One element that is 0 between calls, in which programs that share a request may count.
    """

    positions: int
    rows: int

    @property
    def width(self) -> int:
        """Elements of the map."""
        return self.positions + 2 * self.rows + 1

    def empty(self) -> jax.Array:
        """The map [width] of rows that hold no tokens."""
        place = jnp.zeros(self.positions, jnp.int32)
        order = jnp.arange(self.rows, dtype=jnp.int32)
        return jnp.concatenate([place, jnp.full(self.rows, -1, jnp.int32), order, jnp.zeros(1, jnp.int32)])

    def split(self, maps: jax.Array) -> list[jax.Array]:
        """`place`, `held`, `order` and the last element of maps [..., width]."""
        edges = self.positions, self.positions + self.rows, self.positions + 2 * self.rows
        return jnp.split(maps, edges, axis=-1)

    def forget(self, maps: jax.Array, which: jax.Array) -> jax.Array:
        """The maps [L, B, width], where the rows of the requests that bool [B] selects hold no tokens."""
        place, held, *others = self.split(maps)
        return jnp.concatenate([place, jnp.where(which[:, None], -1, held), *others], axis=-1)
