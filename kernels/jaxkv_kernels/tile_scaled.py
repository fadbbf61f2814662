"""`TileScaled`: a weight in float8 with one scale per tile of 128 x 128 values, as DeepSeek publishes V3 and V3.2."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats import bits
from jaxkv_kernels.gradients import without_gradients

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
      e4m3_products: whether products round activations to e4m3, with a scale per 128 values, as DeepSeek's reference
        implementation does.  By default, activations keep their precision.
    """

    values: Any
    scales: Any
    e4m3_products: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of(cls, weight) -> "TileScaled":
        """Quantises a weight [..., out, in]: the largest magnitude of a tile becomes 448, the largest e4m3 value.

        ValueError if the weight has fewer than two axes.
        """
        if weight.ndim < 2:
            raise ValueError(f"`weight` has shape {tuple(weight.shape)}: expected [..., out, in]")
        reason = "a weight has no gradients where it is quantised to float8: differentiate it before that"
        weight = without_gradients(weight, reason)
        return cls(*_in_tiles(weight))

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
        return TileScaled(self.values[index], self.scales[index], self.e4m3_products)

    @partial(jax.jit, static_argnames="dtype")
    def dequantised(self, dtype) -> jax.Array:
        """The weight: products in float32, rounded once to `dtype`."""
        rows, columns = self.shape[-2:]
        # Broadcast rather than gathered, so that XLA fuses it with the product.
        *stack, down, across = self.scales.shape
        tiles = jnp.broadcast_to(self.scales[..., :, None, :, None], (*stack, down, TILE, across, TILE))
        factors = tiles.reshape(*stack, down * TILE, across * TILE)
        return (self.values.astype(jnp.float32) * factors[..., :rows, :columns]).astype(dtype)

    def operands(self, x) -> tuple[jax.Array, jax.Array]:
        """x [..., in] and the weight as they are multiplied, both of the dtype of x."""
        return (rounded_to_e4m3(x) if self.e4m3_products else x), self.dequantised(x.dtype)


@jax.jit
def rounded_to_e4m3(x) -> jax.Array:
    """x [..., n] with every 128 consecutive values rounded to e4m3 numbers times a float32 scale, in the dtype of x.

    The scale is the largest magnitude divided by 448, the largest e4m3 value.  Source: `act_quant` in
    `inference/kernel.py` of https://huggingface.co/deepseek-ai/DeepSeek-V3.
    """
    reason = "activations have no gradients where they are rounded to e4m3: use a `TileScaled` without `e4m3_products`"
    x = without_gradients(x, reason)
    size = x.shape[-1]
    wide = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -size % TILE)])
    wide = wide.reshape(*x.shape[:-1], num_tiles(size), TILE)
    scales = _scales(jnp.abs(wide).max(axis=-1, keepdims=True))
    rounded = _rounded(wide / scales).astype(jnp.float32) * scales
    return rounded.reshape(*x.shape[:-1], num_tiles(size) * TILE)[..., :size].astype(x.dtype)


@jax.jit
def _in_tiles(weight) -> tuple[jax.Array, jax.Array]:
    """The values and the scales of a weight in float8."""
    *stack, rows, columns = weight.shape
    down, across = num_tiles(rows), num_tiles(columns)
    padding = [(0, 0)] * len(stack) + [(0, down * TILE - rows), (0, across * TILE - columns)]
    tiles = jnp.pad(weight.astype(jnp.float32), padding).reshape(*stack, down, TILE, across, TILE)
    scales = _scales(jnp.abs(tiles).max(axis=(-3, -1)))
    values = _rounded(tiles / scales[..., :, None, :, None]).reshape(*stack, down * TILE, across * TILE)
    return values[..., :rows, :columns], scales


def _scales(largest) -> jax.Array:
    """The scales of groups whose largest magnitudes these are; 1 for zeros."""
    return jnp.where(largest > 0, largest / bits.FP8_MAX, 1)


def _rounded(x) -> jax.Array:
    """x as e4m3; the division by a scale may have rounded it to more than the largest value."""
    return bits.e4m3_values(x).astype(bits.FP8)
