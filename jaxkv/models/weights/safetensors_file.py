"""One safetensors file, of which parts of weights can be read.

The `safetensors` library checks a file when it is opened.  Parts are read here, with plain reads: its NumPy interface
lacks float8, and it maps the file into memory, so that all pages read so far would count as the process's memory.
"""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

NUMPY = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
"""The dtypes that can be read, by their names in safetensors files."""
BAND_BYTES = 2**23
"""The most bytes of whole rows that are read at once, to take some columns of them."""

Index = tuple[slice, ...]
"""Part of an array: a slice with start and stop for each axis."""


class Entry(NamedTuple):
    """What the header of a file says of a weight."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """The place of its first byte in the file."""


class SafetensorsFile:
    """An open file; a context manager that closes it.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: the file cannot be read or is damaged.
    """

    def __init__(self, path: Path):
        _check(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        header.pop("__metadata__", None)
        self.entries = {
            name: Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exception):
        self._file.close()

    def read(self, name: str, index: Index) -> np.ndarray:
        """Part of a weight of a dtype in `NUMPY`, in its stored dtype; its first axis need not be read whole."""
        entry = self.entries[name]
        dtype, row_shape = np.dtype(NUMPY[entry.dtype]), entry.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        found = np.empty([part.stop - part.start for part in index], dtype)
        if tuple(found.shape[1:]) == row_shape:
            start = index[0].start if index else 0  # a scalar has no axes
            self._fill(found.reshape(-1).view(np.uint8), entry.start + start * row_bytes)
            return found
        rows, *columns = index
        band = max(BAND_BYTES // row_bytes, 1)
        held = np.empty((min(band, len(found)), *row_shape), dtype)
        for first in range(0, len(found), band):
            some = held[: len(found) - first]
            self._fill(some.reshape(-1).view(np.uint8), entry.start + (rows.start + first) * row_bytes)
            found[first : first + band] = some[:, *columns]
        return found

    def _fill(self, into: np.ndarray, start: int) -> None:
        """Reads bytes from `start` on until `into`, uint8 [n], is full."""
        view, done = memoryview(into), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if not count:
                raise ValueError(f"{self._file.name} has been truncated since it was opened")
            done += count


def _check(path: Path) -> None:
    """ValueError unless the header and the length of the file are right."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading weights needs safetensors: pip install 'jaxkv[models]'") from error
    try:
        with safe_open(path, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a safetensors file: {' '.join(str(error).split())}") from None
