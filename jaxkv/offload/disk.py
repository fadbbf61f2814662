"""`DiskPool`: blocks in files, which later processes can use."""

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
"""Suffixes of the files of blocks, and of damaged files."""
_OURS = re.compile(rf"((?:[0-9a-f]{{2}})+)({BLOCK}|{DAMAGED}|{BLOCK}\.[0-9a-f]{{8}}{UNFINISHED})")
"""Names of the pool's files: the key in hex and a suffix for the kind of file."""
ABANDONED_SECONDS = 600
"""An unfinished file that is older was left by a process that died: no write takes this long."""


class DiskPool:
    """One file per block, in a subfolder of `path` for the model, the layout's fingerprint and the secret.

    Files of other models, layouts, secrets and versions of the format are in other folders; such a file is ignored if
    it is moved here.  A damaged file raises DamagedBlock when it is read, and is kept under the name `KEY.damaged`.
    Other files in the folder are left alone, with a warning.  Several processes may use a folder.  Each sees the files
    that existed when it opened the folder, and those that it writes.

    Every file has a digest of its contents.  Without a secret, it is a checksum (CRC-32) that detects accidental
    damage: files that are truncated, overwritten or mixed up.  It does not detect attacks: anyone who can write to the
    folder can change what a model reads.  With a secret, it is a keyed hash (BLAKE2b), which cannot be computed without
    the secret.  A block whose digest is right was written, under its key, by a process that has the secret.  Neither
    digest hides what blocks contain or that they exist, and neither prevents others from removing files or from
    restoring an older file of the same key, layout, model and secret.

    Args:
      path: a folder, created if it is missing.
      layout: the layout of the cache, or the `PackedLayout` if the cache is a view of one of its groups.
      model: a name for the weights and everything else that changes what a token stores.
      num_blocks: the most files; there is one more while a block is written, and the least recently used are removed
        afterwards. Default: no limit.
      secret: 1 to 64 random bytes, such as `secrets.token_bytes(32)`, the same in all processes that share blocks.
        Default: none.

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
            found = type(model).__name__
            raise ValueError(f"`model` is a {found}: expected a string, such as `jaxkv.models.fingerprint(model)`")
        self.layout, self.model = layout, model
        self.num_blocks = None if num_blocks is None else positive_int("num_blocks", num_blocks, below=None)
        self._row = row_of(layout)
        self._fingerprint = layout.fingerprint
        self._secret, self._secret_id = secret, secret_id(secret)
        name = hashlib.sha256(json.dumps([VERSION, model, self._secret_id]).encode()).hexdigest()[:16]
        self._folder = Path(path) / f"{self._fingerprint}-{name}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        """Held while the order of keys changes, because a HostPool writes from a background thread."""
        self._description(b"\0" * 32).check()
        self._keys = dict.fromkeys(self._opened())
        """The keys of the blocks, least recently used first."""

    def _opened(self) -> list[bytes]:
        """Keys of the existing files, oldest first.  Abandoned files are removed."""
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
        with self._lock:  # evictions are either complete here, or see the new holds
            return key in self._keys

    def file(self, key: bytes) -> Path:
        """The path of the file for a key, whether it exists or not."""
        return self._folder / f"{key.hex()}{BLOCK}"

    def store(self, key: bytes, row: np.ndarray, *, held: Container[bytes] = ()) -> bool:
        """Writes a block atomically.  If the pool is over its limit, the least recently used blocks are then removed.

        Args:
          key: the key of the block.
          row: [E] of the layout's dtype, a row of `read_blocks`.
          held: keys that must not be removed to make room.

        Returns:
          Whether the block is stored: False if the pool is full of blocks in `held`.

        Raises:
          ValueError: `row` is not a block of the layout.
          OSError: the file cannot be written, for example because the disk is full; all earlier blocks are still there.
        """
        if (row.dtype, row.shape) != (self._row.dtype, self._row.shape):
            raise ValueError(f"`row` is {describe(row)}: expected {describe(self._row)}, a block of the layout")
        with self._lock:
            if self._victims(key, held) is None:
                return False
        write_block(self.file(key), self._description(key), row, self._secret)
        with self._lock:
            removed = self._victims(key, held)  # which blocks are held may have changed during the write
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
        """Reads a block into new memory: [E] of the layout's dtype.

        Raises:
          KeyError: there is no such block, or its file belongs to another pool; such a file is left alone.
          DamagedBlock: its file is damaged; the pool drops the block and keeps the file as `KEY.damaged`.
          OSError: its file cannot be read at present; the pool keeps the block.
        """
        with self._lock:
            if key not in self._keys:
                raise KeyError(key.hex())
            self._keys[key] = self._keys.pop(key)  # now the most recently used
        try:
            return read_block(self.file(key), self._description(key), self._row, self._secret)
        except (FileNotFoundError, ForeignBlock) as error:
            self._forget(key)
            raise KeyError(key.hex()) from error
        except DamagedBlock as error:
            fate = self._quarantine(key)
            self._forget(key)  # afterwards, the block may be stored again
            raise DamagedBlock(f"{error}; {fate}") from None

    def _quarantine(self, key: bytes) -> str:
        """Renames a damaged file, replacing an earlier one of the same key; returns the outcome for a message."""
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
        """Keys to remove when `key` is stored, least recently used first; None if too many blocks are held."""
        if self.num_blocks is None or key in self._keys:
            return []
        excess = max(len(self._keys) + 1 - self.num_blocks, 0)
        victims = list(islice((known for known in self._keys if known not in held), excess))
        return victims if len(victims) == excess else None

    def _description(self, key: bytes) -> Description:
        return Description(str(self._row.dtype), self._fingerprint, self.model, self._secret_id, key.hex())
