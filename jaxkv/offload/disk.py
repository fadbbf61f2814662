"""Blocks in files: a pool that survives the process."""

import hashlib
import time
from collections.abc import Container
from pathlib import Path
from threading import Lock

import numpy as np

from jaxkv.arguments import positive_int, told
from jaxkv.offload.block_file import UNFINISHED, DamagedBlock, Description, read_block, write_block
from jaxkv.offload.rows import Layout, row_of

ABANDONED_SECONDS = 600
"""Nobody takes this long to write a block: an unfinished file that is older was left by a process that died."""


class DiskPool:
    """One file a block, in a folder of the model and the layout's fingerprint under `path`.

    Files of other models and layouts are not seen; one that is moved here by hand, or damaged, is refused when it is
    read.  Several processes may use a folder: each sees the files that were there when it opened it, and its own.

    Args:
      path: a folder; made where it is missing.
      layout: of the blocks.
      model: names the weights, and whatever else changes what a token stores.
      num_blocks: files at most, those least recently used go first; default as many as the disk holds.

    Raises:
      ValueError: `model` is no string or too long, `num_blocks` no positive int, `layout` no layout.
    """

    def __init__(self, path: str | Path, layout: Layout, *, model: str, num_blocks: int | None = None):
        if not isinstance(model, str):
            told_type = type(model).__name__
            raise ValueError(f"`model` is a {told_type}: expected a string, such as `jaxkv.models.fingerprint(model)`")
        self.layout, self.model = layout, model
        self.num_blocks = None if num_blocks is None else positive_int("num_blocks", num_blocks, below=None)
        self._row = row_of(layout)
        self._fingerprint = layout.fingerprint
        self._folder = Path(path) / f"{self._fingerprint}-{hashlib.sha256(model.encode()).hexdigest()[:16]}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        """Held while the order of keys changes: a HostPool writes from a thread of its own."""
        self._description(b"\0" * 32).check()
        self._keys = dict.fromkeys(self._opened())
        """Least recently used first."""

    def _opened(self) -> list[bytes]:
        """Keys of the files that are there, oldest first; abandoned files are removed."""
        found, now = [], time.time()
        for file in self._folder.iterdir():
            try:
                written = file.stat().st_mtime
                if file.name.endswith(UNFINISHED):
                    if now - written > ABANDONED_SECONDS:
                        file.unlink()
                elif file.suffix == ".block":
                    found.append((written, bytes.fromhex(file.stem)))
            except (FileNotFoundError, ValueError):
                continue  # another process took it away, or it is nothing of ours
        return [key for _, key in sorted(found)]

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self):
        return f"DiskPool({str(self._folder)!r}, {len(self)} blocks)"

    def __contains__(self, key: bytes) -> bool:
        with self._lock:  # whoever makes room has removed what it chose, or sees what is held by now
            return key in self._keys

    def file(self, key: bytes) -> Path:
        """Where the block of that key lies, or would lie."""
        return self._folder / f"{key.hex()}.block"

    def store(self, key: bytes, row: np.ndarray, *, held: Container[bytes] = ()) -> bool:
        """Writes a block, whole or not at all.

        Args:
          key: its name.
          row: [E] of the layout's dtype, a row of `read_blocks`.
          held: keys that must not go to make room.

        Returns:
          Whether the block is there now: not where all room is held.

        Raises:
          ValueError: `row` is no block of the layout.
          OSError: the disk is full, say; no other block is lost.
        """
        if (row.dtype, row.shape) != (self._row.dtype, self._row.shape):
            raise ValueError(f"`row` is {told(row)}: expected {told(self._row)}, a block of the layout")
        if key not in self and not self._make_room(held):
            return False
        write_block(self.file(key), self._description(key), row)
        with self._lock:
            self._keys.pop(key, None)
            self._keys[key] = None
        return True

    def load(self, key: bytes) -> np.ndarray:
        """A block, [E] of the layout's dtype, mapped into memory.

        Raises:
          KeyError: it is not there.
          DamagedBlock: its file is not what it should be; the pool forgets it, and leaves the file.
        """
        with self._lock:
            if key not in self._keys:
                raise KeyError(key.hex())
            self._keys[key] = self._keys.pop(key)  # used most recently
        try:
            return read_block(self.file(key), self._description(key)).view(self._row.dtype)
        except (DamagedBlock, FileNotFoundError) as error:
            with self._lock:
                self._keys.pop(key, None)
            if isinstance(error, FileNotFoundError):
                raise KeyError(key.hex()) from None
            raise

    def _make_room(self, held: Container[bytes]) -> bool:
        """Removes files until there is room for one more; whether there is."""
        while self.num_blocks is not None and len(self._keys) >= self.num_blocks:
            with self._lock:
                victim = next((key for key in self._keys if key not in held), None)
                if victim is None:
                    return False
                del self._keys[victim]
            self.file(victim).unlink(missing_ok=True)
        return True

    def _description(self, key: bytes) -> Description:
        return Description(str(self._row.dtype), self._fingerprint, self.model, key.hex())
