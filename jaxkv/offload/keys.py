"""Keys of blocks by content.  Equal keys mean equal tokens in the block and in all blocks before it."""

import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv.checks import describe, positive_int

KEY_BYTES = hashlib.sha256().digest_size
"""The length of the keys that `prefix_keys` computes."""
MAX_KEY_BYTES = 64
"""The length of the longest keys that pools accept: files are named after keys, and names have at most 255 bytes."""


def prefix_keys(
    tokens: Sequence[int] | np.ndarray,
    *,
    block_size: int,
    layout_fingerprint: str,
    model: str,
    table: str = "",
    after: bytes | None = None,
    cache_salt: str | bytes | Sequence[str | bytes] | None = None,
) -> list[bytes]:
    """A key for each full block of a prompt.

    Keys are chained.  What a block stores depends on every token before it.  Key i therefore covers the layout, the
    model, the salt and all of `tokens[: (i + 1) * block_size]`.  Two prompts therefore have as many leading keys in
    common as they have leading full blocks in common.

    Each key is the SHA-256 digest of the key before it, followed by the block's tokens as little-endian int64.  Before
    the first key comes the digest of a JSON text: of the list `["jaxkv", 1, model, layout_fingerprint, block_size]`,
    and `table` after these if it is not empty.  With a salt, the list ends with `table`, even if that is empty, and a
    list of the parts of the salt, each in hexadecimal.

    Args:
      tokens: token ids, ints or an integer array [T].
      block_size: tokens per block.
      layout_fingerprint: `fingerprint` of the cache's layout (that of the `PackedLayout` if there are several groups).
      model: a name for the weights and everything else that changes what a token stores.
      table: the name of the block table to which the blocks belong, if the layout has several.
      after: key of the block before `tokens`, to continue a prompt: 32 bytes, from an earlier call.  By default,
        `tokens` is the start of the prompt, and `cache_salt` is then in its first key, and so in all others.
      cache_salt: prompts share keys only if they have the same salt.  It may have several parts, for example the name
        of a tenant and that of an adapter; ("ab", "c") differs from ("a", "bc").  A string stands for its UTF-8 bytes.

    Returns:
      T // block_size keys of 32 bytes.

    Raises:
      ValueError: `block_size` is not a positive int, `tokens` are not integers, a name is not a string, `after` is not
        a key, or `cache_salt` is of another type.
    """
    block_size = positive_int("block_size", block_size)
    for name, value, what in (
        ("layout_fingerprint", layout_fingerprint, "the `fingerprint` of it"),
        ("model", model, "the `fingerprint` of it"),
        ("table", table, "the name of a table"),
    ):
        if not isinstance(value, str):
            raise ValueError(f"`{name}` is a {type(value).__name__}: expected a string, {what}")
    if after is not None and not (isinstance(after, bytes) and len(after) == KEY_BYTES):
        raise ValueError(f"`after` {_found(after)}: expected a key from `prefix_keys`, {KEY_BYTES} bytes, or None")
    ids = _token_ids(tokens)
    salt = [part.hex() for part in salt_parts(cache_salt)]
    named = [table, salt] if salt else [table] if table else []
    origin = json.dumps(["jaxkv", 1, model, layout_fingerprint, block_size, *named])
    first = hashlib.sha256(origin.encode()).digest()
    key, keys = first if after is None else after, []
    for end in range(block_size, ids.size + 1, block_size):
        key = hashlib.sha256(key + ids[end - block_size : end].tobytes()).digest()
        keys.append(key)
    return keys


def salt_parts(cache_salt: str | bytes | Sequence[str | bytes] | None) -> tuple[bytes, ...]:
    """The parts of a salt, as bytes; none if it is None.  ValueError if it is of another type."""
    if cache_salt is None:
        return ()
    parts = [cache_salt] if isinstance(cache_salt, str | bytes) else cache_salt
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str | bytes) for part in parts):
        raise ValueError(f"`cache_salt` is {cache_salt!r}: expected a string or bytes, a tuple of these, or None")
    return tuple(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts)


def checked_key(name: str, key: object) -> bytes:
    """`key` as it is; ValueError unless it is 1 to `MAX_KEY_BYTES` bytes."""
    if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"`{name}` {_found(key)}: expected 1 to {MAX_KEY_BYTES} bytes, as `prefix_keys` makes them")
    return key


def checked_keys(keys: Iterable[bytes]) -> list[bytes]:
    """`keys` as a list; ValueError unless all of them are keys."""
    if not isinstance(keys, Iterable):
        raise ValueError(f"`keys` is a {type(keys).__name__}: expected keys of blocks, from `prefix_keys`")
    return [checked_key(f"keys[{n}]", key) for n, key in enumerate(keys)]


def _found(key: object) -> str:
    return f"has {len(key)} bytes" if isinstance(key, bytes) else f"is a {type(key).__name__}"


def _token_ids(tokens) -> np.ndarray:
    """`tokens` as little-endian int64 [T]: the same bytes on every machine, from every integer dtype."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"`tokens` is {describe(ids)}: expected token ids, integers [T]")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**63:
        raise ValueError(f"`tokens` holds {ids.min()} to {ids.max()}: expected token ids, at least 0 and below 2**63")
    return ids.astype("<i8")
