"""Blocks in files: a pool that survives the process."""

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Container
from itertools import islice
from pathlib import Path
from threading import Lock

import numpy as np

from jaxkv.dispatch.validate import describe, positive_int
from jaxkv.offload.block_file import (
    UNFINISHED,
    VERSION,
    DamagedBlock,
    Description,
    ForeignBlock,
    read_block,
    secret_id,
    write_block,
)
from jaxkv.offload.rows import Layout, row_of

BLOCK, DAMAGED = ".block", ".damaged"
"""How names of files end: the blocks', and those of files that were refused."""
_OURS = re.compile(rf"((?:[0-9a-f]{{2}})+)({BLOCK}|{DAMAGED}|{BLOCK}\.[0-9a-f]{{8}}{UNFINISHED})")
"""Names of the pool's files: the key in hex, and what it is."""
ABANDONED_SECONDS = 600
"""No block takes this long to write: an unfinished file that is older was left by a process that died."""


class DiskPool:
    """One file per block, in a folder of the model, the layout's fingerprint and the secret under `path`.

    Files of other models, layouts, secrets and versions of the format are in other folders; one that is moved here by
    hand is not found.  A file that is damaged is refused when it is read, and kept under the name `KEY.damaged`.  What
    else is in the folder is left alone, with a warning.  Several processes may use a folder: each sees the files that
    were there when it opened it, and its own.

    Every file has a digest of its contents.  Without a secret this is a checksum, CRC-32, which protects against
    accidents: files that are truncated, overwritten or mixed up.  It does not protect against people, who can compute
    it for any contents: whoever can write to the folder can change what a model reads.  With a secret it is a keyed
    hash, BLAKE2b, which nobody can compute without the secret: blocks are as they were written, under this key, by
    somebody who has it.  Neither hides what blocks contain, nor that they are there; neither keeps others from removing
    files, or from putting an older file of the same key, layout, model and secret back in its place.

    Args:
      path: a folder; made where it is missing.
      layout: of the blocks.
      model: names the weights, and whatever else changes what a token stores.
      num_blocks: files at most, and one more while a block is written: those least recently used are removed after it.
        Default as many as the disk holds.
      secret: 1 to 64 bytes, random ones such as `secrets.token_bytes(32)`, the same in all processes that share blocks.
        Default none.

    Raises:
      ValueError: `model` is not a string or is too long, `num_blocks` is not a positive int, `layout` is not a layout,
        or `secret` is not 1 to 64 bytes.
      OSError: the folder cannot be made or read.
    """

    def __init__(
        self,
        path: str | Path,
        layout: Layout,
        *,
        model: str,
        num_blocks: int | None = None,
        secret: bytes | None = None,
    ):
        if not isinstance(model, str):
            told_type = type(model).__name__
            raise ValueError(f"`model` is a {told_type}: expected a string, such as `jaxkv.models.fingerprint(model)`")
        self.layout, self.model = layout, model
        self.num_blocks = None if num_blocks is None else positive_int("num_blocks", num_blocks, below=None)
        self._row = row_of(layout)
        self._fingerprint = layout.fingerprint
        self._secret, self._secret_id = secret, secret_id(secret)
        name = hashlib.sha256(json.dumps([VERSION, model, self._secret_id]).encode()).hexdigest()[:16]
        self._folder = Path(path) / f"{self._fingerprint}-{name}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        """Held while the order of keys changes: a HostPool writes from a thread of its own."""
        self._description(b"\0" * 32).check()
        self._keys = dict.fromkeys(self._opened())
        """Least recently used first."""

    def _opened(self) -> list[bytes]:
        """Keys of the files that are there, oldest first; abandoned files are removed."""
        found, skipped, now = [], [], time.time()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                ours = _OURS.fullmatch(entry.name)
                try:
                    if ours is None or not entry.is_file(follow_symlinks=False):
                        skipped.append(entry.name)
                        continue
                    (key, ending), written = ours.groups(), entry.stat(follow_symlinks=False).st_mtime
                    if ending == BLOCK:
                        found.append((written, bytes.fromhex(key)))
                    elif ending.endswith(UNFINISHED) and now - written > ABANDONED_SECONDS:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # another process removed it
                except OSError:
                    skipped.append(entry.name)
        if skipped:
            warnings.warn(
                f"{self._folder} holds {len(skipped)} entries that are not files of this pool, which are left alone, "
                f"such as {min(skipped)!r}",
                stacklevel=3,
            )
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
        return self._folder / f"{key.hex()}{BLOCK}"

    def store(self, key: bytes, row: np.ndarray, *, held: Container[bytes] = ()) -> bool:
        """Writes a block, whole or not at all; where room is short, others are removed once it is there.

        Args:
          key: its name.
          row: [E] of the layout's dtype, a row of `read_blocks`.
          held: keys that must not be removed to make room.

        Returns:
          Whether the block is there now: not where all room is held.

        Raises:
          ValueError: `row` is not a block of the layout.
          OSError: the disk is full, for example; every block that was there still is.
        """
        if (row.dtype, row.shape) != (self._row.dtype, self._row.shape):
            raise ValueError(f"`row` is {describe(row)}: expected {describe(self._row)}, a block of the layout")
        with self._lock:
            if self._victims(key, held) is None:
                return False
        write_block(self.file(key), self._description(key), row, self._secret)
        with self._lock:
            removed = self._victims(key, held)  # others may be held by now
            stored = removed is not None
            if stored:
                for victim in removed:
                    del self._keys[victim]
                self._keys.pop(key, None)
                self._keys[key] = None
        for unlisted in removed if stored else [key]:
            self.file(unlisted).unlink(missing_ok=True)
        return stored

    def load(self, key: bytes) -> np.ndarray:
        """A block, [E] of the layout's dtype, in memory of its own.

        Raises:
          KeyError: it is not there, or its file is of another pool; such a file is left where it is.
          DamagedBlock: its file is not what it should be; the pool forgets it, and keeps it as `KEY.damaged`.
          OSError: its file cannot be read now; the pool does not forget it.
        """
        with self._lock:
            if key not in self._keys:
                raise KeyError(key.hex())
            self._keys[key] = self._keys.pop(key)  # used most recently
        try:
            return read_block(self.file(key), self._description(key), self._row, self._secret)
        except (FileNotFoundError, ForeignBlock) as error:
            self._forget(key)
            raise KeyError(key.hex()) from error
        except DamagedBlock as error:
            fate = self._quarantine(key)
            self._forget(key)  # from then on it may be written again
            raise DamagedBlock(f"{error}; {fate}") from None

    def _quarantine(self, key: bytes) -> str:
        """Renames a file that is damaged; what became of it.  A file of the same key that was refused before goes."""
        kept = self.file(key).with_suffix(DAMAGED)
        try:
            os.replace(self.file(key), kept)
        except OSError as error:
            return f"it cannot be renamed to {kept.name}: {error}"
        return f"it is kept as {kept.name}"

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._keys.pop(key, None)

    def _victims(self, key: bytes, held: Container[bytes]) -> list[bytes] | None:
        """Keys to remove where `key` is stored, least recently used first; None where too many of them are held."""
        if self.num_blocks is None or key in self._keys:
            return []
        excess = max(len(self._keys) + 1 - self.num_blocks, 0)
        victims = list(islice((known for known in self._keys if known not in held), excess))
        return victims if len(victims) == excess else None

    def _description(self, key: bytes) -> Description:
        return Description(str(self._row.dtype), self._fingerprint, self.model, self._secret_id, key.hex())
