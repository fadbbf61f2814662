"""Weights in float8 with one scale per tile of 128 x 128, as DeepSeek publishes V3, R1, V3.1 and V3.2.

With a weight `NAME` [out, in] of dtype F8_E4M3 comes another, `NAME_scale_inv` [ceil(out / 128), ceil(in / 128)], in
float32, or in bfloat16 in the FP8 checkpoints of Qwen.  A value is the stored number times the scale of its tile, in
float32; despite the name, the scale is not inverted.
Source: `weight_dequant` in `inference/kernel.py` of https://huggingface.co/deepseek-ai/DeepSeek-V3.
compressed-tensors calls the scales `NAME_scale`.  Checkpoints of V4 have `PREFIX.scale` beside `PREFIX.weight`, with
powers of two of dtype F8_E8M0.

Weights that are only multiplied stay in float8 (`jaxkv.TileScaled`).  On Hopper, kernels convert them in registers:
experts in `jaxkv.grouped_swiglu`, and dense products of up to 256 tokens in `jaxkv.scaled_linear`.  For more tokens,
XLA expands a dense weight before its product.
"""

from collections.abc import Iterable

from jaxkv.models.weights.safetensors_file import Index
from jaxkv.models.weights.weight import Weight
from jaxkv_kernels.tile_scaled import TILE, num_tiles

DTYPE = "F8_E4M3"
"""The dtype's name in safetensors files."""
SCALE_DTYPES = "F32", "BF16", "F16", "F8_E8M0"
SUFFIXES = "_scale_inv", "_scale"
USES = ("dequantise", "e4m3", "expand")
"""What `load` does with weights in float8."""


def check_use(use: str) -> None:
    """ValueError unless the argument `fp8_weights` is one of `USES`."""
    if use not in USES:
        raise ValueError(f"`fp8_weights` is {use!r}: expected {' or '.join(map(repr, USES))}")


def scale_names(name: str) -> tuple[str, str, str]:
    """The names that the scales of a weight may have."""
    inverse, plain = SUFFIXES
    return f"{name}{inverse}", f"{name}{plain}", f"{name.removesuffix('.weight')}.scale"


def without_suffix(name: str) -> str:
    """The name of the weight whose scales are `name`, if it ends as these do."""
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of shape [out, in]."""
    return tuple(map(num_tiles, shape))


def check_parts(weight: Weight, indices: Iterable[Index]) -> None:
    """ValueError unless the parts of a weight that stays in float8, one per device, consist of whole tiles."""
    for index in indices:
        for cut, size in zip(index[-2:], weight.shape, strict=True):
            if cut.start % TILE or (cut.stop % TILE and cut.stop != size):
                raise ValueError(
                    f"`parallel` divides the weight {weight.name!r} {weight.shape}, which is in float8, into parts "
                    f"of {cut.stop - cut.start} rows or columns, which cuts its tiles of {TILE} x {TILE}: expected "
                    'parts of whole tiles (use fewer devices), or `fp8_weights` "expand"'
                )
