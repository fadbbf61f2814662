"""Weights in float8 with one scale per tile of 128 x 128, as DeepSeek publishes V3, R1, V3.1 and V3.2.

With a weight `NAME` [out, in] of dtype F8_E4M3 comes another, `NAME_scale_inv`, float32 [ceil(out / 128),
ceil(in / 128)].  A value is the stored number times the scale of its tile; despite the name, the scale is not inverted.
Source: `weight_dequant` in `inference/kernel.py` of https://huggingface.co/deepseek-ai/DeepSeek-V3.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPE = "F8_E4M3"
"""The dtype's name in safetensors files."""
TILE = 128
SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of shape [out, in]."""
    return tuple(-(-size // TILE) for size in shape)


def dequantised(weight: np.ndarray, scales: np.ndarray, dtype) -> np.ndarray:
    """The values of a weight [out, in]: products in float32, rounded once to `dtype`.

    Multiplies one row of tiles at a time, to avoid a float32 copy of the whole weight.
    """
    values = np.empty(weight.shape, dtype)
    columns = np.repeat(scales.astype(np.float32), TILE, axis=1)[:, : weight.shape[1]]
    for tile, row in enumerate(range(0, len(weight), TILE)):
        rows = slice(row, row + TILE)
        values[rows] = (weight[rows].astype(np.float32) * columns[tile]).astype(dtype)
    return values


class Float8File:
    """The float8 weights of a safetensors file, whose library for NumPy lacks this dtype.

    The file is mapped, and its header is parsed once.  `safetensors` has checked both before.
    """

    def __init__(self, file: Path):
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            self._entries = json.loads(opened.read(length))
        self._data = np.memmap(file, np.uint8, "r", offset=8 + length)

    def read(self, name: str) -> np.ndarray:
        """A weight of dtype F8_E4M3."""
        entry = self._entries[name]
        stored = self._data[slice(*entry["data_offsets"])]
        return stored.view(ml_dtypes.float8_e4m3fn).reshape(entry["shape"])
