"""The safetensors files of a checkpoint: one, or shards with an index."""

import json
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np


class Checkpoint:
    """Weights by name; a context manager that keeps the files open."""

    def __init__(self, path):
        self._path = Path(path)
        index = self._path / "model.safetensors.index.json"
        if index.is_file():
            self._files: dict[str, str] | None = json.loads(index.read_text())["weight_map"]
        elif (self._path / "model.safetensors").is_file():
            self._files = None
        else:
            raise ValueError(f"`path` is {str(path)!r}: expected model.safetensors, or {index.name} and its shards")

    def __enter__(self) -> "Checkpoint":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("reading weights needs safetensors: pip install 'jaxkv[models]'") from error
        self._stack = ExitStack()
        names = {"model.safetensors"} if self._files is None else set(self._files.values())
        missing = sorted(name for name in names if not (self._path / name).is_file())
        if missing:
            raise ValueError(f"`path` is {str(self._path)!r}: the index names {', '.join(missing)}, not found there")
        opened = {name: self._stack.enter_context(safe_open(self._path / name, "numpy")) for name in sorted(names)}
        self._of = {key: file for file in opened.values() for key in file.keys()}  # noqa: SIM118  (no mapping)
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """ValueError unless every weight is there in the given shape and a plain float dtype."""
        missing = [name for name in shapes if name not in self._of]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(
                f"{self._path} lacks {len(missing)} of {len(shapes)} weights: {', '.join(missing[:3])}{more}"
            )
        for name, shape in shapes.items():
            piece = self._of[name].get_slice(name)
            if tuple(piece.get_shape()) != shape:
                raise ValueError(f"weight {name} has shape {tuple(piece.get_shape())}: config.json tells {shape}")
            if piece.get_dtype() not in ("BF16", "F16", "F32"):
                raise ValueError(f"weight {name} has dtype {piece.get_dtype()}: expected BF16, F16 or F32")

    def read(self, name: str) -> np.ndarray:
        """A weight as it is stored; ValueError if it holds NaN."""
        weight = self._of[name].get_tensor(name)
        if np.isnan(weight).any():
            raise ValueError(f"weight {name} holds {np.isnan(weight).sum()} NaN of {weight.size} values")
        return weight
