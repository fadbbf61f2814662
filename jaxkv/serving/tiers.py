"""The engine's access to host memory and disk.  Failures there are logged and cost time, but never fail a request."""

import logging

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.offload import DamagedBlock, HostPool, LoadFailed
from jaxkv_kernels.addressing import one_array

_log = logging.getLogger("jaxkv")

FAILURES = (OSError, RuntimeError, MemoryError, LookupError, DamagedBlock)
"""What a failed transfer raises.  JAX's errors are RuntimeErrors."""


class Tiers:
    """A host pool, which may have a disk pool, or no pool, in which case nothing is stored or found."""

    def __init__(self, pool: HostPool | None):
        self._pool = pool
        self._lost: set[bytes] = set()
        """Keys that could not be loaded: treated as absent until they are stored again."""
        self.failures = 0

    def check(self, cache: KVCache, layout: CacheLayout | PackedLayout) -> None:
        """ValueError unless the cache, which has `layout`, can exchange blocks with the pool."""
        if self._pool is None:
            return
        if not isinstance(self._pool, HostPool):
            found = type(self._pool).__name__
            raise ValueError(f"`offload` is a {found}: expected a HostPool (pass a DiskPool as its `disk`)")
        if self._pool.layout.fingerprint != layout.fingerprint:
            raise ValueError(
                f"`offload` is a pool of other blocks\n{self._pool.layout}\nexpected those of `model.layout` with the "
                f"engine's `block_size` and `order`\n{layout}"
            )
        sharding = one_array(cache.buffer).sharding
        if len(sharding.device_set) > 1:
            raise ValueError(f"`offload` supports a cache on one device: this cache is on {sharding}")

    def warm_up(self, cache: KVCache) -> KVCache:
        """Compiles the programs of transfers."""
        return cache if self._pool is None else self._pool.warm_up(cache)

    def __contains__(self, key: bytes) -> bool:
        return self._pool is not None and key in self._pool and key not in self._lost

    def store(self, cache: KVCache, contents: dict[bytes, int]) -> None:
        """Stores blocks of the cache, given by key, in the pool."""
        if self._pool is None or not contents:
            return
        try:
            self._pool.store(cache, list(contents.values()), list(contents))
            self._lost.difference_update(contents)
        except FAILURES as error:
            self._failed("were not stored", len(contents), error)

    def load(self, cache: KVCache, contents: dict[bytes, int]) -> tuple[KVCache, bool]:
        """Loads blocks, given by key, into the cache, which is donated.

        Returns the cache, and whether the load succeeded.  If it failed, the contents of these blocks are undefined.
        """
        if self._pool is None:
            return cache, False
        keys = list(contents)
        try:
            return self._pool.load(cache, list(contents.values()), keys), True
        except FAILURES as error:
            self._failed("were not loaded; what cannot be read is computed instead", len(contents), error)
            if all(key in self._pool for key in keys):  # the error does not name the key that failed
                self._lost.update(keys)
            return error.cache if isinstance(error, LoadFailed) else cache, False

    def drop_failed_stores(self) -> None:
        """Waits for the stores in flight; removes from the pool what a failed program has computed."""
        if self._pool is not None:
            self._pool.drop_failed_stores()

    def _failed(self, what: str, count: int, error: Exception) -> None:
        self.failures += 1
        _log.warning("%d blocks %s: %s", count, what, error)
