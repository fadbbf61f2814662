"""Weights of experts in MXFP4, as OpenAI publishes GPT-OSS: e2m1 values with a scale per 32 values of a row.

In place of a tensor `NAME` [experts, rows, columns] a checkpoint has two, uint8: `NAME_blocks` [experts, rows,
columns / 32, 16] with two values per byte, the first in the low bits, and `NAME_scales` [experts, rows, columns / 32],
exponents of 2 plus 127 (e8m0).
Source: `dequantize` in `integrations/mxfp4.py` of https://github.com/huggingface/transformers.
"""

from functools import partial

import jax

from jaxkv.models.weights.safetensors_file import Index
from jaxkv_kernels.formats.fp4 import from_e2m1, from_e8m0

DTYPE = "U8"
"""The dtype of both tensors in safetensors files."""
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


def part(checkpoint, name: str, dtype, index: Index, device) -> jax.Array:
    """Part of a stack in a checkpoint on a device, expanded and rounded to `dtype`; ValueError if it holds NaN.

    Scales of 2**-127 count as 0, as in `from_e8m0`.
    """
    *stack, columns = index
    groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
    scales = checkpoint.read(f"{name}{SCALES}", (*stack, groups))
    if count := int((scales == NAN).sum()):
        raise checkpoint.error(f"{name}{SCALES}", f"holds {count} NaN of {scales.size} scales")
    blocks = checkpoint.read(f"{name}{BLOCKS}", (*stack, groups, slice(0, GROUP // 2)))
    inner = columns.start - groups.start * GROUP, columns.stop - groups.start * GROUP
    return _expanded(jax.device_put(blocks, device), jax.device_put(scales, device), dtype, inner)


@partial(jax.jit, static_argnums=(2, 3))
def _expanded(blocks, scales, dtype, inner: tuple[int, int]):
    values = from_e2m1(blocks.reshape(*scales.shape[:-1], -1), from_e8m0(scales))
    return values[..., slice(*inner)].astype(dtype)
