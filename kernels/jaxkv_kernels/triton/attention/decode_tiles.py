"""Tile sizes of the decode kernels, by GPU generation, rows and bytes.

Measured on an H200 (sm_90); for the others, what shared memory and registers hold: 163 KiB a program on sm_80, 99 on
sm_86 and sm_89.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.triton.runtime.interpreting import interpreting
from jaxkv_kernels.triton.runtime.launch import capability


@dataclass(frozen=True)
class Tiles:
    """What a program of an attention kernel works on at a time."""

    rows: int
    """Query tokens x heads."""
    keys: int
    """Tokens of the cache."""
    columns: int
    """Of a latent, loaded at a time: for one product, or two where e4m3 values come in pairs."""
    warps: int
    stages: int
    """Tiles of keys that are under way at a time."""
    programs: int
    """That fit on a multiprocessor together."""

    def groups(self, rows: int) -> int:
        """How many programs share the rows of a request."""
        return -(-rows // self.rows)


def multiprocessors() -> int:
    """Of the GPU; few for the interpreter, which has requests cut all the same."""
    device: Any = jax.devices()[0]
    return 4 if interpreting.value or device.platform == "cpu" else device.core_count


def power_of_two(n: int) -> int:
    """The next one."""
    return 1 << (n - 1).bit_length()


def _padded(rows: int, most: int) -> int:
    """Rows of a tile: a power of two that products take, at most `most`."""
    return min(max(16, power_of_two(rows)), most)


def latent_tiles(entry, rows: int, dtype) -> Tiles:
    """For latents that are attended to in `dtype`, or stored in it."""
    if jnp.dtype(dtype) == jnp.float32:
        return Tiles(rows=16, keys=16, columns=128, warps=4, stages=1, programs=1)
    roomy = capability() in (80, 90)
    quantised = entry.dtype.itemsize == 1
    if rows <= 16:
        if entry.codec.scaled and capability() == 90:
            return Tiles(rows=16, keys=64, columns=64, warps=4, stages=3, programs=2)
        columns = 64 if entry.codec.scaled else 128
        return Tiles(rows=16, keys=32, columns=columns, warps=4, stages=3 if roomy else 2, programs=2 if roomy else 1)
    columns = 256 if entry.codec.scaled else 128
    if capability() == 90:
        stages = 3 if quantised else 2
        return Tiles(rows=_padded(rows, 64), keys=64, columns=columns, warps=8, stages=stages, programs=1)
    # Quantised entries take room beside their values; without their type, making values of them takes registers.
    most = 64 if roomy and not quantised else 32
    return Tiles(rows=_padded(rows, most), keys=32, columns=columns, warps=8, stages=2, programs=1)


def pair_tiles(entry, rows: int, dtype) -> Tiles:
    """For keys and values that are attended to in `dtype`, or stored in it."""
    wide = max(entry.sizes) > 128
    if jnp.dtype(dtype) == jnp.float32:
        return Tiles(rows=16, keys=16, columns=0, warps=4, stages=1, programs=2)
    return Tiles(
        rows=_padded(rows, 64), keys=32 if wide else 64, columns=0, warps=8 if rows > 32 else 4, stages=2, programs=4
    )
