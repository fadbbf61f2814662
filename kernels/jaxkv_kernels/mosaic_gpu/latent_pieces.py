"""Pieces of 64 quantised latents as they are stored, and their conversion to bf16 operands in shared memory.

e4m3 values become bf16, which represents them exactly.  Those of `fp8_ds_mla` are multiplied by their scales in float32
and rounded once: not at all, if scales are powers of two.  So queries stay as they are, and no token needs a factor.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.mosaic_gpu.ptx import conversions_to_bf16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES, array, words
from jaxkv_kernels.mosaic_gpu.ptx.inline import c32
from jaxkv_kernels.mosaic_gpu.ptx.loads import COLUMN_TILE
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.sizes import HALF, LATENT, ROPE, TILE

SCALES_NBYTES = 16
"""Bytes of an entry's four scales."""
RAW = plgpu.RefType()
TILES = plgpu.RefType(swizzled(1, dtype=jnp.bfloat16).transforms)


def _pairs(values: int) -> Any:
    """The type of `values` bf16 values as pairs, spread over the lanes."""
    shape = (values // 2,)
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED(shape, 4))


HALF_PAIRS, ROPE_PAIRS = _pairs(TILE * HALF), _pairs(TILE * ROPE)


@dataclass(frozen=True)
class LatentPieces:
    """What the producer does with pieces of `fp8` or `fp8_ds_mla` entries.

    `halves` is shared memory uint8 [pieces, 64, 256] with latents, and `rest`, uint8 [64, rest_nbytes], has what
    follows the latent in each entry.  What a `load` returns is in registers.
    """

    entry: MLAEntry

    @property
    def scaled(self) -> bool:
        """Whether entries have scales of their own, and bf16 rotary keys."""
        return self.entry.format == "fp8_ds_mla"

    @property
    def rest_nbytes(self) -> int:
        """Bytes of an entry that follow its latent."""
        return self.entry.nbytes - LATENT

    def load_half(self, halves, rest, piece: int, half) -> jax.Array:
        """Loads and converts a piece; `half` is the index of its columns' half of the latent."""

        @plgpu.inline_mgpu(arg_types=(RAW, RAW, SCALAR), return_type=HALF_PAIRS)
        def load(_, halves, rest, half):
            scales = rest if self.scaled else None
            chunks = conversions_to_bf16.convert_half(
                halves, piece * TILE * HALF, scales, half.registers.item(), self.rest_nbytes
            )
            return _loaded(chunks, HALF_PAIRS)

        return load(halves, rest, half)

    def load_rope(self, rest) -> jax.Array:
        """Loads the rotary keys, and converts them if they are e4m3."""

        @plgpu.inline_mgpu(arg_types=(RAW,), return_type=ROPE_PAIRS)
        def load(_, rest):
            if self.scaled:
                chunks = conversions_to_bf16.load_wide_rope(rest, SCALES_NBYTES, self.rest_nbytes)
            else:
                chunks = conversions_to_bf16.convert_rope(rest)
            return _loaded(chunks, ROPE_PAIRS)

        return load(rest)

    def store_half(self, into, stage, loaded) -> None:
        """Stores what `load_half` returned to `into`[stage], a tile of [stages, 64, 256]."""

        @plgpu.inline_mgpu(arg_types=(TILES, SCALAR, HALF_PAIRS.layout))
        def store(_, into, stage, loaded):
            start = arith.muli(stage.registers.item(), c32(2 * TILE * HALF))
            row_nbytes = HALF // 64 * COLUMN_TILE
            conversions_to_bf16.store_half(into, start, COLUMN_TILE, row_nbytes, _chunks(loaded))

        store(into, stage, loaded)

    def store_parts(self, into, rope, half) -> None:
        """Stores rotary keys to `into`[0], and 64 columns each of a half to the next four tiles of [5, 64, 64]."""

        @plgpu.inline_mgpu(arg_types=(TILES, ROPE_PAIRS.layout, HALF_PAIRS.layout))
        def store(_, into, rope, half):
            if self.scaled:
                conversions_to_bf16.store_wide_rope(into, [words(register) for register in rope.registers.flat])
            else:
                conversions_to_bf16.store_rope(into, _chunks(rope))
            part = 2 * TILE * ROPE
            conversions_to_bf16.store_half(into, c32(part), part, COLUMN_TILE, _chunks(half))

        store(into, rope, half)


def _loaded(chunks, kind) -> Any:
    """The lane's words as an array of this type."""
    flat = [word for chunk in chunks for word in chunk]
    assert len(flat) == kind.shape[0] // LANES
    return array([flat[n : n + 4] for n in range(0, len(flat), 4)], kind.layout)


def _chunks(loaded) -> list[list[Any]]:
    """The eight words of each of the lane's converted chunks."""
    flat = [word for register in loaded.registers.flat for word in words(register)]
    return [flat[n : n + 8] for n in range(0, len(flat), 8)]
