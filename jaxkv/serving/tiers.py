"""The engine's access to host memory and disk.  Failures there are logged and cost time, but never fail a request."""

import logging
from collections.abc import Collection

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.offload import DamagedBlock, HostPool, LoadFailed
from jaxkv.offload.host import Load
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
        if self._pool.cache_layout.fingerprint == layout.fingerprint != self._pool.layout.fingerprint:
            raise ValueError(
                f"`offload` stores other blocks than the engine has, by keys of their own\n{self._pool.layout}\n"
                f"expected a pool without `cache_layout`, as the engine has only the keys of its own blocks\n{layout}"
            )
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
            self._pool.store(cache, list(contents.values()), list(contents), wait=False)
            self._lost.difference_update(contents)
        except FAILURES as error:
            self._failed("were not stored", len(contents), error)

    def load(self, cache: KVCache, contents: dict[bytes, int]) -> Load:
        """A load of blocks, given by key, into the cache; to be started."""
        if self._pool is None:
            raise ValueError("there is no pool to load from")
        return Load(self._pool, contents, one_array(cache.buffer).sharding)

    def advance(self, cache: KVCache, loads: Collection[Load], *, timeout: float) -> tuple[KVCache, list[Load]]:
        """Continues loads, as `Load.advance` does; waits for one of them at most.

        Returns the cache, and the loads that failed.  The contents of their blocks are undefined.
        """
        failed = []
        # Wait for what is on its way to the device rather than for the disk.
        awaited = max(loads, key=lambda load: load.in_flight > 0) if loads and timeout else None
        for load in sorted(loads, key=lambda load: load is awaited):
            others = sum(other.in_flight for other in loads if other is not load)
            try:
                cache = load.advance(cache, others=others, timeout=timeout if load is awaited else 0)
            except LoadFailed as error:
                self._failed("were not loaded; what cannot be read is computed instead", len(load.contents), error)
                cache = error.cache
                if all(key in self for key in load.contents):  # the error does not name the key that failed
                    self._lost.update(load.contents)
                failed.append(load)
        return cache, failed

    def drop_failed_stores(self) -> None:
        """Waits for the stores in flight; removes from the pool what a failed program has computed."""
        if self._pool is not None:
            self._pool.drop_failed_stores()

    def _failed(self, what: str, count: int, error: Exception) -> None:
        self.failures += 1
        _log.warning("%d blocks %s: %s", count, what, error)
