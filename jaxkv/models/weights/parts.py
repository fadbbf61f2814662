"""Parts of a checkpoint's weights on a device: read, multiplied by their scales, rounded, and checked to be finite.

`expanded_part` returns a part of any weight in the dtype of the model, and `scaled_part` one of a weight that stays in
float8.  A value that is NaN or infinite, as it is stored or in the dtype in which the model keeps it, is a ValueError
that names the file and the weight.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxkv.models.weights import mxfp4
from jaxkv.models.weights.checkpoint import Checkpoint
from jaxkv.models.weights.safetensors_file import Index
from jaxkv_kernels.tile_scaled import TILE, TileScaled


def table_part(checkpoint: Checkpoint, name: str, below: int, index: Index, device) -> jax.Array:
    """Part of a table of integers on a device, as int32; ValueError unless all are from 0 to `below` - 1."""
    array = checkpoint.read(name, index)
    outside = array[(array < 0) | (array >= below)]
    if outside.size:
        raise checkpoint.error(name, f"holds {outside[0]}: expected integers from 0 to {below - 1}")
    return jax.device_put(array.astype(np.int32), device)


def expanded_part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Part of a weight on a device, as `dtype`; float8 and FP4 weights are multiplied by their scales in float32."""
    if checkpoint.is_fp4(name):
        return _fp4_part(checkpoint, name, dtype, index, device)
    if not checkpoint.is_fp8(name):
        return _part(checkpoint, name, dtype, index, device)
    # Whole tiles are read, of which the device needs some rows and columns.
    outer = tuple(
        slice(of.start // TILE * TILE, min(-(-of.stop // TILE) * TILE, size))
        for of, size in zip(index, checkpoint.shape(name), strict=True)
    )
    inner = tuple((of.start - whole.start, of.stop - whole.start) for of, whole in zip(index, outer, strict=True))
    return _dequantised(scaled_part(checkpoint, name, dtype, outer, device), dtype, inner)


def scaled_part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> TileScaled:
    """Part of a float8 or FP4 weight, of whole tiles, in float8 on a device.

    ValueError if a value times its scale is not finite as `dtype`, the model's, or if float8 does not represent it.
    """
    if checkpoint.is_fp4(name):
        return _fp4_tiles(checkpoint, name, dtype, index, device)
    tiles = tuple(slice(of.start // TILE, -(-of.stop // TILE)) for of in index)
    values = _part(checkpoint, name, jnp.float8_e4m3fn, index, device)
    scales = _part(checkpoint, checkpoint.scales_of(name), jnp.float32, tiles, device)
    weight = TileScaled(values, scales)
    _check(checkpoint, name, _tile_counts(weight, dtype), values.size, dtype, scaled=True)
    return weight


def mxfp4_part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Part of a stack of experts in MXFP4 on a device, expanded and rounded to `dtype`.

    ValueError if a value is not finite.  Scales of 2**-127 count as 0, as in `from_e8m0`.
    """
    *stack, columns = index
    groups, inner = mxfp4.groups_of(columns)
    values, scales = (*stack, groups, slice(0, mxfp4.GROUP // 2)), (*stack, groups)
    parts: dict[str, Index] = {f"{name}{mxfp4.BLOCKS}": values, f"{name}{mxfp4.SCALES}": scales}
    return _fp4_values(checkpoint, parts, inner, dtype, device)


def _part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Part of a weight as it is stored: the values of float8 weights are not multiplied by their scales."""
    held = checkpoint.read(name, index)
    # XLA does not support powers of two as a dtype on all devices.
    array = jax.device_put(held.astype(np.float32) if held.dtype == ml_dtypes.float8_e8m0fnu else held, device)
    # Counted on the device, where that takes no time.  The host waits, and so has one part in memory at a time.
    _check(checkpoint, name, _counts(array, dtype), array.size, dtype)
    return array.astype(dtype)


def _fp4_part(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """The same as `mxfp4_part`, of the matrix of one expert."""
    rows, columns = index
    groups, inner = mxfp4.groups_of(columns)
    values = rows, slice(groups.start * mxfp4.GROUP // 2, groups.stop * mxfp4.GROUP // 2)
    parts: dict[str, Index] = {name: values, checkpoint.scales_of(name): (rows, groups)}
    return _fp4_values(checkpoint, parts, inner, dtype, device)


def _fp4_values(checkpoint: Checkpoint, parts: dict[str, Index], inner: tuple[int, int], dtype, device) -> jax.Array:
    """Those parts of the tensors of values and scales on a device, expanded; `inner` are the needed columns."""
    (name, of_values), (scales_name, of_scales) = parts.items()
    packed = jax.device_put(checkpoint.read(name, of_values).view(np.uint8), device)
    scales = jax.device_put(_exponents(checkpoint, scales_name, of_scales), device)
    values, counts = _fp4_dequantised(packed, scales, dtype, inner)
    _check(checkpoint, name, counts, values.size, dtype, scaled=True)
    return values


def _fp4_tiles(checkpoint: Checkpoint, name: str, dtype, index: Index, device) -> TileScaled:
    """Part of the matrix of one expert in MXFP4, of whole tiles, in float8."""
    rows, columns = index
    groups, _ = mxfp4.groups_of(columns)
    packed = checkpoint.read(name, (rows, slice(columns.start // 2, columns.stop // 2))).view(np.uint8)
    exponents = _exponents(checkpoint, checkpoint.scales_of(name), (rows, groups))
    exponents = jax.device_put(exponents, device)
    values, scales, different, counts = _fp4_in_tiles(jax.device_put(packed, device), exponents, dtype)
    _check(checkpoint, name, counts, values.size, dtype, scaled=True)
    if count := int(different):
        raise checkpoint.error(
            name, f"has {count} values that float8 does not represent with a scale per tile of {TILE} x {TILE}: load "
            'it with `fp8_weights` "expand"'
        )  # fmt: skip
    return TileScaled(values, scales)


def _exponents(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
    """Part of the scales of a weight in MXFP4, uint8; ValueError if it holds NaN."""
    scales = checkpoint.read(name, index).view(np.uint8)
    if count := int((scales == mxfp4.NAN).sum()):
        raise checkpoint.error(name, f"holds {count} NaN of {scales.size} scales")
    return scales


def _check(checkpoint: Checkpoint, name: str, found: jax.Array, size: int, dtype, *, scaled: bool = False) -> None:
    """ValueError, which names the file and the weight, unless all `_counts` of a weight's `size` values are 0.

    `scaled` says that the values were multiplied by their scales.
    """
    nan, infinite, beyond = map(int, found)
    times = " times their scales" if scaled else ""
    if nan:
        raise checkpoint.error(name, f"holds {nan} NaN of {size} values{times}")
    if infinite:
        raise checkpoint.error(name, f"holds {infinite} infinite values of {size}{times}")
    if beyond:
        kind = jnp.dtype(dtype)
        raise checkpoint.error(
            name,
            f"holds {beyond} of {size} values{times} beyond {float(jnp.finfo(kind).max):g}, the largest of {kind}: "
            "load it with another `dtype`, such as 'float32'",
        )


@partial(jax.jit, static_argnums=1)
def _counts(values, dtype) -> jax.Array:
    """How many of `values` are NaN, infinite, and finite but beyond the largest number of `dtype`: int32 [3]."""
    wide = values.astype(jnp.float32)
    infinite = jnp.isinf(wide)
    beyond = jnp.isinf(wide.astype(dtype)) & ~infinite
    return jnp.stack([jnp.isnan(wide).sum(), infinite.sum(), beyond.sum()])


@partial(jax.jit, static_argnums=1)
def _tile_counts(weight: TileScaled, dtype) -> jax.Array:
    return _counts(weight.dequantised(jnp.float32), dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _dequantised(weight: TileScaled, dtype, inner: tuple[tuple[int, int], ...]) -> jax.Array:
    return weight.dequantised(dtype)[tuple(slice(*ends) for ends in inner)]


@partial(jax.jit, static_argnums=(2, 3))
def _fp4_dequantised(packed, exponents, dtype, inner: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """The values as `dtype`, and their `_counts`."""
    values = mxfp4.dequantised(packed, exponents)[..., slice(*inner)]
    return values.astype(dtype), _counts(values, dtype)


@partial(jax.jit, static_argnums=2)
def _fp4_in_tiles(packed, exponents, dtype) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The e4m3 values, their scales, how many of their products differ from the weights, and the weights' `_counts`."""
    whole, (values, scales, restored) = mxfp4.dequantised(packed, exponents), mxfp4.in_tiles(packed, exponents)
    return values, scales, (restored != whole).sum(), _counts(whole, dtype)
