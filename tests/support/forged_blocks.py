"""Block files as anybody may leave them: cut, altered, or of odd headers and lengths with the right checksums."""

import json
import struct
import zlib

from jaxkv.offload import block_file

ODD_TEXTS = [
    b"",
    b"[]",
    b"null",
    b"1",
    b'"text"',
    b"{",
    b"{}",
    b"[" * 4000,
    b'{"dtype":' * 400,
    b"1" * 4000,
    b"\xff\xfe\x00",
    "{}".encode("utf-16"),
    b"NaN",
]
ODD_VALUES = [None, True, 0, -1, 10**30, 1e308, [], {}, "", "\0", "\ud800", "x", "A" * 32, "0" * 31, "0" * 33, ["a"]]


def with_checksums(text, block, length=None):
    """A file with that description and block, checksums as without a secret; only the header's room limits the text."""
    encoded = struct.pack("<I", len(text) if length is None else length) + text
    encoded = encoded.ljust(block_file.HEADER_BYTES - block_file._DIGESTED_FROM, b"\0")
    encoded = encoded[: block_file.HEADER_BYTES - block_file._DIGESTED_FROM]
    rest = block_file._digest(None, encoded, block) + encoded
    return block_file._START.pack(block_file.MAGIC, block_file.VERSION, zlib.crc32(rest)) + rest + block


def parts(contents):
    """(description as JSON, block) of a whole file."""
    header, block = contents[: block_file.HEADER_BYTES], contents[block_file.HEADER_BYTES :]
    (length,) = block_file._LENGTH.unpack_from(header, block_file._DIGESTED_FROM)
    return header[block_file._DIGESTED_FROM + block_file._LENGTH.size :][:length], block


def cut(rng, contents):
    return contents[: rng.integers(len(contents))]


def lengthened(rng, contents):
    return contents + rng.bytes(rng.integers(1, 5000))


def altered(rng, contents):
    """Some bytes anywhere in the file, of the start of its header most often."""
    found = bytearray(contents)
    for _ in range(rng.integers(1, 4)):
        place = rng.integers(rng.choice([64, 400, len(contents)]))
        found[place] ^= int(rng.integers(1, 256))
    return bytes(found)


def noise(rng, contents):
    start = block_file._START.pack(block_file.MAGIC, block_file.VERSION, 0) if rng.random() < 0.5 else b""
    return start + rng.bytes(len(contents) - len(start))


def odd_text(rng, contents):
    return with_checksums(ODD_TEXTS[rng.integers(len(ODD_TEXTS))], parts(contents)[1])


def odd_length(rng, contents):
    """Of the description."""
    text, block = parts(contents)
    return with_checksums(text, block, int(rng.choice([0, len(text) - 1, len(text) + 1, 4096, 2**31, 2**32 - 1])))


def odd_field(rng, contents):
    """A field changed, removed, renamed, added, twice, moved, or the text spaced otherwise."""
    text, block = parts(contents)
    fields = json.loads(text)
    name = list(fields)[rng.integers(len(fields))]
    kind, separators = rng.integers(7), None
    if kind == 0:
        fields[name] = ODD_VALUES[rng.integers(len(ODD_VALUES))]
    elif kind == 1:
        del fields[name]
    elif kind == 2:
        fields[name.upper()] = fields.pop(name)
    elif kind == 3:
        fields["more"] = fields[name]
    elif kind == 4:
        return with_checksums(text[:-1] + b", " + json.dumps({name: fields[name]}).encode()[1:], block)
    elif kind == 5:
        fields = dict(reversed(fields.items()))
    else:
        separators = (",", ":")
    return with_checksums(json.dumps(fields, separators=separators).encode(), block)


def odd_block(rng, contents):
    """Of another length."""
    text, block = parts(contents)
    return with_checksums(text, block[: rng.choice([0, 1, 2, 4, len(block) // 2, len(block) - 2])])


def long_block(rng, contents):
    text, block = parts(contents)
    return with_checksums(text, block * int(rng.integers(2, 4)))


def untouched(rng, contents):
    return contents


KINDS = [untouched, cut, lengthened, altered, noise, odd_text, odd_length, odd_field, odd_block, long_block]


def another_block(rng, contents):
    """What only a secret protects against: other bytes, of the right length, their checksum right."""
    text, block = parts(contents)
    return with_checksums(text, rng.bytes(len(block)))


def forged(rng, contents, kinds=KINDS):
    """The file, forged in a way drawn at random."""
    return kinds[rng.integers(len(kinds))](rng, contents)
