"""`TileScaled`: a weight in float8 with one scale per tile of 128 x 128 values, as DeepSeek publishes V3 and V3.2."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

TILE = 128
"""Rows and columns of a tile."""


def num_tiles(size: int) -> int:
    """The tiles along an axis of `size` values, of which the last may be partial."""
    return -(-size // TILE)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TileScaled:
    """A weight [..., out, in] whose values are e4m3 numbers times the scale of their tile; a pytree.

    Args:
      values: float8_e4m3fn [..., out, in].
      scales: float32 [..., ceil(out / 128), ceil(in / 128)].
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: [..., out, in]."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the weight."""
        return self.values.ndim

    def __getitem__(self, index) -> "TileScaled":
        """A weight of a stack, by its index along the first axis."""
        return TileScaled(self.values[index], self.scales[index])

    def dequantised(self, dtype) -> jax.Array:
        """The weight: products in float32, rounded once to `dtype`."""
        rows, columns = self.shape[-2:]
        # Broadcast rather than gathered, so that XLA fuses it with the product.
        *stack, down, across = self.scales.shape
        tiles = jnp.broadcast_to(self.scales[..., :, None, :, None], (*stack, down, TILE, across, TILE))
        factors = tiles.reshape(*stack, down * TILE, across * TILE)
        return (self.values.astype(jnp.float32) * factors[..., :rows, :columns]).astype(dtype)
