"""The tiers below the device, as the engine uses them: what fails there costs time, never a request."""

import logging

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.offload import DamagedBlock, HostPool, LoadFailed

_log = logging.getLogger("jaxkv")

FAILURES = (OSError, RuntimeError, MemoryError, LookupError, DamagedBlock)
"""What a transfer raises that did not come about; JAX's errors are RuntimeErrors."""


class Tiers:
    """Host memory and the disk below it; or nothing, without a pool."""

    def __init__(self, pool: HostPool | None):
        self._pool = pool
        self._lost: set[bytes] = set()
        """Keys that the pool has and could not load: absent until they are stored again."""
        self.failures = 0

    def check(self, cache: KVCache, layout: CacheLayout | PackedLayout) -> None:
        """ValueError unless the cache, of that layout, can exchange blocks with the host's pool."""
        if self._pool is None:
            return
        if not isinstance(self._pool, HostPool):
            told = type(self._pool).__name__
            raise ValueError(f"`offload` is a {told}: expected a HostPool, which takes a DiskPool as its `disk`")
        if self._pool.layout.fingerprint != layout.fingerprint:
            raise ValueError(
                f"`offload` is a pool of other blocks\n{self._pool.layout}\nexpected those of `model.layout` with the "
                f"engine's `block_size` and `order`\n{layout}"
            )
        if len(cache.buffer.sharding.device_set) > 1:
            raise ValueError(f"`offload` takes blocks of one device: the cache is on {cache.buffer.sharding}")

    def warm_up(self, cache: KVCache) -> KVCache:
        """Compiles what transfers need."""
        return cache if self._pool is None else self._pool.warm_up(cache)

    def __contains__(self, key: bytes) -> bool:
        return self._pool is not None and key in self._pool and key not in self._lost

    def store(self, cache: KVCache, contents: dict[bytes, int]) -> None:
        """Sends blocks of the cache, by key, to the host."""
        if self._pool is None or not contents:
            return
        try:
            self._pool.store(cache, list(contents.values()), list(contents))
            self._lost.difference_update(contents)
        except FAILURES as error:
            self._failed("were not stored", len(contents), error)

    def load(self, cache: KVCache, contents: dict[bytes, int]) -> tuple[KVCache, bool]:
        """The cache, donated, with contents of these keys in these blocks; False where they hold anything instead."""
        if self._pool is None:
            return cache, False
        keys = list(contents)
        try:
            return self._pool.load(cache, list(contents.values()), keys), True
        except FAILURES as error:
            self._failed("were not loaded; what cannot be read is computed instead", len(contents), error)
            if all(key in self._pool for key in keys):  # it does not know which is at fault
                self._lost.update(keys)
            return error.cache if isinstance(error, LoadFailed) else cache, False

    def _failed(self, what: str, count: int, error: Exception) -> None:
        self.failures += 1
        _log.warning("%d blocks %s: %s", count, what, error)
