"""The tiers below the device, as the engine uses them: what fails there costs time, never a request."""

import logging
from collections.abc import Sequence

from jaxkv.cache import KVCache
from jaxkv.offload import HostPool

_log = logging.getLogger("jaxkv")

FAILURES = (OSError, RuntimeError, MemoryError, LookupError)
"""What a transfer raises that did not come about: JAX's errors are RuntimeErrors."""


class Tiers:
    """Host memory and disk, or nothing.

    A content that could not be loaded counts as absent until it is stored again, so that it is computed instead.
    """

    def __init__(self, pool: HostPool | None):
        self._pool = pool
        self._lost: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return self._pool is not None and key not in self._lost and key in self._pool

    def store(self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes]) -> bool:
        """Puts blocks of the cache into the host's pool; False where that failed."""
        if self._pool is None or not keys:
            return True
        try:
            self._pool.store(cache, blocks, keys)
        except FAILURES as error:
            _log.warning("%d blocks were not stored: %s", len(keys), error)
            return False
        self._lost.difference_update(keys)
        return True

    def load(self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes]) -> KVCache | None:
        """The cache with contents in these blocks; None where that failed, with the cache as it was."""
        assert self._pool is not None
        try:
            return self._pool.load(cache, blocks, keys)
        except FAILURES as error:
            if cache.buffer.is_deleted():
                raise  # donated already
            _log.warning("%d blocks were not loaded, and are computed instead: %s", len(keys), error)
            self._lost.update(keys)
            return None
