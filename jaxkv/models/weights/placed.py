"""Arrays that are assembled on their devices, one part of a checkpoint's weight at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from jaxkv.models.weights.safetensors_file import Index

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


@partial(jax.jit, donate_argnums=0)
def _set(stack, piece, expert: int):
    """`stack` with `piece` at index `expert` of its first axis."""
    return lax.dynamic_update_index_in_dim(stack, piece, expert, axis=0)
