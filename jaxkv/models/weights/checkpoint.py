"""The safetensors files of a checkpoint: a single file, or shards with an index."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np

from jaxkv.models.json_object import JsonObject
from jaxkv.models.weights import fp8, mxfp4
from jaxkv.models.weights.safetensors_file import Entry, Index, SafetensorsFile
from jaxkv.models.weights.weight import Weight
from jaxkv_kernels.tile_scaled import TILE

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("BF16", "F16", "F32")
INTEGERS = ("I32", "I64")


class Checkpoint:
    """Weights by name; a context manager that keeps the files open.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: a file is missing, damaged, or outside the folder; or a weight does not have the expected shape or
        dtype.  The message is one line that names the file.
    """

    def __init__(self, path):
        self._folder = Path(path)
        self._index = self._folder / INDEX
        self._file_of: dict[str, str] = {}
        """The file of each weight, from the index if there is one."""
        self._stored: dict[str, str] = {}
        """The names in the files of weights that `rename` has given others."""
        whole = os.path.isfile(self._folder / WHOLE)
        if os.path.isfile(self._index):
            self._file_of = _weight_map(self._index)
            self._file_names = sorted(set(self._file_of.values()))
            if whole and WHOLE not in self._file_names:
                raise ValueError(f"{self._folder} has {WHOLE}, and {INDEX}, which does not name it: remove one of them")
        elif whole:
            self._file_names = [WHOLE]
        else:
            raise ValueError(f"`path` is {str(path)!r}: expected {WHOLE}, or {INDEX} and its shards")

    def __enter__(self) -> "Checkpoint":
        with ExitStack() as stack:
            self._files = {name: stack.enter_context(SafetensorsFile(self._folder / name)) for name in self._file_names}
            self._held = {name: set(file.entries) for name, file in self._files.items()}
            self._stack = stack.pop_all()
        self._file_of = self._file_of or dict.fromkeys(self._held[WHOLE], WHOLE)
        return self

    def __exit__(self, *exception):
        self._stack.close()

    @property
    def _source(self) -> Path:
        """The file that says which weights there are."""
        return self._index if os.path.isfile(self._index) else self._folder / WHOLE

    @property
    def names(self) -> set[str]:
        """The names of all weights in the index and the files."""
        return set(self._file_of).union(*self._held.values())

    def rename(self, spellings: Mapping[str, str]) -> None:
        """Gives weights the names that `spellings` has for those in the files, which errors continue to name.

        ValueError if two weights would have the same name.
        """
        renamed: dict[str, str] = {}
        for name in sorted(self.names):
            other = renamed.setdefault(spellings.get(name, name), name)
            if other != name:
                raise ValueError(f"{self._source} has the same weight as {other!r} and {name!r}: expected one of them")
        self._stored = {new: name for name, new in spellings.items()}
        self._file_of = {spellings.get(name, name): file for name, file in self._file_of.items()}
        for held, file in self._files.items():
            file.entries = {spellings.get(name, name): entry for name, entry in file.entries.items()}
            self._held[held] = set(file.entries)

    def check_names(self, names: Iterable[str]) -> None:
        """ValueError unless the files have weights of these names; stops after the first few that are missing."""
        missing = list(islice((name for name in names if not self._file_of.keys() & {name, *_mxfp4(name)}), 4))
        if missing:
            raise ValueError(f"{self._source} lacks weights that the model of config.json has: {self._listed(missing)}")

    def check(self, weights: Sequence[Weight], unused: Iterable[str]) -> None:
        """ValueError unless the files have exactly the weights `weights` and, if present, `unused`.

        Each of `weights` must have its shape, and a plain float dtype, float8 with scales (see `fp8.py`) or, if it is
        of experts, MXFP4 (see `mxfp4.py`).
        """
        expected = {name: weight for weight in weights for name in weight.all_names()}
        packed = {name for name, weight in expected.items() if weight.swapped and self.is_mxfp4(name)}
        plain = {name: weight for name, weight in expected.items() if name not in packed}
        scaled = (name for name in plain if self.is_fp8(name) or self.is_fp4(name))
        scales = {self.scales_of(name) for name in scaled}
        known = {*plain, *unused, *scales, *(part for name in packed for part in _mxfp4(name))}
        unknown = sorted(self.names - known)
        if unknown:
            holders = (name for name, held in self._held.items() if unknown[0] in held)
            source = self._folder / next(holders, INDEX)
            raise ValueError(
                f"{source} has weights that the model of config.json does not have: {self._listed(unknown)}"
            )
        for name, weight in plain.items():
            self._check_one(name, weight)
        for name in packed:
            self._check_mxfp4(name, expected[name].tensor_shape)

    def _check_one(self, name: str, weight: Weight) -> None:
        shape = weight.tensor_shape
        if not self.holds(name):
            raise ValueError(f"{self.file_of(name)} lacks the weight {self._shown(name)}, which {INDEX} expects there")
        entry = self._entry(name)
        if self.is_fp4(name) and weight.experts:
            self._check_fp4(name, shape)
            return
        if entry.shape != shape:
            raise self.error(name, f"has shape {entry.shape}: expected {shape}, from config.json")
        if entry.dtype in (INTEGERS if weight.below else DTYPES):
            return
        if weight.below:
            raise self.error(name, f"has dtype {entry.dtype}: expected {' or '.join(INTEGERS)}")
        if entry.dtype != fp8.DTYPE or len(shape) != 2:
            raise self.error(name, f"has dtype {entry.dtype}: expected BF16, F16 or F32, or F8_E4M3 for a matrix")
        # Other shapes belong to tiles of other sizes.
        tiles = f"a scale per tile of {TILE} x {TILE} values"
        self._check_scales(name, fp8.SCALE_DTYPES, fp8.scale_shape(shape), tiles)

    def _check_scales(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], what: str) -> None:
        scales, dtype = self.scales_of(name), self._entry(name).dtype
        if not self.holds(scales):
            raise self.error(name, f"has dtype {dtype}, but its scales {self._shown(scales)} are missing")
        entry = self._entry(scales)
        if entry.dtype not in dtypes or entry.shape != shape:
            raise self.error(scales, f"is {entry.dtype} {entry.shape}: expected {' or '.join(dtypes)} {shape}, {what}")

    def _check_fp4(self, name: str, shape: tuple[int, ...]) -> None:
        entry, (packed, scales) = self._entry(name), mxfp4.expert_shapes(shape)
        if entry.shape != packed or shape[1] % mxfp4.GROUP:
            raise self.error(
                name,
                f"is {entry.dtype} {entry.shape}: expected BF16, F16 or F32 {shape}, from config.json, or "
                f"{' or '.join(mxfp4.VALUE_DTYPES)} {packed} with two values per byte, in rows of whole groups of "
                f"{mxfp4.GROUP}",
            )
        self._check_scales(name, mxfp4.SCALE_DTYPES, scales, f"a scale per {mxfp4.GROUP} values of a row")

    def _check_mxfp4(self, name: str, shape: tuple[int, ...]) -> None:
        experts, columns, rows = shape
        for suffix, expected in mxfp4.shapes((experts, rows, columns)).items():
            part = f"{name}{suffix}"
            if not self.holds(part):
                raise ValueError(
                    f"{self.file_of(part)} lacks the weight {self._shown(part)}, a part of {self._shown(name)} in MXFP4"
                )
            entry, dtypes = self._entry(part), mxfp4.SCALE_DTYPES if suffix == mxfp4.SCALES else mxfp4.VALUE_DTYPES
            if entry.dtype not in dtypes or entry.shape != expected or columns % mxfp4.GROUP:
                raise self.error(
                    part,
                    f"is {entry.dtype} {entry.shape}: expected {' or '.join(dtypes)} {expected}, from config.json, for "
                    f"rows of whole groups of {mxfp4.GROUP} values",
                )

    def holds(self, name: str) -> bool:
        """Whether the file that should have a weight has it."""
        return name in self._held.get(self._file_of.get(name, ""), ())

    def _entry(self, name: str) -> Entry:
        return self._files[self._file_of[name]].entries[name]

    def is_fp8(self, name: str) -> bool:
        """Whether a weight is in float8."""
        return self.holds(name) and self._entry(name).dtype == fp8.DTYPE

    def are_fp8_or_fp4(self, names: Iterable[str]) -> bool:
        """Whether weights are all in float8, or each that of one expert in MXFP4."""
        return all(self.is_fp8(name) or self.is_fp4(name) for name in names)

    def is_fp4(self, name: str) -> bool:
        """Whether the weight of one expert is in MXFP4."""
        return self.holds(name) and self._entry(name).dtype in mxfp4.VALUE_DTYPES

    def scales_of(self, name: str) -> str:
        """The name of the scales of a weight in float8 or FP4; the first possible one if they are missing."""
        names = fp8.scale_names(name)
        return next(filter(self.holds, names), names[0])

    def is_mxfp4(self, name: str) -> bool:
        """Whether the weight of a stack of experts is in MXFP4."""
        return not self.holds(name) and any(map(self.holds, _mxfp4(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """The dtype of a weight, as safetensors files name it."""
        return self._entry(name).dtype

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads part of a weight, in its stored dtype."""
        return self._files[self._file_of[name]].read(name, index)

    def error(self, name: str, problem: str) -> ValueError:
        """A ValueError for the weight `name`; the message names its file and then states the problem."""
        return ValueError(f"{self.file_of(name)}: weight {self._shown(name)} {problem}")

    def file_of(self, name: str) -> Path:
        """The file of a weight, or the index if that does not name the weight."""
        return self._folder / self._file_of.get(name, INDEX)

    def _shown(self, name: str) -> str:
        """The name of a weight for a message: that in the files."""
        return repr(self._stored.get(name, name))

    def _listed(self, names: list[str]) -> str:
        return ", ".join(map(self._shown, names[:3])) + (", and more" if len(names) > 3 else "")


def _mxfp4(name: str) -> list[str]:
    """The names of the parts of a weight in MXFP4."""
    return [f"{name}{suffix}" for suffix in mxfp4.SUFFIXES]


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each weight.

    The index may only name files in its own folder.  These may be symbolic links, as in the cache of the Hugging Face
    Hub.
    """
    weight_map = JsonObject.read(index).child("weight_map")
    found = {}
    for weight, name in weight_map.items():
        if not isinstance(name, str) or Path(name).anchor or ".." in Path(name).parts:
            raise weight_map.error(weight, "the name of a file in the folder of the index")
        if not os.path.isfile(index.parent / name):  # also False for a name that no file can have
            raise weight_map.error(weight, f"a file in {index.parent}, but there is none of that name")
        found[weight] = name
    if not found:
        raise ValueError(f"{index}: `weight_map` is empty: expected the file of each weight")
    return found
