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

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.weights import finite
from jaxkv.models.weights.safetensors_file import Index
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


def part(checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Part of a stack in a checkpoint on a device, expanded and rounded to `dtype`.

    ValueError if a value is not finite.  Scales of 2**-127 count as 0, as in `from_e8m0`.
    """
    *stack, columns = index
    groups, inner = _groups(columns)
    values, scales = (*stack, groups, slice(0, GROUP // 2)), (*stack, groups)
    return _placed(checkpoint, {f"{name}{BLOCKS}": values, f"{name}{SCALES}": scales}, inner, dtype, device)


def expert_part(checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """The same of the matrix of one expert."""
    rows, columns = index
    groups, inner = _groups(columns)
    values, scales = (rows, slice(groups.start * GROUP // 2, groups.stop * GROUP // 2)), (rows, groups)
    return _placed(checkpoint, {name: values, checkpoint.scales_of(name): scales}, inner, dtype, device)


def expert_tiles(checkpoint, name: str, dtype, index: Index, device) -> tuple[jax.Array, jax.Array]:
    """Part of the matrix of one expert, of whole tiles, as e4m3 values, and the scales of their tiles, in float32.

    ValueError if it holds NaN or is not finite as `dtype`, or if such values and scales do not represent all values.
    """
    rows, columns = index
    groups, _ = _groups(columns)
    packed = checkpoint.read(name, (rows, slice(columns.start // 2, columns.stop // 2))).view(np.uint8)
    exponents = _exponents(checkpoint, checkpoint.scales_of(name), (rows, groups))
    exponents = jax.device_put(exponents, device)
    values, scales, different, counts = _in_tiles(jax.device_put(packed, device), exponents, dtype)
    finite.check(checkpoint, name, counts, values.size, dtype, scaled=True)
    if count := int(different):
        raise checkpoint.error(
            name, f"has {count} values that float8 does not represent with a scale per tile of {TILE} x {TILE}: load "
            'it with `fp8_weights` "expand"'
        )  # fmt: skip
    return values, scales


@partial(jax.jit, static_argnums=2)
def _in_tiles(packed, exponents, dtype) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The e4m3 values [rows, columns], their scales [tiles, tiles], how many of the values differ from the weights when
    multiplied by their scales, and the weights' `finite.counts`.
    """
    whole, scales = from_e2m1(packed, from_e8m0(exponents)), _tile_scales(exponents)
    groups = jnp.repeat(jnp.repeat(scales, TILE, axis=0), TILE // GROUP, axis=1)
    groups = groups[: exponents.shape[0], : exponents.shape[1]]
    values = e4m3_values(from_e2m1(packed, from_e8m0(exponents) / groups))
    restored = values * jnp.repeat(groups, GROUP, axis=1)
    return values.astype(jnp.float8_e4m3fn), scales, (restored != whole).sum(), finite.counts(whole, dtype)


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


def _placed(checkpoint, parts: dict[str, Index], inner: tuple[int, int], dtype, device) -> jax.Array:
    """Those parts of the tensors of values and scales on a device, expanded; `inner` are the needed columns."""
    (name, of_values), (scales_name, of_scales) = parts.items()
    packed = jax.device_put(checkpoint.read(name, of_values).view(np.uint8), device)
    scales = jax.device_put(_exponents(checkpoint, scales_name, of_scales), device)
    values, counts = _expanded(packed, scales, dtype, inner)
    finite.check(checkpoint, name, counts, values.size, dtype, scaled=True)
    return values


@partial(jax.jit, static_argnums=(2, 3))
def _expanded(blocks, scales, dtype, inner: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """The values as `dtype`, and their `finite.counts`."""
    values = from_e2m1(blocks.reshape(*scales.shape[:-1], -1), from_e8m0(scales))[..., slice(*inner)]
    return values.astype(dtype), finite.counts(values, dtype)
