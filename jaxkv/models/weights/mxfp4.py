"""Weights of experts in MXFP4: e2m1 values, two per byte, the first in the low bits, with a scale per 32 values of a
row, an exponent of 2 plus 127 (e8m0).

OpenAI publishes GPT-OSS with two tensors, uint8, in place of a stack `NAME` [experts, rows, columns]: `NAME_blocks`
[experts, rows, columns / 32, 16] and `NAME_scales` [experts, rows, columns / 32].
DeepSeek publishes V4 with two tensors per expert: `PREFIX.weight`, int8 [rows, columns / 2], and `PREFIX.scale`,
F8_E8M0 [rows, columns / 32].  In both forms, values may be uint8 or int8, and scales uint8 or F8_E8M0, of the same
bytes.  Such a matrix is also one in float8 with a scale per tile of 128 x 128 (`fp8.py`), of exactly the same values,
if the exponents of a tile differ by 14 at most: e4m3 represents the magnitudes 0.5 to 6 times 2**-8 to 2**6.
Sources: `dequantize` in `integrations/mxfp4.py` and `Fp8Dequantize` in `integrations/finegrained_fp8.py` of
https://github.com/huggingface/transformers.
"""

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import e4m3_values
from jaxkv_kernels.formats.fp4 import from_e2m1, from_e8m0
from jaxkv_kernels.tile_scaled import TILE

VALUE_DTYPES, SCALE_DTYPES = ("U8", "I8"), ("U8", "F8_E8M0")
"""The dtypes of values and scales in safetensors files."""
BLOCKS, SCALES = "_blocks", "_scales"
SUFFIXES = BLOCKS, SCALES
GROUP = 32
"""Values with a common scale."""
NAN = 255
"""The scale that stands for NaN."""


def shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of both tensors, by suffix, of a stack of matrices [experts, rows, columns]."""
    *stack, columns = shape
    groups = *stack, -(-columns // GROUP)
    return {BLOCKS: (*groups, GROUP // 2), SCALES: groups}


def expert_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both tensors of one expert's matrix [rows, columns], which has whole groups."""
    rows, columns = shape
    return (rows, columns // 2), (rows, columns // GROUP)


def groups_of(columns: slice) -> tuple[slice, tuple[int, int]]:
    """The groups that hold some columns, and where these begin and end in them."""
    groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
    return groups, (columns.start - groups.start * GROUP, columns.stop - groups.start * GROUP)


def dequantised(packed, exponents) -> jax.Array:
    """float32 values [..., columns] of bytes and the exponents of their scales, uint8 [..., groups]."""
    return from_e2m1(packed.reshape(*exponents.shape[:-1], -1), from_e8m0(exponents))


def in_tiles(packed, exponents) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The e4m3 values [rows, columns] of a matrix of whole tiles, the scales [tiles, tiles] of these, in float32, and
    the products of both, which equal the weights if e4m3 represents them.
    """
    scales = _tile_scales(exponents)
    groups = jnp.repeat(jnp.repeat(scales, TILE, axis=0), TILE // GROUP, axis=1)
    groups = groups[: exponents.shape[0], : exponents.shape[1]]
    values = e4m3_values(from_e2m1(packed, from_e8m0(exponents) / groups))
    return values.astype(jnp.float8_e4m3fn), scales, values * jnp.repeat(groups, GROUP, axis=1)


def _tile_scales(exponents) -> jax.Array:
    """The scales of tiles, of the exponents uint8 [rows, groups] of their groups: the largest is 2**6 times that."""
    rows, groups = exponents.shape
    across = TILE // GROUP
    padded = jnp.pad(exponents, ((0, -rows % TILE), (0, -groups % across)))
    largest = padded.reshape(-1, TILE, padded.shape[1] // across, across).max(axis=(1, 3))
    return from_e8m0(jnp.maximum(largest, 7) - 6)
