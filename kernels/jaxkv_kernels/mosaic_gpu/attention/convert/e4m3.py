"""Converts e4m3 keys to float16 for wgmma.  float16 represents every e4m3 value exactly.

TMA copies half a tile of keys as it is stored, 16 KiB, into the first half of the shared memory of its float16
values.  A warpgroup loads all of it to registers, and then stores it converted.  So keys need no additional
memory, and the copies of all halves can be in flight at once.

Converting keys in registers, as the first operand of S' = K Q', and storing only values was slower: 128 requests with
128 heads and 4,096 tokens take 0.293 ms as it is, 0.310 if each consumer converts the tile that it multiplies with the
queries, and more than 0.337 if one warpgroup computes all weights and two multiply them with the values.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import ROPE

DTYPE = jnp.dtype(jnp.float16)
"""The dtype of converted values."""


def raw_halves() -> Any:
    """Shared memory of two tiles' halves [2, 2, 64, 256] as bytes, each in the place of its float16 values."""
    return plgpu.SMEM((2, 2, 2, TILE, HALF), jnp.uint8)


def raw_ropes() -> Any:
    """Shared memory of two tiles' rotary keys [2, 64, 64] as bytes, each in the place of its float16 values."""
    return plgpu.SMEM((2, 2, TILE, ROPE), jnp.uint8)


@dataclass(frozen=True)
class E4M3Tiles:
    """Two tiles of keys in shared memory, as float16 values and as bytes."""

    k: Any
    """float16 [2, 2, 64, 256]: tiles, halves."""
    r: Any
    """float16 [2, 64, 64]."""
    raw_k: Any
    """See `raw_halves`."""
    raw_r: Any
    """See `raw_ropes`."""
    interpret: bool

    def convert(self, tile: int, half: int, *, rope: bool) -> None:
        """Converts half a tile that has landed, and with `rope` the tile's rotary keys."""
        if self.interpret:
            self.k[tile, half] = _converted(self.raw_k[tile, half, 0])
            if rope:
                self.r[tile] = _converted(self.raw_r[tile, 0])
        else:
            self._convert_in_place(tile, half, rope)
        plgpu.commit_smem()

    def _convert_in_place(self, tile, half, rope):
        from jax.experimental.mosaic import gpu as mgpu

        from jaxkv_kernels.mosaic_gpu.attention.convert import lanes

        raw_type, ref_type = plgpu.RefType(), plgpu.RefType(swizzled(1, dtype=DTYPE).transforms)
        k_offset = (2 * tile + half) * TILE * HALF * DTYPE.itemsize
        r_offset = tile * TILE * ROPE * DTYPE.itemsize

        @plgpu.inline_mgpu(arg_types=(ref_type, ref_type, raw_type, raw_type))
        def convert(_, k, r, raw_k, raw_r):
            chunks = lanes.load_half(raw_k, k_offset)
            ropes = lanes.load_rope(raw_r, r_offset) if rope else []
            mgpu.utils.warpgroup_barrier()
            lanes.store_half(k, k_offset, chunks)
            lanes.store_rope(r, r_offset, ropes)

        convert(self.k, self.r, self.raw_k, self.raw_r)


def _converted(raw):
    return lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(DTYPE)
