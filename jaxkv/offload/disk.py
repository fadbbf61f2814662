"""`DiskPool`: blocks in files, which later processes can use."""

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Lock

import numpy as np

from jaxkv.checks import describe, positive_int
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
from jaxkv.offload.keys import MAX_KEY_BYTES, checked_key
from jaxkv.offload.transfers import Layout, blocks_fingerprint, checked_parts, row_of

BLOCK, DAMAGED = ".block", ".damaged"
"""Suffixes of the files of blocks, and of damaged files."""
_OURS = re.compile(rf"((?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}})({BLOCK}|{DAMAGED}|{BLOCK}\.[0-9a-f]{{8}}{UNFINISHED})")
"""Names of the pool's files: the key in hex and a suffix for the kind of file."""
ABANDONED_SECONDS = 600
"""An unfinished file that is older was left by a process that died: no write takes this long."""
SCANNED_SHARE = 256
"""A pool lists its folder again when it has stored this fraction of its limit.

Listing takes about 4 us per file, hence 1 ms per store; writing a block of 4 MB takes about 10 ms.
"""


class DiskPool:
    """One file per block, in a subfolder of `path` for the model, the layout's fingerprint, the parts and the secret.

    Files of other models, layouts, parts, secrets and versions of the format are in other folders; such a file is
    ignored if it is moved here.  A damaged file raises DamagedBlock when it is read, and is kept under the name
    `KEY.damaged`.  Other files in the folder are left alone, with a warning.

    Several processes may use a folder, and remove each other's blocks: a block that another process has removed is
    missing.  Each sees the files that existed when it opened the folder, and those that it writes.  With `num_blocks`,
    it lists the folder again whenever it has stored `num_blocks` / 256 blocks, in small pools after every block, and
    then also sees the blocks of others.

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
      num_blocks: the most blocks in the folder, whichever process wrote them.  The least recently used are removed when
        the pool is opened, and after each block that it writes.  Until the folder is listed again, there may be up to
        `num_blocks` / 256 more per other process that writes; damaged files are not counted.  Default: no limit.
      devices: over how many devices blocks are divided (`model.cache_devices`).
      parts: the parts of a block that a file has, if the devices belong to several processes (`model.cache_parts`).
        Files with other parts are in another folder.  Default: the parts of all devices.
      secret: 1 to 64 random bytes, such as `secrets.token_bytes(32)`, the same in all processes that share blocks.
        Default: none.

    Raises:
      ValueError: `model` is not a string or is too long, `num_blocks` is not a positive int, `layout` is not a layout
        or is one of context parallelism over other than `devices`, `parts` are not some of the parts, or `secret` is
        not 1 to 64 bytes.
      OSError: the folder cannot be made or read, or blocks beyond `num_blocks` cannot be removed.
    """

    def __init__(
        self,
        path: str | Path,
        layout: Layout,
        *,
        model: str,
        num_blocks: int | None = None,
        devices: int = 1,
        parts: Sequence[int] | None = None,
        secret: bytes | None = None,
    ):
        if not isinstance(model, str):
            found = type(model).__name__
            raise ValueError(f"`model` is a {found}: expected a string, such as `jaxkv.models.fingerprint(model)`")
        self.layout, self.model, self.devices = layout, model, devices
        self.num_blocks = None if num_blocks is None else positive_int("num_blocks", num_blocks, below=None)
        self.parts = checked_parts(parts, devices)
        self._row = row_of(layout, devices, self.parts)
        self._fingerprint = blocks_fingerprint(layout, devices, self.parts)
        self._secret, self._secret_id = secret, secret_id(secret)
        name = hashlib.sha256(json.dumps([VERSION, model, self._secret_id]).encode()).hexdigest()[:16]
        self._folder = Path(path) / f"{self._fingerprint}-{name}"
        self._description(b"\0" * MAX_KEY_BYTES).check()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        """Held while the order of keys changes, because a HostPool writes from a background thread."""
        found, others = self._files()
        if others:
            warnings.warn(
                f"{self._folder} holds {len(others)} entries that are not files of this pool, which are left alone, "
                f"such as {min(others)!r}",
                stacklevel=2,
            )
        self._keys = dict.fromkeys(sorted(found, key=lambda key: (found[key], key)))
        """The keys of the blocks, least recently used first."""
        self._written = 0
        """The number of blocks that were written since the folder was listed."""
        for key in [] if self.num_blocks is None else list(self._keys)[: -self.num_blocks]:
            del self._keys[key]
            self._remove(key)

    def _files(self, known: Container[bytes] = ()) -> tuple[dict[bytes, float], list[str]]:
        """Lists the folder, and removes abandoned files.

        Returns:
          The keys of blocks, with the times when they were used last (0 for `known` keys, for which it is not read);
          and the names of entries that are not files of the pool.
        """
        found, others, now = {}, [], time.time()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                ours = _OURS.fullmatch(entry.name)
                try:
                    if ours is None or not entry.is_file(follow_symlinks=False):
                        others.append(entry.name)
                        continue
                    key, ending = bytes.fromhex(ours[1]), ours[2]
                    if ending == BLOCK:
                        found[key] = 0.0 if key in known else _modified(entry)
                    elif ending.endswith(UNFINISHED) and now - _modified(entry) > ABANDONED_SECONDS:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # another process removed it
                except OSError:
                    others.append(entry.name)
        return found, others

    def _list_again(self) -> None:
        """Adds the blocks that other processes have written, as the most recently used, and drops the missing ones."""
        with self._lock:
            known, self._written = set(self._keys), 0
        found, _ = self._files(known)
        with self._lock:  # blocks that came or went in the meantime are already right
            for key in known.difference(found):
                self._keys.pop(key, None)
            for key in sorted(found.keys() - known, key=lambda key: (found[key], key)):
                self._keys.setdefault(key)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self):
        return f"DiskPool({str(self._folder)!r}, {len(self)} blocks)"

    def __contains__(self, key: bytes) -> bool:
        """Whether the pool lists the block.  ValueError if `key` cannot be a key."""
        checked_key("key", key)
        with self._lock:  # evictions are either complete here, or see the new holds
            return key in self._keys

    def file(self, key: bytes) -> Path:
        """The path of the file for a key, whether it exists or not.  ValueError if `key` cannot be a key."""
        return self._folder / f"{checked_key('key', key).hex()}{BLOCK}"

    def store(self, key: bytes, row: np.ndarray, *, held: Container[bytes] = ()) -> bool:
        """Writes a block atomically.  If the folder is over its limit, the least recently used are then removed.

        Args:
          key: the key of the block, 1 to 64 bytes.
          row: [E] of the layout's dtype, a row of `read_blocks`.
          held: keys that must not be removed to make room.

        Returns:
          Whether the block is stored: False if the pool is full of blocks in `held`.

        Raises:
          ValueError: `row` is not a block of the layout, or `key` is not 1 to 64 bytes.
          OSError: the file cannot be written, for example because the disk is full; all earlier blocks are still there.
            Or the folder cannot be listed, or a block cannot be removed from it; then the file is written.
        """
        file = self.file(key)
        if (getattr(row, "dtype", None), getattr(row, "shape", None)) != (self._row.dtype, self._row.shape):
            raise ValueError(f"`row` is {describe(row)}: expected {describe(self._row)}, a block of the layout")
        with self._lock:
            new = key not in self._keys
            if key in self._victims(key, held, new):
                return False
        write_block(file, self._description(key), row, self._secret)
        with self._lock:
            self._written += 1
            due = self.num_blocks is not None and self._written * SCANNED_SHARE >= self.num_blocks
        if due:
            self._list_again()
        with self._lock:
            victims = self._victims(key, held, new)  # which blocks are held may have changed during the write
            for moved in (key, *victims):
                self._keys.pop(moved, None)
            if stored := key not in victims:
                self._keys[key] = None
        for victim in victims:
            self._remove(victim)
        return stored

    def load(self, key: bytes) -> np.ndarray:
        """Reads a block into new memory: [E] of the layout's dtype.

        Raises:
          ValueError: `key` is not 1 to 64 bytes.
          KeyError: there is no such block, or its file belongs to another pool; such a file is left alone.
          DamagedBlock: its file is damaged; the pool drops the block and keeps the file as `KEY.damaged`.
          OSError: its file cannot be read at present; the pool keeps the block.
        """
        file = self.file(key)
        with self._lock:
            if key not in self._keys:
                raise KeyError(key.hex())
            self._keys[key] = self._keys.pop(key)  # now the most recently used
        try:
            row = read_block(file, self._description(key), self._row, self._secret)
        except (FileNotFoundError, ForeignBlock) as error:
            self._forget(key)
            raise KeyError(key.hex()) from error
        except DamagedBlock as error:
            fate = self._quarantine(key)
            self._forget(key)  # afterwards, the block may be stored again
            raise DamagedBlock(f"{error}; {fate}") from None
        with suppress(OSError):  # the folder may be read-only
            os.utime(file, follow_symlinks=False)  # for those that open the folder later
        return row

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

    def _remove(self, key: bytes) -> None:
        """Removes the file of a key that is not listed any more, unless another process has removed it."""
        self.file(key).unlink(missing_ok=True)

    def _victims(self, key: bytes, held: Container[bytes], new: bool) -> list[bytes]:
        """Keys to remove when `key` is stored, least recently used first.

        `key` is among them, if it is `new`, when too many of the other blocks are held.
        """
        if self.num_blocks is None:
            return []
        excess = len(self._keys) + (key not in self._keys) - self.num_blocks
        others = (known for known in self._keys if known not in held and known != key)
        victims = list(islice(others, max(excess, 0)))
        return [*victims, key] if new and len(victims) < excess else victims

    def _description(self, key: bytes) -> Description:
        return Description(str(self._row.dtype), self._fingerprint, self.model, self._secret_id, key.hex())


def _modified(entry: os.DirEntry) -> float:
    return entry.stat(follow_symlinks=False).st_mtime
