"""A block in a file: its bytes, what they are, and a checksum over both.

Little-endian.  A page of 4096 bytes: magic (8 bytes), version (uint32), CRC-32 of all that follows (uint32), bytes of
the description (uint32), bytes of the block (uint64), the description in JSON, zeros.  Then the block.
"""

import json
import os
import secrets
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

MAGIC = b"jaxkvblk"
VERSION = 1
HEADER_BYTES = 4096
"""The block begins at a page of memory, whatever its description."""

_FIXED = struct.Struct("<8sI")
_CHECKED = struct.Struct("<IQ")
_CHECKED_FROM = _FIXED.size + 4
"""Where the bytes begin that the checksum covers: after itself."""


class DamagedBlock(ValueError):
    """A file that is refused: the message says which, and what is wrong with it."""


@dataclass(frozen=True)
class Description:
    """What a block is: blocks of equal descriptions are interchangeable."""

    dtype: str
    fingerprint: str
    """Of the layout."""
    model: str
    key: str
    """In hex."""

    def check(self) -> None:
        """ValueError where it is too long for a header."""
        _header(self, memoryview(b""))


def write_block(path: Path, description: Description, row: np.ndarray) -> None:
    """Writes a file that is there whole or not at all, whenever the process or the machine stops.

    Args:
      path: the file; replaced where it exists.
      description: what `row` is.
      row: [E] of any dtype.

    Raises:
      OSError: the disk is full, say; nothing of the file is left.
    """
    payload = memoryview(np.ascontiguousarray(row).view(np.uint8)).cast("B")
    header = _header(description, payload)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(unfinished, "wb") as file:
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


UNFINISHED = ".unfinished"
"""How the name of a file ends that is being written."""


def _header(description: Description, payload: memoryview) -> bytes:
    told = json.dumps(asdict(description)).encode()
    checked = (_CHECKED.pack(len(told), len(payload)) + told).ljust(HEADER_BYTES - _CHECKED_FROM, b"\0")
    if len(checked) > HEADER_BYTES - _CHECKED_FROM:
        raise ValueError(f"the description of a block takes {len(told)} bytes, which is too long: shorten `model`")
    checksum = zlib.crc32(payload, zlib.crc32(checked))
    return _FIXED.pack(MAGIC, VERSION) + struct.pack("<I", checksum) + checked


def read_block(path: Path, expected: Description) -> np.ndarray:
    """The block of a file, mapped into memory, uint8 [E], after all of it has been checked.

    Raises:
      DamagedBlock: the file is no block, cut off, altered, or another block than `expected`.
      FileNotFoundError: there is no such file.
    """
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise DamagedBlock(f"{path} is truncated: it has {size} bytes, less than a header of {HEADER_BYTES}")
    contents = np.memmap(path, np.uint8, mode="r")
    magic, version = _FIXED.unpack_from(contents)
    if magic != MAGIC:
        raise DamagedBlock(f"{path} is no block: it begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise DamagedBlock(f"{path} is of version {version}: this program reads version {VERSION}")
    (checksum,) = struct.unpack_from("<I", contents, _FIXED.size)
    length, nbytes = _CHECKED.unpack_from(contents, _CHECKED_FROM)
    if size != HEADER_BYTES + nbytes:
        raise DamagedBlock(f"{path} is truncated: it has {size} bytes, its header says {HEADER_BYTES + nbytes}")
    if (found := zlib.crc32(contents[_CHECKED_FROM:])) != checksum:
        raise DamagedBlock(f"{path} was altered: its checksum is {found:08x}, its header says {checksum:08x}")
    start = _CHECKED_FROM + _CHECKED.size
    description = Description(**json.loads(contents[start : start + length].tobytes()))
    for what in ("dtype", "fingerprint", "model", "key"):
        has, wanted = getattr(description, what), getattr(expected, what)
        if has != wanted:
            raise DamagedBlock(f"{path} holds a block of another {what}: {has!r}, expected {wanted!r}")
    return contents[HEADER_BYTES:]
