"""Arrays that are assembled on their devices, one part of a checkpoint's weight at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Sharding

from jaxkv.models.weights import finite, mxfp4
from jaxkv.models.weights.checkpoint import Checkpoint
from jaxkv.models.weights.safetensors_file import Index
from jaxkv_kernels.tile_scaled import TILE, TileScaled

Read = Callable[[Index, Any], jax.Array]
"""`read(index, device)` returns part of a weight on a device."""


def indices(shape: tuple[int, ...], sharding: Sharding | jax.Device | None) -> dict[Any, Index]:
    """Which part of an array of that shape each device of this process has."""
    parts = (
        sharding.addressable_devices_indices_map(shape)
        if isinstance(sharding, Sharding)
        else {sharding: (slice(None),) * len(shape)}
    )
    return {
        device: tuple(slice(*part.indices(size)[:2]) for part, size in zip(index or (), shape, strict=True))
        for device, index in parts.items()
    }


class Placed:
    """An array on its devices: a weight, or a stack of one per expert.

    Args:
      shape: the shape of the whole array.
      dtype: its dtype.
      sharding: where it lies: a sharding, a device, or None for the default device.
      stacked: whether the first axis is that of experts.
    """

    def __init__(self, shape: tuple[int, ...], dtype, sharding: Sharding | jax.Device | None, *, stacked: bool):
        self._shape, self._dtype, self._sharding, self._stacked = shape, dtype, sharding, stacked
        self.indices = indices(shape, sharding)
        """The part of each device of this process."""
        self._shards: dict[Any, jax.Array] = {}

    def add(self, expert: int, read: Read) -> None:
        """Reads a weight (`expert` 0), or that of an expert: on each device its part."""
        found: dict[Index, jax.Array] = {}
        for device, index in self.indices.items():
            own, position = index, None
            if self._stacked:
                own, position = index[1:], expert - index[0].start
                if not 0 <= position < index[0].stop - index[0].start:
                    continue
            found[own] = jax.device_put(found[own], device) if own in found else read(own, device)
            if position is None:
                self._shards[device] = found[own]
            else:
                self._shards[device] = _set(self._stack(device), found[own], position)

    def _stack(self, device) -> jax.Array:
        """The part of a stack that a device has so far; zeros if nothing has been read."""
        if device not in self._shards:
            shape = [of.stop - of.start for of in self.indices[device]]
            return jnp.zeros(shape, self._dtype, device=device)
        return self._shards[device]

    def array(self) -> jax.Array:
        """The array, after all of its weights have been added."""
        if not isinstance(self._sharding, Sharding):
            return self._shards[self._sharding]
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, list(self._shards.values()), dtype=self._dtype
        )


def part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Part of a weight of the checkpoint on a device, as `dtype`; ValueError if a value is not finite, as such or as
    `dtype`.

    The values of float8 weights are not multiplied by their scales.
    """
    held = checkpoint.read(name, index)
    # XLA does not support powers of two as a dtype on all devices.
    array = jax.device_put(held.astype(np.float32) if held.dtype == ml_dtypes.float8_e8m0fnu else held, device)
    # Counted on the device, where that takes no time.  The host waits, and so has one part in memory at a time.
    finite.check(checkpoint, name, finite.counts(array, dtype), array.size, dtype)
    return array.astype(dtype)


def table_part(checkpoint: Checkpoint, name: str, below: int, index: Index, device) -> jax.Array:
    """Part of a table of integers on a device, as int32; ValueError unless all are from 0 to `below` - 1."""
    array = checkpoint.read(name, index)
    outside = array[(array < 0) | (array >= below)]
    if outside.size:
        raise checkpoint.error(name, f"holds {outside[0]}: expected integers from 0 to {below - 1}")
    return jax.device_put(array.astype(np.int32), device)


def expanded_part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Like `part`, but float8 and FP4 weights are multiplied by their scales, in float32, and rounded to `dtype`."""
    if checkpoint.is_fp4(name):
        return mxfp4.expert_part(checkpoint, name, dtype, index, device)
    if not checkpoint.is_fp8(name):
        return part(checkpoint, name, dtype, index, device)
    # Whole tiles are read, of which the device needs some rows and columns.
    outer = tuple(
        slice(of.start // TILE * TILE, min(-(-of.stop // TILE) * TILE, size))
        for of, size in zip(index, checkpoint.shape(name), strict=True)
    )
    inner = tuple((of.start - whole.start, of.stop - whole.start) for of, whole in zip(index, outer, strict=True))
    return _expanded(scaled_part(checkpoint, name, dtype, outer, device), dtype, inner)


def scaled_part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> TileScaled:
    """Part of a float8 or FP4 weight, of whole tiles, in float8 on a device.

    ValueError if a value times its scale is not finite as `dtype`, the model's, or if float8 does not represent it.
    """
    if checkpoint.is_fp4(name):
        return TileScaled(*mxfp4.expert_tiles(checkpoint, name, dtype, index, device))
    tiles = tuple(slice(of.start // TILE, -(-of.stop // TILE)) for of in index)
    values = part(checkpoint, name, jnp.float8_e4m3fn, index, device)
    scales = part(checkpoint, checkpoint.scales_of(name), jnp.float32, tiles, device)
    weight = TileScaled(values, scales)
    finite.check(checkpoint, name, _counts(weight, dtype), values.size, dtype, scaled=True)
    return weight


def whole(shape: tuple[int, ...]) -> Index:
    """The index of a whole array."""
    return tuple(slice(0, size) for size in shape)


@partial(jax.jit, static_argnums=(1, 2))
def _expanded(weight: TileScaled, dtype, inner: tuple[tuple[int, int], ...]):
    return weight.dequantised(dtype)[tuple(slice(*ends) for ends in inner)]


@partial(jax.jit, static_argnums=1)
def _counts(weight: TileScaled, dtype):
    return finite.counts(weight.dequantised(jnp.float32), dtype)


@partial(jax.jit, donate_argnums=0)
def _set(stack, piece, expert: int):
    """`stack` with `piece` at index `expert` of its first axis."""
    return lax.dynamic_update_index_in_dim(stack, piece, expert, axis=0)
