"""The order of NVFP4 scales in the pages of other libraries."""

import jax
from jax.typing import ArrayLike

from jaxkv.checks import Dims, static_bool

GROUP = 4
"""Tokens whose scales are mixed, and the parts into which the scales of a token are divided."""


def swizzle_scales(scales: ArrayLike, *, inverse: bool = False) -> jax.Array:
    """Permutes the scales of NVFP4 pages as kernels of TensorRT-LLM for Blackwell read them, or back.

    vLLM stores such scales (`swizzle_scale_offset` of csrc/nvfp4_kv_cache_kernels.cu, 2026): first of keys and values,
    later of values alone, and of neither on sm_120.  Scales of 4 tokens are a matrix [4, S]; its columns are divided
    into 4 parts, and the matrix [4 tokens, 4 parts, S / 4] is stored as [4 parts, S / 4, 4 tokens].

    A scale then lies in the row of another token, so that a cache cannot describe these pages.  `write_entries` stores
    what `Entry.pack` makes of values and of scales in order, in format `nvfp4`.

    Args:
      scales: float8_e4m3fn or uint8 [B, H, N, S], of the N tokens of each block and head.
      inverse: static; whether `scales` are permuted, and those in order are returned.

    Returns:
      An array of the same shape and dtype.

    Raises:
      ValueError: the dtype is another one, or N or S is not a multiple of 4.
    """
    scales = Dims().check("scales", scales, "B H N S", ("float8_e4m3fn", "uint8"))
    inverse = static_bool("inverse", inverse)
    blocks, heads, tokens, count = scales.shape
    if tokens % GROUP or count % GROUP:
        raise ValueError(f"`scales` has {tokens} tokens and {count} scales per token: expected multiples of {GROUP}")
    groups, part = tokens // GROUP, count // GROUP
    axes, order = ((GROUP, GROUP, part), (1, 2, 0)) if not inverse else ((GROUP, part, GROUP), (2, 0, 1))
    found = scales.reshape(blocks, heads, groups, *axes).transpose(0, 1, 2, *(3 + axis for axis in order))
    return found.reshape(scales.shape)
