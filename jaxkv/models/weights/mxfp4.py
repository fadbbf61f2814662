"""Weights of experts in MXFP4: e2m1 values, two per byte, the first in the low bits, with a scale per 32 values of a
row, an exponent of 2 plus 127 (e8m0).

OpenAI publishes GPT-OSS with two tensors, uint8, in place of a stack `NAME` [experts, rows, columns]: `NAME_blocks`
[experts, rows, columns / 32, 16] and `NAME_scales` [experts, rows, columns / 32].
DeepSeek publishes V4 with two tensors per expert: `PREFIX.weight`, int8 [rows, columns / 2], and `PREFIX.scale`,
F8_E8M0 [rows, columns / 32].
Sources: `dequantize` in `integrations/mxfp4.py` and `Fp8Dequantize` in `integrations/finegrained_fp8.py` of
https://github.com/huggingface/transformers.
"""

from functools import partial

import jax
import numpy as np

from jaxkv.models.weights.safetensors_file import Index
from jaxkv_kernels.formats.fp4 import from_e2m1, from_e8m0

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


def _groups(columns: slice) -> tuple[slice, tuple[int, int]]:
    """The groups that hold some columns, and where these begin and end in them."""
    groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
    return groups, (columns.start - groups.start * GROUP, columns.stop - groups.start * GROUP)


def _placed(checkpoint, blocks, scales_name: str, index: Index, inner: tuple[int, int], dtype, device) -> jax.Array:
    scales = checkpoint.read(scales_name, index).view(np.uint8)
    if count := int((scales == NAN).sum()):
        raise checkpoint.error(scales_name, f"holds {count} NaN of {scales.size} scales")
    return _expanded(jax.device_put(blocks, device), jax.device_put(scales, device), dtype, inner)


@partial(jax.jit, static_argnums=(2, 3))
def _expanded(blocks, scales, dtype, inner: tuple[int, int]):
    values = from_e2m1(blocks.reshape(*scales.shape[:-1], -1), from_e8m0(scales))
    return values[..., slice(*inner)].astype(dtype)
