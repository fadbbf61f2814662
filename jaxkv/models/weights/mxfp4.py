"""Weights of experts in MXFP4: e2m1 values, two per byte, the first in the low bits, with a scale per 32 values of a
row, an exponent of 2 plus 127 (e8m0).

OpenAI publishes GPT-OSS with two tensors, uint8, in place of a stack `NAME` [experts, rows, columns]: `NAME_blocks`
[experts, rows, columns / 32, 16] and `NAME_scales` [experts, rows, columns / 32].
DeepSeek publishes V4 with two tensors per expert: `PREFIX.weight`, int8 [rows, columns / 2], and `PREFIX.scale`,
F8_E8M0 [rows, columns / 32].  Such a matrix is also one in float8 with a scale per tile of 128 x 128 (`fp8.py`), of
exactly the same values, if the exponents of a tile differ by 14 at most: e4m3 represents the magnitudes 0.5 to 6 times
2**-8 to 2**6.
Sources: `dequantize` in `integrations/mxfp4.py` and `Fp8Dequantize` in `integrations/finegrained_fp8.py` of
https://github.com/huggingface/transformers.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.weights.safetensors_file import Index
from jaxkv_kernels.formats.bits import e4m3_values
from jaxkv_kernels.formats.fp4 import from_e2m1, from_e8m0
from jaxkv_kernels.tile_scaled import TILE

DTYPE = "U8"
"""The dtype of both tensors of a stack in safetensors files."""
EXPERT_DTYPE, SCALE_DTYPE = "I8", "F8_E8M0"
"""Those of the two tensors of an expert."""
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


def part(checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Part of a stack in a checkpoint on a device, expanded and rounded to `dtype`; ValueError if it holds NaN.

    Scales of 2**-127 count as 0, as in `from_e8m0`.
    """
    *stack, columns = index
    groups, inner = _groups(columns)
    blocks = checkpoint.read(f"{name}{BLOCKS}", (*stack, groups, slice(0, GROUP // 2)))
    return _placed(checkpoint, blocks, f"{name}{SCALES}", (*stack, groups), inner, dtype, device)


def expert_part(checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """The same of the matrix of one expert."""
    rows, columns = index
    groups, inner = _groups(columns)
    packed = checkpoint.read(name, (rows, slice(groups.start * GROUP // 2, groups.stop * GROUP // 2)))
    return _placed(checkpoint, packed.view(np.uint8), checkpoint.scales_of(name), (rows, groups), inner, dtype, device)


def expert_values(checkpoint, name: str, index: Index, device) -> jax.Array:
    """Part of the matrix of one expert, of whole tiles, as e4m3 values, of which `expert_scales` are the scales.

    ValueError if it holds NaN, or if such values and scales do not represent all values.
    """
    rows, columns = index
    groups, _ = _groups(columns)
    packed = checkpoint.read(name, (rows, slice(columns.start // 2, columns.stop // 2))).view(np.uint8)
    exponents = _exponents(checkpoint, checkpoint.scales_of(name), (rows, groups))
    values, different = _in_tiles(jax.device_put(packed, device), jax.device_put(exponents, device))
    if count := int(different):
        raise checkpoint.error(
            name, f"has {count} values that float8 does not represent with a scale per tile of {TILE} x {TILE}: load "
            'it with `fp8_weights` "expand"'
        )  # fmt: skip
    return values


def expert_scales(checkpoint, name: str, index: Index, device) -> jax.Array:
    """The scales, float32, of a part of the tiles of one expert's matrix."""
    scales = checkpoint.scales_of(name)
    sizes = zip(index, (TILE, TILE // GROUP), checkpoint.shape(scales), strict=True)
    own = tuple(slice(tiles.start * size, min(tiles.stop * size, whole)) for tiles, size, whole in sizes)
    return _tile_scales(jax.device_put(_exponents(checkpoint, scales, own), device))


@jax.jit
def _in_tiles(packed, exponents) -> tuple[jax.Array, jax.Array]:
    """The e4m3 values [rows, columns], and how many of them differ from the weights when multiplied by their scales."""
    whole, scales = from_e2m1(packed, from_e8m0(exponents)), _tile_scales(exponents)
    groups = jnp.repeat(jnp.repeat(scales, TILE, axis=0), TILE // GROUP, axis=1)
    groups = groups[: exponents.shape[0], : exponents.shape[1]]
    values = e4m3_values(from_e2m1(packed, from_e8m0(exponents) / groups))
    restored = values * jnp.repeat(groups, GROUP, axis=1)
    return values.astype(jnp.float8_e4m3fn), (restored != whole).sum()


@jax.jit
def _tile_scales(exponents) -> jax.Array:
    """The scales of tiles, of the exponents uint8 [rows, groups] of their groups: the largest is 2**6 times that."""
    rows, groups = exponents.shape
    across = TILE // GROUP
    padded = jnp.pad(exponents, ((0, -rows % TILE), (0, -groups % across)))
    largest = padded.reshape(-1, TILE, padded.shape[1] // across, across).max(axis=(1, 3))
    return from_e8m0(jnp.maximum(largest, 7) - 6)


def _exponents(checkpoint, name: str, index: Index) -> np.ndarray:
    """Part of the scales of a checkpoint, uint8; ValueError if it holds NaN."""
    scales = checkpoint.read(name, index).view(np.uint8)
    if count := int((scales == NAN).sum()):
        raise checkpoint.error(name, f"holds {count} NaN of {scales.size} scales")
    return scales


def _groups(columns: slice) -> tuple[slice, tuple[int, int]]:
    """The groups that hold some columns, and where these begin and end in them."""
    groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
    return groups, (columns.start - groups.start * GROUP, columns.stop - groups.start * GROUP)


def _placed(checkpoint, blocks, scales_name: str, index: Index, inner: tuple[int, int], dtype, device) -> jax.Array:
    scales = _exponents(checkpoint, scales_name, index)
    return _expanded(jax.device_put(blocks, device), jax.device_put(scales, device), dtype, inner)


@partial(jax.jit, static_argnums=(2, 3))
def _expanded(blocks, scales, dtype, inner: tuple[int, int]):
    values = from_e2m1(blocks.reshape(*scales.shape[:-1], -1), from_e8m0(scales))
    return values[..., slice(*inner)].astype(dtype)
