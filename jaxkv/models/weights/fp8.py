"""Weights in float8 with one scale per tile of 128 x 128, as DeepSeek publishes V3, R1, V3.1 and V3.2.

With a weight `NAME` [out, in] of dtype F8_E4M3 comes another, `NAME_scale_inv`, float32 [ceil(out / 128),
ceil(in / 128)].  A value is the stored number times the scale of its tile; despite the name, the scale is not inverted.
Source: `weight_dequant` in `inference/kernel.py` of https://huggingface.co/deepseek-ai/DeepSeek-V3.
Checkpoints of V4 have `PREFIX.scale` beside `PREFIX.weight`, with powers of two of dtype F8_E8M0.
"""

from jaxkv_kernels.tile_scaled import num_tiles

DTYPE = "F8_E4M3"
"""The dtype's name in safetensors files."""
SCALE_DTYPES = "F32", "F8_E8M0"
SUFFIX = "_scale_inv"


def scale_names(name: str) -> tuple[str, str]:
    """The names that the scales of a weight may have."""
    return f"{name}{SUFFIX}", f"{name.removesuffix('.weight')}.scale"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of shape [out, in]."""
    return tuple(map(num_tiles, shape))
