"""The format of block files: a description of the block, its bytes, and a digest of both.

A file is a header of 4096 bytes, followed by the block.  Numbers are little-endian.  The header is:

    magic         8 bytes
    version       uint32
    checksum      uint32: CRC-32 of the rest of the header
    digest        32 bytes: of the rest of the file, keyed BLAKE2b with a secret, else CRC-32 followed by zeros
    length        uint32: bytes of the description
    description   JSON in ASCII: an object of strings, the fields of `Description`
    zeros         up to the block
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

MAGIC = b"jaxkvblk"
VERSION = 2
HEADER_BYTES = 4096
"""Size of the header: a page of memory, so that the block begins at a page boundary."""
DIGEST_BYTES = 32
UNFINISHED = ".unfinished"
"""Suffix of a file that is still being written."""

SHOWN = 200
"""The most bytes of a description that are shown in a message."""

_START = struct.Struct("<8sII")
_LENGTH = struct.Struct("<I")
_DIGESTED_FROM = _START.size + DIGEST_BYTES
"""The offset of the bytes that the digest covers: all after the digest itself."""

_SCHEMA = {
    "dtype": r"[a-z0-9_]+",
    "fingerprint": r"[0-9a-f]{32}",
    "model": r"(?s:.*)",
    "secret": r"|[0-9a-f]{32}",
    "key": r"([0-9a-f]{2})+",
}
"""Patterns that the fields of a description must match in full, in the order of the file."""


_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
"""What may be in the place of a file, by the type in its mode."""


class DamagedBlock(ValueError):
    """A file is not a valid block.  The message names the file and what is wrong with it."""


class ForeignBlock(LookupError):
    """A file belongs to another pool (model, layout or secret) or format version; it is treated as absent."""


@dataclass(frozen=True)
class Description:
    """Identifies a block: blocks with equal descriptions are interchangeable."""

    dtype: str
    fingerprint: str
    """The fingerprint of the layout and, if a file has only some parts of a block, of which ones."""
    model: str
    secret: str
    """The `secret_id` of the secret."""
    key: str
    """The key of the block, in hex."""

    def check(self) -> None:
        """ValueError if the description is too long for the header."""
        _encoded(self)


def secret_id(secret: bytes | None) -> str:
    """Identifies a secret without revealing it: 32 hex digits, or "" for None.  ValueError if `secret` is invalid."""
    if secret is None:
        return ""
    most = hashlib.blake2b.MAX_KEY_SIZE
    if not isinstance(secret, bytes) or not 1 <= len(secret) <= most:
        found = f"has {len(secret)} bytes" if isinstance(secret, bytes) else f"is a {type(secret).__name__}"
        raise ValueError(f"`secret` {found}: expected 1 to {most} bytes, such as `secrets.token_bytes(32)`, or None")
    return hashlib.blake2b(key=secret, digest_size=16, person=b"jaxkv secret").hexdigest()


def write_block(path: Path, description: Description, row: np.ndarray, secret: bytes | None = None) -> None:
    """Writes a file atomically: it is complete or does not exist, even if the process or the machine stops.

    Args:
      path: the file, which is replaced if it exists.
      description: what `row` is.
      row: [E] of any dtype.
      secret: the key of the digest; `description.secret` is its `secret_id`.

    Raises:
      OSError: the file cannot be written, for example because the disk is full.  The new file is removed, and an
        existing file is unchanged.
    """
    block = memoryview(np.ascontiguousarray(row).view(np.uint8)).cast("B")
    header = _header(description, block, secret)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(unfinished, "wb") as file:
            file.write(header)
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_block(path: Path, expected: Description, row: jax.ShapeDtypeStruct, secret: bytes | None = None) -> np.ndarray:
    """Reads a block from a file and checks it completely.

    The file is read into memory and checked there, so changes by other processes during the check have no effect.

    Args:
      path: the file.
      expected: what the block must be.
      row: shape [E] and dtype of the block.
      secret: the key of the digest; `expected.secret` is its `secret_id`.

    Raises:
      DamagedBlock: the file is not a block, is truncated, altered, or holds the block of another key; or there is a
        folder, a symbolic link, a FIFO, a socket or a device in its place.
      ForeignBlock: the file is of another model, layout, secret or version.
      FileNotFoundError: there is no such file.
    """
    with open(path, "rb", opener=_open_regular) as file:
        header = file.read(HEADER_BYTES)
        _check_header(path, header, expected)
        block = np.empty(row.shape, row.dtype)
        size, whole = os.fstat(file.fileno()).st_size, HEADER_BYTES + block.nbytes
        if size != whole:
            raise DamagedBlock(f"{path} has {size} bytes: expected {whole}, a header and a block of the layout")
        if file.readinto(block.view(np.uint8)) != block.nbytes:
            raise DamagedBlock(f"{path} became shorter than {whole} bytes while it was read")
    found = _digest(secret, header[_DIGESTED_FROM:], block.view(np.uint8))
    if not hmac.compare_digest(found, header[_START.size : _DIGESTED_FROM]):
        # Do not print the expected digest: with it, a forged block could be completed.
        raise DamagedBlock(f"{path} was altered: its contents do not have the digest in its header")
    return block


def _open_regular(path: str, flags: int) -> int:
    """An `opener` for `open` that never waits: DamagedBlock if there is something else than a regular file."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.  Reads of regular files are not affected.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # symbolic links, sockets and some devices cannot be opened at all
        _check_kind(path, os.lstat(path).st_mode)
        raise
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
    except DamagedBlock:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(path: str, mode: int) -> None:
    """DamagedBlock unless `mode` is that of a regular file."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise DamagedBlock(f"{path} is not a block but a {kind}: expected a regular file")


def _header(description: Description, block, secret: bytes | None) -> bytes:
    rest = _encoded(description)
    rest = _digest(secret, rest, block) + rest
    return _START.pack(MAGIC, VERSION, zlib.crc32(rest)) + rest


def _encoded(description: Description) -> bytes:
    """The last part of a header: the length of the description and the description."""
    text = json.dumps(asdict(description)).encode()
    encoded = _padded(text)
    if len(encoded) > HEADER_BYTES - _DIGESTED_FROM:
        raise ValueError(f"the description of a block takes {len(text)} bytes, which is too long: shorten `model`")
    return encoded


def _padded(text: bytes) -> bytes:
    return (_LENGTH.pack(len(text)) + text).ljust(HEADER_BYTES - _DIGESTED_FROM, b"\0")


def _digest(secret: bytes | None, *parts) -> bytes:
    """The digest, `DIGEST_BYTES` long, of the concatenated `parts`."""
    if secret is None:
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        return checksum.to_bytes(DIGEST_BYTES, "little")
    digest = hashlib.blake2b(key=secret, digest_size=DIGEST_BYTES, person=b"jaxkv block")
    for part in parts:
        digest.update(part)
    return digest.digest()


def _check_header(path: Path, header: bytes, expected: Description) -> None:
    """DamagedBlock or ForeignBlock unless the header is that of the `expected` block."""
    if len(header) < HEADER_BYTES:
        raise DamagedBlock(f"{path} is truncated: it has {len(header)} bytes, less than a header of {HEADER_BYTES}")
    magic, version, checksum = _START.unpack_from(header)
    if magic != MAGIC:
        raise DamagedBlock(f"{path} is not a block: it begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise ForeignBlock(f"{path} is of version {version} of the format: this program reads version {VERSION}")
    if (found := zlib.crc32(header[_START.size :])) != checksum:
        raise DamagedBlock(f"{path} was altered: the checksum of its header is {found:08x}, it has {checksum:08x}")
    description = _decoded(path, header[_DIGESTED_FROM:])
    for name in ("dtype", "fingerprint", "model", "secret"):
        has, wanted = getattr(description, name), getattr(expected, name)
        if has != wanted:
            raise ForeignBlock(f"{path} holds a block of another {name}: {has!r}, expected {wanted!r}")
    if description.key != expected.key:
        raise DamagedBlock(f"{path} holds a block of another key: {description.key!r}, expected {expected.key!r}")


def _decoded(path: Path, encoded: bytes) -> Description:
    """The inverse of `_encoded`; DamagedBlock if `_encoded` cannot have produced these bytes."""
    (length,) = _LENGTH.unpack_from(encoded)
    text = encoded[_LENGTH.size :][:length]
    try:
        fields = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise DamagedBlock(f"{path} has the description {text[:SHOWN]!r}, which is not JSON: {error}") from None
    if not _is_description(fields) or _padded(json.dumps(fields).encode()) != encoded:
        raise DamagedBlock(
            f"{path} has the description {text[:SHOWN]!r}: expected an object of strings, "
            + ", ".join(f"{name} as {pattern}" for name, pattern in _SCHEMA.items())
        )
    return Description(**fields)


def _is_description(fields: object) -> bool:
    return (
        isinstance(fields, dict)
        and list(fields) == list(_SCHEMA)
        and all(isinstance(fields[name], str) and re.fullmatch(_SCHEMA[name], fields[name]) for name in _SCHEMA)
    )
