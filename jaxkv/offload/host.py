"""Blocks in host memory: a pool that caches store into and load from."""

import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice

import jax
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.dispatch.validate import block_ids, positive_int
from jaxkv.offload import transfers
from jaxkv.offload.block_file import DamagedBlock
from jaxkv.offload.chunks import Chunk, Chunks
from jaxkv.offload.disk import DiskPool
from jaxkv.offload.rows import Layout, check_travels, read_rows, row_of, write_rows
from jaxkv.offload.stats import Stats

CHUNK_BYTES = 2**26
"""What one transfer moves, at most: enough for the full rate."""
POOL_CHUNKS = 8
"""A pool has room for that many chunks at least, as they leave it as a whole."""
STORES_UNDER_WAY = 4
"""Chunks that wait on the device for their transfer, at most: they take its memory."""
SLACK = 1 / 8
"""More memory is pinned than blocks take: chunks differ in length, and leave gaps."""
SKIPPED = -1
"""A block id outside every cache."""


class LoadFailed(RuntimeError):
    """A load that stopped half-way: `cache` is the cache, as the one given to `load` was donated.

    The blocks that were to be filled hold anything, all others what they held.
    """

    def __init__(self, message: str, cache: KVCache):
        super().__init__(message)
        self.cache = cache


class HostPool:
    """Blocks in the host's memory, by key.

    Stores and loads are few large transfers, asynchronous, beside what the device computes, and in order by data flow:
    a store has every write before it and none after it; a block may be reused as soon as `store` returns; whatever
    takes the cache that `load` returns sees the blocks.  A block is here from when `store` returns: who loads it before
    it has arrived waits for it.

    Blocks that are stored together stay together: they are evicted together, and one of them held holds all; a load of
    some transfers all.  Where room is short, those go that were used least recently and that nobody holds.

    With a disk pool, blocks are written there in the background, and found there when they are here no longer.

    One thread at a time may use a pool.

    Args:
      layout: that of the cache, or the PackedLayout of which the cache views a group: all groups travel.
      num_blocks: blocks in host memory at most.  A load from disk of more blocks is divided into portions that fit.
        Where all room is held, a portion is one chunk (an eighth of `num_blocks`, at least one block) in addition.  On
        GPUs the memory is pinned now, which takes half a second a GB.
      disk: a pool of the same layout, for more blocks, and for those that are to survive the process.
      device: the device whose host's memory it is; default this process's first.
      implementation: of `read_blocks` and `write_blocks`.

    Raises:
      ValueError: `num_blocks` is not a positive int, `layout` is not a layout, or `disk` has another one.
      MemoryError: so much memory cannot be pinned.
    """

    def __init__(
        self,
        layout: Layout,
        num_blocks: int,
        *,
        disk: DiskPool | None = None,
        device: jax.Device | None = None,
        implementation=None,
    ):
        self.layout, self.disk = layout, disk
        self.num_blocks, self._row = positive_int("num_blocks", num_blocks, below=None), row_of(layout)
        self.block_nbytes = self._row.size * self._row.dtype.itemsize
        if not isinstance(disk, DiskPool | None):
            raise ValueError(f"`disk` is a {type(disk).__name__}: expected a DiskPool, or None")
        if disk is not None and disk.layout.fingerprint != layout.fingerprint:
            raise ValueError(f"`disk` holds other blocks\n{disk.layout}\nexpected those of\n{layout}")
        self.stats = Stats()
        self._implementation = implementation
        longest = max(1, min(CHUNK_BYTES // self.block_nbytes, self.num_blocks // POOL_CHUNKS))
        self._chunk_blocks = 1 << (longest.bit_length() - 1)
        self._chunks = Chunks()
        self._holds: Counter[bytes] = Counter()
        self._arriving: deque[Chunk] = deque()
        """Stores that may be under way, oldest first."""
        self._writer = ThreadPoolExecutor(1, "jaxkv-disk")
        pinned = int(self.num_blocks * self.block_nbytes * (1 + SLACK))
        transfers.reserve(pinned, device or jax.local_devices()[0])

    def __len__(self) -> int:
        """Blocks in host memory."""
        return len(self._chunks)

    def __repr__(self):
        return f"HostPool({len(self)} of {self.num_blocks} blocks of {self.block_nbytes} bytes, disk={self.disk})"

    def __contains__(self, key: bytes) -> bool:
        """Whether `load` finds it: here, or on disk."""
        return key in self._chunks or (self.disk is not None and key in self.disk)

    @property
    def blocks_under_way(self) -> int:
        """Blocks that `store` takes without waiting for others to arrive: as many as are worth storing at a time."""
        return STORES_UNDER_WAY * self._chunk_blocks

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are here or on disk; counted as hits and misses.

        Hold them to rely on it later: blocks on disk make room for others in the background.
        """
        found = 0
        for key in keys:
            if key not in self:
                break
            found += 1
            if key in self._chunks:
                self.stats.host_hits += 1
            else:
                self.stats.disk_hits += 1
        self.stats.misses += len(keys) - found
        return found

    def store(self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes]) -> int:
        """Copies blocks of a cache here; one whose key is here already is only marked as used.

        Args:
          cache: read, not donated.
          blocks: ids [n].
          keys: their names [n], those wanted most first: the first to be stored, and the last to be evicted.

        Returns:
          How many of the leading keys are here now: less than n where all room is held.

        Raises:
          ValueError: `cache` has other blocks than this pool, or `blocks` and `keys` do not go together.
          JaxRuntimeError: a transfer failed, of this store or of one before; its blocks are not here.
        """
        blocks = self._checked(cache, blocks, keys)
        new = {key: block for key, block in zip(keys, blocks, strict=True) if key not in self._chunks}
        with self._holding(keys):
            room = self._make_room(len(new))
        self.stats.refused += len(new) - room
        for part in _split(islice(new, room), self._chunk_blocks):
            self._wait_for_stores(STORES_UNDER_WAY - 1)
            ids = np.asarray([new[key] for key in part], np.int32)
            staged = read_rows(cache, ids, implementation=self._implementation)
            self._add(Chunk(part, transfers.to_host(staged)))
        self._chunks.use(keys)
        return next((count for count, key in enumerate(keys) if key not in self._chunks), len(keys))

    def load(self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes]) -> KVCache:
        """Copies blocks from here, or from disk, into a cache.

        Args:
          cache: donated.
          blocks: ids [n], to be overwritten, each once.
          keys: of what is to stand in them, [n].

        Returns:
          The cache with the blocks.  Its buffer is committed to its device: so should be the one that is given, or
          programs that take both are compiled twice.

        Raises:
          KeyError: a block is not here; it is named, and `cache` is as it was.
          DamagedBlock: a block on disk is refused, and is here no longer; `cache` is as it was.
          OSError: a block on disk cannot be read now; `cache` is as it was.
          LoadFailed: a transfer failed, or one of the above happened after a portion had been loaded; the error has the
            cache.
          ValueError: `cache` has other blocks than this pool, or `blocks` and `keys` do not go together.
        """
        blocks = self._checked(cache, blocks, keys, distinct=True)
        targets = defaultdict(list)
        for key, block in zip(keys, blocks, strict=True):
            targets[key].append(block)
        given, waiting = cache, dict.fromkeys(keys)
        with self._holding(waiting):
            self._check_present(keys)
            while waiting:
                try:
                    if cache is not given:
                        jax.block_until_ready(cache.buffer)  # the portion before has left host memory
                    places = self._places(waiting, cache.buffer.sharding)
                except Exception as error:
                    if cache is given:
                        raise  # as it was
                    raise LoadFailed(f"a load of {len(keys)} blocks stopped half-way: {error}", cache) from error
                cache = self._moved(cache, places, targets)
                self._chunks.use(keys)
                for key in places:
                    del waiting[key]
                self.release(places)
                del places  # it keeps chunks in host memory
        self.stats.loaded += len(keys)
        self.stats.loaded_bytes += len(keys) * self.block_nbytes
        return cache

    def warm_up(self, cache: KVCache) -> KVCache:
        """Compiles the programs of stores and loads, by moving nothing: later ones take only the time of their work.

        Args:
          cache: donated.

        Returns:
          The cache, with the blocks that it had.

        Raises:
          ValueError: `cache` has other blocks than this pool.
        """
        check_travels(cache, self.layout)
        for length in (1 << n for n in range(self._chunk_blocks.bit_length())):
            nowhere = np.full(length, SKIPPED, np.int32)
            rows = transfers.to_host(read_rows(cache, nowhere, implementation=self._implementation))
            rows = transfers.to_device(rows, cache.buffer.sharding)
            cache = write_rows(cache, nowhere, rows, implementation=self._implementation)
        return cache

    def hold(self, keys: Iterable[bytes]) -> None:
        """Keeps blocks, here or on disk, until released as often.  KeyError names one that is not here."""
        keys = list(keys)
        with self._holding(keys):  # first: the disk makes room in the background
            self._check_present(keys)
            self._holds.update(keys)

    @contextmanager
    def _holding(self, keys: Collection[bytes]) -> Iterator[None]:
        """Holds blocks, those of them that are here, for a while; in the end releases the keys that are left."""
        self._holds.update(list(keys))
        try:
            yield
        finally:
            self.release(keys)

    def release(self, keys: Iterable[bytes]) -> None:
        """Ends one hold of each block.  KeyError names one that nobody holds."""
        for key in keys:
            if not self._holds[key]:
                raise KeyError(f"nobody holds {key.hex()}")
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]

    def flush(self) -> None:
        """Returns when all stores have arrived, and are on disk where there is a disk pool.

        Raises:
          OSError: blocks could not be written; the next `flush` tries again.
          JaxRuntimeError: a transfer failed; its blocks are not here.
        """
        self._wait_for_stores(0)
        for chunk in self._chunks:
            if chunk.written is not None and chunk.written.done() and chunk.written.exception():
                self._write_later(chunk)  # perhaps there is room by now
        under_way = [chunk.written for chunk in self._chunks if chunk.written is not None]
        wait(under_way)
        for written in under_way:
            written.result()  # raises what it raised

    def _checked(
        self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes], *, distinct: bool = False
    ) -> list[int]:
        """`blocks` as ints."""
        check_travels(cache, self.layout)
        ids = block_ids("blocks", blocks, cache.layout.num_blocks, distinct=distinct)
        if len(ids) != len(keys):
            raise ValueError(f"`blocks` has {len(ids)} ids and `keys` {len(keys)}: expected as many")
        if strange := [key for key in keys if not isinstance(key, bytes)]:
            raise ValueError(f"`keys` has a {type(strange[0]).__name__}: expected bytes, as `prefix_keys` makes them")
        return ids.tolist()

    def _check_present(self, keys: Iterable[bytes]) -> None:
        missing = next((key for key in keys if key not in self), None)
        if missing is not None:
            raise KeyError(missing.hex())

    def _add(self, chunk: Chunk) -> None:
        self._chunks.add(chunk)
        self._arriving.append(chunk)
        self._write_later(chunk)
        self.stats.stored += len(chunk.keys)
        self.stats.stored_bytes += len(chunk.keys) * self.block_nbytes

    def _make_room(self, count: int) -> int:
        """Evicts until `count` blocks fit, or only chunks are left that are held; how many of the blocks fit."""
        self._wait_for_stores(STORES_UNDER_WAY)
        free = self.num_blocks - len(self._chunks)
        for chunk in list(self._chunks) if count > free else []:
            if free >= count:
                break
            if any(key in self._holds for key in chunk.keys):
                continue
            self._wait_for_disk(chunk)
            self._chunks.remove(chunk)
            self.stats.evicted += len(chunk.keys)
            free += len(chunk.keys)
        return min(count, free)

    def _wait_for_stores(self, most: int) -> None:
        """Until at most that many are under way.  One that failed leaves nothing here, and raises."""
        while self._arriving and (len(self._arriving) > most or self._arriving[0].has_arrived):
            chunk = self._arriving.popleft()
            try:
                jax.block_until_ready(chunk.rows)
            except Exception:
                self._chunks.remove(chunk)
                raise

    def _wait_for_disk(self, chunk: Chunk) -> None:
        """Until its blocks are on disk, or cannot be: whoever needs room needs it all the same."""
        try:
            if chunk.written is not None:
                chunk.written.result()
        except Exception as error:
            warnings.warn(
                f"{len(chunk.keys)} blocks are evicted that could not be written to disk: {error}", stacklevel=4
            )

    def _write_later(self, chunk: Chunk) -> None:
        if self.disk is not None:
            chunk.written = self._writer.submit(self._write, chunk, self.disk)

    def _write(self, chunk: Chunk, disk: DiskPool) -> None:
        """In the background: all blocks that can be written; raises what the first one raised that cannot."""
        errors = []
        for key, row in zip(chunk.keys, transfers.to_numpy(chunk.rows), strict=True):
            start = time.perf_counter()
            try:
                written = key not in disk and disk.store(key, row, held=self._holds)
            except OSError as error:
                errors.append(error)
                continue
            if written:
                self.stats.written += 1
                self.stats.written_bytes += self.block_nbytes
                self.stats.write_seconds += time.perf_counter() - start
        if errors:
            raise errors[0]

    def _places(self, keys: Iterable[bytes], sharding: jax.sharding.Sharding) -> dict[bytes, tuple[Chunk, int]]:
        """Places in host memory of a portion of these blocks: those that are here, and as many from disk as fit."""
        places = {key: self._chunks.place(key) for key in keys if key in self._chunks}
        if self.disk is None:
            return places
        for part in _split((key for key in keys if key not in places), self._chunk_blocks):
            fits = self._make_room(len(part)) == len(part)
            if places and not fits:
                break
            chunk = self._read(part, self.disk, sharding)
            if fits:
                self._chunks.add(chunk)
            places.update((key, (chunk, row)) for row, key in enumerate(part))
        return places

    def _read(self, keys: tuple[bytes, ...], disk: DiskPool, sharding: jax.sharding.Sharding) -> Chunk:
        """Blocks on disk, as one array in host memory."""
        start = time.perf_counter()
        rows = np.empty((len(keys), *self._row.shape), self._row.dtype)
        try:
            for n, key in enumerate(keys):  # one file open at a time
                rows[n] = disk.load(key)
        except DamagedBlock:
            self.stats.damaged += 1
            raise
        chunk = Chunk(keys, transfers.to_pinned(rows, sharding))
        self.stats.read += len(keys)
        self.stats.read_bytes += rows.nbytes
        self.stats.read_seconds += time.perf_counter() - start
        return chunk

    def _moved(
        self, cache: KVCache, places: Mapping[bytes, tuple[Chunk, int]], targets: Mapping[bytes, Sequence[int]]
    ) -> KVCache:
        """The cache, donated, with blocks from these places at their targets; LoadFailed where a transfer fails."""
        moves = _moves([(place, block) for key, place in places.items() for block in targets[key]])
        try:
            arriving = None
            for chunk, ids in moves:
                following = ids, transfers.to_device(chunk.rows, cache.buffer.sharding)
                if arriving is not None:
                    jax.block_until_ready(arriving)  # two chunks at a time on the device
                    cache = write_rows(cache, *arriving, implementation=self._implementation)
                arriving = following
            if arriving is not None:
                cache = write_rows(cache, *arriving, implementation=self._implementation)
        except Exception as error:
            raise LoadFailed(f"a load of {len(places)} blocks stopped half-way: {error}", cache) from error
        return cache


def _split(keys: Iterable[bytes], most: int) -> Iterator[tuple[bytes, ...]]:
    """Runs of at most `most` keys whose lengths are powers of two: few programs to compile."""
    keys = list(keys)
    while keys:
        length = 1 << (min(len(keys), most).bit_length() - 1)
        yield tuple(keys[:length])
        del keys[:length]


def _moves(pairs: Iterable[tuple[tuple[Chunk, int], int]]) -> list[tuple[Chunk, np.ndarray]]:
    """Chunks of places, each with the block that each of its rows goes to, int32 [rows], or `SKIPPED`."""
    moves: dict[Chunk, list[np.ndarray]] = {}
    for (chunk, row), block in pairs:
        targets = moves.setdefault(chunk, [])
        free = next((ids for ids in targets if ids[row] == SKIPPED), None)
        if free is None:
            free = np.full(len(chunk.keys), SKIPPED, np.int32)
            targets.append(free)
        free[row] = block
    return [(chunk, ids) for chunk, targets in moves.items() for ids in targets]
