"""Blocks in host memory: a pool that caches store into and load from."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import batched

import jax
import numpy as np

from jaxkv.arguments import positive_int
from jaxkv.cache import KVCache
from jaxkv.layout import CacheLayout
from jaxkv.offload.disk import DiskPool
from jaxkv.offload.rows import check_travels, read_rows, row_dtype, row_elements, write_rows
from jaxkv.offload.stats import Stats
from jaxkv.offload.transfers import Row, to_device, to_host, to_pinned
from jaxkv.packing import PackedLayout

STAGING_BYTES = 2**26
"""What one transfer moves, at most; two of them are under way at a time."""
MAX_BATCH = 32
NOWHERE = -1
"""A block id outside every cache: read as zeros, written to nothing."""


class LoadFailed(RuntimeError):
    """A load that stopped half-way.

    The blocks that it was to fill hold anything, all others what they held: `cache` is the cache, as the one given to
    `load` is donated.
    """

    def __init__(self, message: str, cache: KVCache):
        super().__init__(message)
        self.cache = cache


class HostPool:
    """Blocks in the host's memory, by key.

    Stores and loads are asynchronous, in few large transfers which overlap computations, and in order by data flow: a
    store has every write before it, and no write after it; blocks may be reused as soon as `store` returns; whatever
    takes the cache that `load` returns sees the blocks.  A block is in the pool from when `store` returns: who loads it
    before it has arrived waits.  Where room is short, blocks go that were used least recently and that nobody holds, to
    the disk pool if there is one.  Not for use by several threads at a time.

    Args:
      layout: of the blocks: that of the cache, or the PackedLayout that it views, so that all groups travel.
      num_blocks: blocks in host memory at most.
      disk: a pool for those that have no room here; of the same layout.
      implementation: of `read_blocks` and `write_blocks`.

    Raises:
      ValueError: `num_blocks` is no positive int, or `disk` has another layout.
    """

    def __init__(
        self,
        layout: CacheLayout | PackedLayout,
        num_blocks: int,
        *,
        disk: DiskPool | None = None,
        implementation=None,
    ):
        self.layout, self.disk = layout, disk
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self.block_nbytes = row_elements(layout) * row_dtype(layout).itemsize
        if disk is not None and disk.layout.fingerprint != layout.fingerprint:
            raise ValueError(f"`disk` is a pool of\n{disk.layout}\nexpected blocks of\n{layout}")
        self.stats = Stats()
        self._implementation = implementation
        self._batch = min(MAX_BATCH, max(1, STAGING_BYTES // self.block_nbytes))
        self._rows: dict[bytes, Row] = {}
        """Least recently used first."""
        self._holds: Counter[bytes] = Counter()
        self._arriving: deque[tuple[tuple[bytes, ...], list[Row]]] = deque()
        """Stores under way, oldest first."""

    def __len__(self) -> int:
        """Blocks in host memory."""
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        """Whether `load` would find it, here or on disk."""
        return key in self._rows or (self.disk is not None and key in self.disk)

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are here or on disk."""
        for count, key in enumerate(keys):
            if key in self._rows:
                self.stats.host_hits += 1
            elif key in self:
                self.stats.disk_hits += 1
            else:
                self.stats.misses += len(keys) - count
                return count
        return len(keys)

    def store(self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes]) -> int:
        """Copies blocks of a cache here; those whose key is here already are only marked as used.

        Args:
          cache: read, not donated.
          blocks: ids [n].
          keys: their names, [n]; the first ones are those that are wanted most, as the later ones are worth nothing
            without them.

        Returns:
          How many of the leading keys are here now: fewer than n where all room is held.

        Raises:
          ValueError: `cache` has other blocks than this pool; `blocks` and `keys` do not go together.
        """
        blocks = self._checked(cache, blocks, keys)
        new = {key: block for key, block in zip(keys, blocks, strict=True) if key not in self._rows}
        self._touch(key for key in keys if key in self._rows)
        room = self._make_room(len(new), keep=set(keys))
        taken = dict(list(new.items())[:room])
        for part in batched(taken, self._batch):
            ids = [taken[key] for key in part] + [NOWHERE] * (self._batch - len(part))
            staged = read_rows(cache, np.asarray(ids, np.int32), implementation=self._implementation)
            self._wait(1)
            rows = to_host(staged[: len(part)])
            self._arriving.append((part, rows))
            self._rows.update(zip(part, rows, strict=True))
            self.stats.stored_blocks += len(part)
            self.stats.stored_bytes += len(part) * self.block_nbytes
        self._touch(keys)
        self.stats.refused += len(new) - len(taken)
        return next((count for count, key in enumerate(keys) if key not in self._rows), len(keys))

    def load(self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes]) -> KVCache:
        """Copies blocks from here, or from disk, into a cache.

        Args:
          cache: donated.
          blocks: ids [n], to overwrite.
          keys: what to overwrite them with, [n].

        Returns:
          The cache with the blocks.

        Raises:
          KeyError: a block is not here; it is named, and `cache` is as it was.
          DamagedBlock: a block on disk is refused, and no longer in the pool; `cache` is as it was.
          LoadFailed: a transfer failed; has the cache.
          ValueError: `cache` has other blocks than this pool; `blocks` and `keys` do not go together.
        """
        blocks = self._checked(cache, blocks, keys)
        rows = [self._row(key, cache) for key in keys]
        self._touch(keys)
        try:
            moving = None
            for part in batched(zip(blocks, rows, strict=True), self._batch):
                ids = [block for block, _ in part] + [NOWHERE] * (self._batch - len(part))
                staged = to_device([row for _, row in part], cache.buffer)
                staged += staged[:1] * (self._batch - len(part))
                if moving is not None:
                    jax.block_until_ready(moving[1])
                    cache = write_rows(cache, *moving, implementation=self._implementation)
                moving = np.asarray(ids, np.int32), staged
            if moving is not None:
                cache = write_rows(cache, *moving, implementation=self._implementation)
        except Exception as error:
            raise LoadFailed(f"a load of {len(keys)} blocks stopped: {error}", cache) from error
        self.stats.loaded_blocks += len(keys)
        self.stats.loaded_bytes += len(keys) * self.block_nbytes
        return cache

    def hold(self, keys: Iterable[bytes]) -> None:
        """Keeps blocks from being evicted until they are released as often.  KeyError names one that is not here."""
        keys = list(keys)
        self._check_present(keys)
        self._holds.update(keys)

    def release(self, keys: Iterable[bytes]) -> None:
        """Ends a hold of each block.  KeyError names one that nobody holds."""
        for key in keys:
            if not self._holds[key]:
                raise KeyError(f"nobody holds {key.hex()}")
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]

    def flush(self) -> None:
        """Waits for stores under way, and writes every block to the disk pool, if there is one."""
        self._wait(0)
        if self.disk is not None:
            for key in [key for key in self._rows if key not in self.disk]:
                self._write(key)

    def _checked(self, cache, blocks, keys) -> list[int]:
        check_travels(cache, self.layout)
        blocks = [int(block) for block in blocks]
        if len(blocks) != len(keys):
            raise ValueError(
                f"`blocks` are {len(blocks)} and `keys` {len(keys)}: expected as many of one as of the other"
            )
        outside = [block for block in blocks if not 0 <= block < cache.layout.num_blocks]
        if outside:
            raise ValueError(f"`blocks` has {outside[0]}: the cache has {cache.layout.num_blocks} blocks")
        return blocks

    def _check_present(self, keys):
        for key in keys:
            if key not in self:
                raise KeyError(key.hex())

    def _row(self, key: bytes, cache: KVCache) -> Row:
        """A block in host memory, read from disk where need be."""
        self._check_present([key])
        if key not in self._rows:
            row = self._read(key, cache)
            if self._make_room(1, keep=()):
                self._rows[key] = row
            return row
        return self._rows[key]

    def _touch(self, keys: Iterable[bytes]) -> None:
        """Marks blocks as used: the last of a prompt is the first to go, as it is worth nothing without the others."""
        for key in reversed(list(keys)):
            if key in self._rows:
                self._rows[key] = self._rows.pop(key)

    def _make_room(self, count: int, *, keep) -> int:
        """Evicts until `count` blocks fit, those held and in `keep` excepted; how many of them do."""
        victims = [key for key in self._rows if key not in self._holds and key not in keep]
        missing = count - (self.num_blocks - len(self._rows))
        for key in victims[: max(missing, 0)]:
            if self.disk is not None and key not in self.disk:
                self._write(key)
            del self._rows[key]
            self.stats.evictions += 1
        return min(count, self.num_blocks - len(self._rows))

    def _wait(self, most: int) -> None:
        """Until at most that many stores are under way.  One that failed leaves nothing behind."""
        while len(self._arriving) > most:
            keys, rows = self._arriving.popleft()
            try:
                jax.block_until_ready(rows)
            except Exception:
                for key, row in zip(keys, rows, strict=True):
                    if self._rows.get(key) is row:
                        del self._rows[key]
                raise

    def _write(self, key: bytes) -> None:
        start = time.perf_counter()
        if self.disk.store(key, np.asarray(self._rows[key]), held=self._holds):
            self.stats.disk_written_blocks += 1
            self.stats.disk_written_bytes += self.block_nbytes
        self.stats.disk_write_seconds += time.perf_counter() - start

    def _read(self, key: bytes, cache: KVCache) -> Row:
        start = time.perf_counter()
        row = to_pinned(self.disk.load(key), cache.buffer)
        self.stats.disk_read_blocks += 1
        self.stats.disk_read_bytes += self.block_nbytes
        self.stats.disk_read_seconds += time.perf_counter() - start
        return row
