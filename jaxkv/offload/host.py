"""`HostPool`: stores blocks of caches in host memory and loads them back."""

import time
import warnings
import weakref
from collections import ChainMap, Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import override

import jax
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.checks import block_ids, positive_int
from jaxkv.offload import transfers
from jaxkv.offload.block_file import DamagedBlock
from jaxkv.offload.connector import Arrival, Connector, Pull
from jaxkv.offload.disk import DiskPool
from jaxkv.offload.events import BlockEvents
from jaxkv.offload.keys import checked_key, checked_keys
from jaxkv.offload.transfers import (
    SKIPPED,
    HostArray,
    Layout,
    blocks_fingerprint,
    check_exchange,
    checked_parts,
    in_powers_of_two,
    row_of,
)
from jaxkv.ops.rows import addressable_part, read_rows, with_part, write_rows
from jaxkv_kernels.addressing import one_array

CHUNK_BYTES = 2**26
"""The most bytes per transfer: enough to reach the full rate, and few enough not to delay what comes next for long."""
POOL_CHUNKS = 8
"""The least number of chunks for which a pool has room; there should be several, because they are evicted as a whole.
"""
STORES_IN_FLIGHT = 4
"""The blocks that wait on the device for their transfer, where they take memory, are at most those of so many chunks of
the greatest length."""
TRANSFERS_PER_CHUNK = 4
"""A transfer of a pull counts as at least this fraction of a chunk of the greatest length, as it takes the host's
time."""
SLACK = 1 / 8
"""The extra fraction of pinned memory: chunks differ in length and leave gaps when they are evicted."""
Units = tuple[int, ...]
"""Where the tokens of a block of the pool are in a cache; one block id, if blocks of both are the same."""


class LoadFailed(RuntimeError):
    """A load that stopped half-way.  `cache` is the current cache, because the one passed to `load` was donated.

    The contents of the blocks to be loaded are undefined; all other blocks are unchanged.
    """

    def __init__(self, message: str, cache: KVCache):
        super().__init__(message)
        self.cache = cache


@dataclass
class Stats:
    """Counts since the pool was made.  They count blocks, unless the name ends in bytes or seconds.

    An engine looks up prefixes itself, so hits and misses stay 0 here; see its `prefix_stats`.  Transfers between
    device and host are asynchronous and are not timed here; `jaxkv bench offload` measures them.
    """

    stored: int = 0
    """Blocks copied from a cache to host memory."""
    stored_bytes: int = 0
    rejected: int = 0
    """Blocks that were not stored, because all memory was held."""
    loaded: int = 0
    """Blocks copied from host memory to a cache, including those that came from disk."""
    loaded_bytes: int = 0
    host_hits: int = 0
    """Keys that `matched` found in host memory."""
    disk_hits: int = 0
    """Keys that `matched` found on disk only."""
    misses: int = 0
    """Keys passed to `matched` that it did not count, because they or earlier ones were missing."""
    evicted: int = 0
    """Blocks removed from host memory to make room."""
    written: int = 0
    """Blocks written from host memory to disk."""
    written_bytes: int = 0
    write_seconds: float = 0.0
    """Time of writes, which run in the background."""
    read: int = 0
    """Blocks read from disk to host memory."""
    read_bytes: int = 0
    read_seconds: float = 0.0
    damaged: int = 0
    """Damaged files that were found on disk.  They are kept under another name."""

    @property
    def write_rate(self) -> float:
        """Bytes/s written to disk; 0 before the first write."""
        return self.written_bytes / self.write_seconds if self.written else 0.0

    @property
    def read_rate(self) -> float:
        """Bytes/s read from disk; 0 before the first read."""
        return self.read_bytes / self.read_seconds if self.read else 0.0


@dataclass(eq=False)
class Chunk:
    """Blocks that are transferred as one array, because every transfer costs the host about 50 us whatever its size."""

    keys: tuple[bytes, ...]
    rows: HostArray
    """[len(keys), E]."""
    written: Future | None = None
    """The write to disk; None without a disk pool."""

    @property
    def is_written(self) -> bool:
        """Whether no write to disk is pending."""
        return self.written is None or self.written.done()

    @property
    def has_arrived(self) -> bool:
        """Whether the chunk has arrived in host memory, so that reading it does not wait."""
        return isinstance(self.rows, np.ndarray) or self.rows.is_ready()  # type: ignore[missing-attribute]


class Chunks:
    """A mapping from keys of blocks to the chunks that hold them.  A chunk is added and removed as a whole."""

    def __init__(self):
        self.events = BlockEvents()
        self._places: dict[bytes, tuple[Chunk, int]] = {}
        self._chunks: dict[Chunk, None] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        """The number of blocks in all chunks."""
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks, least recently used first."""
        return iter(self._chunks)

    def place(self, key: bytes) -> tuple[Chunk, int]:
        """The chunk of a block and its row there.  KeyError if no chunk has it."""
        return self._places[key]

    def find(self, key: bytes) -> tuple[Chunk, int] | None:
        """The chunk of a block and its row there; None if no chunk has it.  Any thread may call this."""
        return self._places.get(key)

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk; none of its blocks may be in another chunk."""
        self._chunks[chunk] = None
        self._places.update((key, (chunk, row)) for row, key in enumerate(chunk.keys))
        self.events.stored(chunk.keys)

    def remove(self, chunk: Chunk) -> None:
        """Removes a chunk if it is present, also if an interrupted `add` or `remove` has left only a part of it."""
        if chunk in self._chunks:
            self.events.removed(chunk.keys)
            for key in chunk.keys:
                if key in self._places and self._places[key][0] is chunk:
                    del self._places[key]
            del self._chunks[chunk]

    def use(self, keys: Iterable[bytes]) -> None:
        """Marks blocks of a prompt as used, the first one most recently, because the others are useless without it."""
        for key in reversed(list(keys)):
            if key in self._places:
                chunk, _ = self._places[key]
                del self._chunks[chunk]
                self._chunks[chunk] = None


@dataclass(eq=False)
class Piece:
    """A chunk on its way from host memory to the device."""

    rows: jax.Array
    """[n, E], on the device as soon as they have arrived."""
    keys: tuple[bytes, ...]
    """Their keys."""
    pulled: list[bytes]
    """Those of them that are pulled."""

    @property
    def has_arrived(self) -> bool:
        """Whether using the rows does not wait."""
        return self.rows.is_ready()  # type: ignore[missing-attribute]


@dataclass(eq=False)
class Progress:
    """What a pull still needs from its pool."""

    missing: dict[bytes, int]
    """Keys that have not arrived, which the pool holds."""
    pieces: deque[Piece] = field(default_factory=deque)

    def in_flight(self, least: int) -> int:
        """How much is on its way to the device, in blocks, where each transfer counts as so many at least."""
        return sum(max(len(piece.keys), least) for piece in self.pieces)


class HostPool(Connector):
    """Blocks in host memory, by key.

    Each store or load is a few large transfers, which are asynchronous and overlap with computation on the device.
    Their order follows from the data flow.  A store contains all writes to the cache before it and none after it, so
    blocks may be overwritten as soon as `store` returns.  Operations on the cache that `load` returns see the loaded
    blocks.  A block can be loaded as soon as `store` returns; the load waits until the block has arrived.

    The blocks of a store are split into chunks, each of which is held, evicted and transferred as a whole.  Holding one
    block of a chunk therefore holds all of them, and loading some of its blocks transfers all of them.  When the pool
    is full, the least recently used chunks that are not held are evicted.

    With a disk pool, blocks are also written to disk in the background, and can be loaded from there after eviction.

    A pool is not thread-safe: only one thread at a time may use it, apart from `rows` and `events`.

    Blocks of the pool may have another size, order, padding or dtype than those of the caches (`cache_layout`), for
    example to share a folder of `DiskPool` between caches of several block sizes.  Keys are always those of the pool's
    blocks: `prefix_keys` with its block size and its `layout.fingerprint`.  Blocks are then converted on the device, by
    gathers and scatters of entries, which take longer than copies of whole blocks.

    Args:
      layout: the layout of the blocks that the pool stores: that of the cache, or the `PackedLayout` if the cache is a
        view of one of its groups.  Blocks are moved with all groups.
      num_blocks: the most blocks in host memory.  A load of more blocks from disk is divided into portions that fit.
        If all blocks of the pool are held, such a load uses memory for one additional chunk (an eighth of `num_blocks`,
        at least one block).  On GPUs, all memory is pinned when the pool is made, which takes about half a second per
        GB.
      cache_layout: the layout of the caches, if it differs from `layout`: any that `jaxkv.convert_blocks` converts,
        with one block table.
      disk: a pool on disk for the same layout, which can hold more blocks and keeps them after the process ends.
      devices: over how many devices blocks are divided, each of which stores and loads its part
        (`model.cache_devices`).
      parts: which of the parts of a block the pool has, if the devices belong to several processes: those of the
        devices of this process (`model.cache_parts`).  Default: the parts of all devices.
      device: the device whose host memory is used; by default the first device of this process.
      implementation: the `implementation` with which `read_blocks` and `write_blocks` are called.

    Raises:
      ValueError: `num_blocks` is not a positive int, `layout` is not a layout or is one of context parallelism over
        other than `devices`, `parts` are not some of the parts, `cache_layout` cannot be converted to `layout`, or
        `disk` has a different layout or other parts.
      MemoryError: not enough memory can be pinned.
    """

    def __init__(
        self,
        layout: Layout,
        num_blocks: int,
        *,
        cache_layout: Layout | None = None,
        disk: DiskPool | None = None,
        devices: int = 1,
        parts: Sequence[int] | None = None,
        device: jax.Device | None = None,
        implementation=None,
    ):
        self.layout, self.disk, self.devices = layout, disk, devices
        self.num_blocks = positive_int("num_blocks", num_blocks, below=None)
        self.parts = checked_parts(parts, devices)
        self.row = row_of(layout, devices, self.parts)
        """Shape and dtype of a block, of its parts that the pool has."""
        self.block_nbytes = self.row.size * self.row.dtype.itemsize
        if not isinstance(disk, DiskPool | None):
            raise ValueError(f"`disk` is a {type(disk).__name__}: expected a DiskPool, or None")
        if disk is not None and disk.layout.fingerprint != layout.fingerprint:
            raise ValueError(f"`disk` holds other blocks\n{disk.layout}\nexpected those of\n{layout}")
        if disk is not None and disk.devices != devices:
            raise ValueError(
                f"`disk` holds blocks that are divided over {disk.devices} devices: expected {devices}, `devices`"
            )
        if disk is not None and disk.parts != self.parts:
            raise ValueError(f"`disk` has the parts {disk.parts} of blocks: expected {self.parts}, `parts`")
        self.cache_layout = layout if cache_layout is None else cache_layout
        self._conversion = None if cache_layout is None else transfers.conversion_between(cache_layout, layout)
        if self._conversion is not None and devices > 1:
            raise ValueError(
                f"`cache_layout` has other blocks than `layout`, and `devices` is {devices}: expected the same blocks, "
                "as those of several devices are not converted"
            )
        self._units = 1 if self._conversion is None else self._conversion.units_of_row
        """The units of a block of the pool.  Blocks of pool and cache consist of whole units of tokens."""
        self.stats = Stats()
        self._implementation = implementation
        longest = max(1, min(CHUNK_BYTES // self.block_nbytes, self.num_blocks // POOL_CHUNKS))
        self._chunk_blocks = 1 << (longest.bit_length() - 1)
        self._chunks = Chunks()
        self._holds: Counter[bytes] = Counter()
        self._moving: dict[bytes, int] = {}
        """Keys that the current store or load needs.  If an interrupted one has left keys, the next one drops them."""
        self._pulls: list[Progress] = []
        self._held = ChainMap(self._holds, self._moving)
        """All keys that must not be evicted, those of pulls included."""
        self._arriving: deque[Chunk] = deque()
        """Stores that may be in flight, oldest first."""
        self._writer = ThreadPoolExecutor(1, "jaxkv-disk-writer")
        self._reader = ThreadPoolExecutor(1, "jaxkv-disk-reader")
        pinned = int(self.num_blocks * self.block_nbytes * (1 + SLACK))
        transfers.reserve(pinned, device or jax.local_devices()[0])

    def __len__(self) -> int:
        """Blocks in host memory."""
        return len(self._chunks)

    def __repr__(self):
        return f"HostPool({len(self)} of {self.num_blocks} blocks of {self.block_nbytes} bytes, disk={self.disk})"

    @override
    def __contains__(self, key):
        """Whether `load` would find the block, in host memory or on disk.  ValueError if `key` cannot be a key."""
        return self._has(checked_key("key", key))

    def _has(self, key: bytes) -> bool:
        return key in self._chunks or (self.disk is not None and key in self.disk)

    @property
    def fingerprint(self) -> str:
        """Pools whose blocks are interchangeable have the same: that of the layout, if the pool has all parts."""
        return blocks_fingerprint(self.layout, self.devices, self.parts)

    @property
    def events(self) -> BlockEvents:
        """Which blocks come to host memory and leave it."""
        return self._chunks.events

    def rows(self, keys: Iterable[bytes]) -> tuple[list[bytes], np.ndarray]:
        """Copies blocks from host memory.  Any thread may call this while another uses the pool.

        Args:
          keys: keys of blocks.

        Returns:
          Those keys [n] whose blocks are in host memory, and the blocks [n, E] of the layout's dtype.  If a block is
          still being stored, waits until it has arrived.

        Raises:
          JaxRuntimeError: a block could not be stored, because its transfer failed.
        """
        found = {key: place for key in keys if (place := self._chunks.find(key)) is not None}
        parts = defaultdict[Chunk, list[tuple[int, int]]](list)
        for n, (chunk, row) in enumerate(found.values()):
            parts[chunk].append((n, row))
        rows = np.empty((len(found), *self.row.shape), self.row.dtype)
        for chunk, pairs in parts.items():
            values = transfers.to_numpy(chunk.rows)
            for n, row in pairs:
                rows[n] = values[row]
        return list(found), rows

    @property
    def blocks_in_flight(self) -> int:
        """The number of blocks that can be stored without waiting for earlier stores; a good number per store."""
        return STORES_IN_FLIGHT * self._chunk_blocks

    def matched(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys whose blocks are in host memory or on disk; counts hits and misses in `stats`.

        To load these blocks later, `hold` them: blocks may be evicted from disk in the background.  ValueError if one
        of `keys` cannot be a key.
        """
        keys, found = checked_keys(keys), 0
        for key in keys:
            if not self._has(key):
                break
            found += 1
            if key in self._chunks:
                self.stats.host_hits += 1
            else:
                self.stats.disk_hits += 1
        self.stats.misses += len(keys) - found
        return found

    @override
    def offer(self, cache, blocks, keys):
        self.store(cache, blocks, keys, wait=False)

    @override
    def pull(self, keys, sharding):
        return HostPull(self, keys, sharding)

    def begin_pull(self, progress: Progress) -> None:
        """Holds the blocks of a pull."""
        self._pulls.append(progress)
        self._held.maps = [*self._held.maps, progress.missing]

    def end_pull(self, progress: Progress) -> None:
        """Ends that hold.  What has not arrived is never returned by the pull."""
        self._pulls = [other for other in self._pulls if other is not progress]
        self._held.maps = [keys for keys in self._held.maps if keys is not progress.missing]
        progress.pieces.clear()

    @property
    def has_room_for_transfers(self) -> bool:
        """Whether pulls may start a transfer to the device: not if a whole chunk or more is on its way."""
        least = self._chunk_blocks // TRANSFERS_PER_CHUNK
        return sum(progress.in_flight(least) for progress in self._pulls) < self._chunk_blocks

    def store(
        self, cache: KVCache, blocks: Sequence[int] | np.ndarray, keys: Sequence[bytes], *, wait: bool = True
    ) -> int:
        """Copies blocks of a cache to host memory.  A block whose key is already stored is only marked as used.

        Args:
          cache: the cache to read from; it is not donated.
          blocks: ids [n].  If blocks of the cache have another size than those of the pool, the ids [m] of the blocks
            that hold the tokens of `keys`, consecutive tokens of one prompt: as many as are needed.  The first block
            begins with the first token.
          keys: their keys [n], the most important first: these are stored first and evicted last.
          wait: whether to wait for the disk, if blocks must be evicted that have not been written to it.  Without, such
            blocks are not evicted.

        Returns:
          The number of leading keys that are now in host memory.  It is less than n if no memory is left.

        Raises:
          ValueError: `cache` has other blocks than this pool, `blocks` and `keys` do not match, or one of `keys` is not
            1 to 64 bytes.
          JaxRuntimeError: a transfer of this store or an earlier one failed; the blocks of the failed store are not
            stored.
        """
        units, keys = self._checked(cache, blocks, keys)
        new = {key: place for key, place in zip(keys, units, strict=True) if key not in self._chunks}
        with self._holding(keys):
            room = self._make_room(len(new), wait=wait)
        self.stats.rejected += len(new) - room
        stored, cache = tuple(islice(new, room)), addressable_part(cache)
        for part in (stored[among] for among in in_powers_of_two(len(stored), self._chunk_blocks)):
            self._wait_for_stores(self.blocks_in_flight - len(part))
            staged = self._read_rows(cache, np.asarray([new[key] for key in part], np.int32))
            self._add(Chunk(part, transfers.to_host(staged)))
        self._chunks.use(keys)
        return next((count for count, key in enumerate(keys) if key not in self._chunks), len(keys))

    def load(self, cache: KVCache, blocks: Sequence[int], keys: Sequence[bytes]) -> KVCache:
        """Copies blocks from host memory or from disk to a cache.

        Args:
          cache: the cache; it is donated.
          blocks: distinct ids [n], to be overwritten; [m] as in `store` if blocks have another size.  A last block of
            which `keys` fill only a part keeps the contents of the rest.
          keys: the keys [n] of the contents to load.

        Returns:
          The cache with the loaded blocks.  Its buffer is committed to its device.  The buffer that is passed in should
          be committed, too; otherwise, programs that use both are compiled twice.

        Raises:
          KeyError: a block is missing; the message names its key, and `cache` is unchanged.
          DamagedBlock: a block on disk is damaged and has been dropped; `cache` is unchanged.
          OSError: a block on disk cannot be read at present; `cache` is unchanged.
          LoadFailed: a transfer failed, or one of the errors above occurred after a portion had been loaded; the error
            holds the cache.
          ValueError: `cache` has other blocks than this pool, `blocks` and `keys` do not match, or one of `keys` is not
            1 to 64 bytes.
        """
        units, keys = self._checked(cache, blocks, keys, distinct=True)
        targets = defaultdict(list)
        for key, place in zip(keys, units, strict=True):
            targets[key].append(place)
        try:
            loaded = self._loaded(addressable_part(cache), targets)
        except LoadFailed as error:
            error.cache = with_part(cache, error.cache)
            raise
        self.stats.loaded += len(keys)
        self.stats.loaded_bytes += len(keys) * self.block_nbytes
        return with_part(cache, loaded)

    def _loaded(self, cache: KVCache, targets: Mapping[bytes, Sequence[Units]]) -> KVCache:
        """The cache with blocks at their targets; the arguments and errors are those of `load`."""
        given, keys = cache, list(targets)
        waiting = dict.fromkeys(keys)
        with self._holding(waiting):
            self._check_present(keys)
            while waiting:
                try:
                    if cache is not given:
                        jax.block_until_ready(cache.buffer)  # the previous portion has left host memory
                    places = self._places(waiting, one_array(cache.buffer).sharding)
                    cache = self._moved(cache, places, targets)
                    self._chunks.use(keys)
                    for key in places:
                        del waiting[key], self._moving[key]
                    del places  # its references would keep chunks in host memory
                except LoadFailed:
                    raise
                except Exception as error:
                    if cache is given:
                        raise  # as it was
                    raise LoadFailed(f"a load of {len(keys)} blocks stopped half-way: {error}", cache) from error
        return cache

    @override
    def warm_up(self, cache):
        """Compiles the programs of stores and loads by running them without blocks.

        Args:
          cache: the cache; it is donated.

        Returns:
          The cache, unchanged.

        Raises:
          ValueError: `cache` has other blocks than this pool.
        """
        check_exchange(cache, self.cache_layout, self.devices, self.parts)
        whole, cache = cache, addressable_part(cache)
        for length in (1 << n for n in range(self._chunk_blocks.bit_length())):
            nowhere = np.full((length, self._units), SKIPPED, np.int32)
            rows = transfers.to_host(self._read_rows(cache, nowhere))
            rows = transfers.to_device(rows, one_array(cache.buffer).sharding)
            cache = self._write_rows(cache, nowhere, rows)
        return with_part(whole, cache)

    def _read_rows(self, cache: KVCache, units: np.ndarray) -> jax.Array:
        """Blocks of the pool from units of the cache, int32 [n, units of a block]: rows [n, E]."""
        if self._conversion is None:
            return read_rows(cache, units[:, 0], implementation=self._implementation)
        return transfers.read_converted(self._conversion, cache, units)

    def _write_rows(self, cache: KVCache, units: np.ndarray, rows: jax.Array) -> KVCache:
        """The cache, which is donated, with blocks of the pool stored at units [n, units of a block]."""
        if self._conversion is None:
            return write_rows(cache, units[:, 0], rows, implementation=self._implementation)
        return transfers.write_converted(self._conversion, cache, units, rows)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Prevents the eviction of blocks until they are released as often as held.

        It prevents only evictions by this pool and its disk pool, not those by other processes that use the folder.

        Raises:
          KeyError: a block is missing; none of the others is held then.
          ValueError: one of `keys` cannot be a key.
        """
        keys = checked_keys(keys)
        with self._holding(keys):  # hold before checking, because the disk pool evicts in the background
            self._check_present(keys)
            self._holds.update(keys)

    @contextmanager
    def _holding(self, keys: Collection[bytes]) -> Iterator[None]:
        """Prevents the eviction of blocks during the body, or until the body removes them from `_moving`."""
        self._moving.clear()
        self._moving.update(dict.fromkeys(keys, 1))
        try:
            yield
        finally:
            self._moving.clear()

    def release(self, keys: Iterable[bytes]) -> None:
        """Ends one hold of each block.

        Raises:
          KeyError: a block is not held as often as it is in `keys`; none of the others is released then.
          ValueError: one of `keys` cannot be a key.
        """
        released = Counter(checked_keys(keys))
        for key, count in released.items():
            if (held := self._holds[key]) < count:
                often = f" {count} times, but {held}" if held else ""
                raise KeyError(f"{key.hex()} is not held{often}")
        for key, count in released.items():
            self._holds[key] -= count
            if not self._holds[key]:
                del self._holds[key]

    def flush(self) -> None:
        """Waits until all stores have arrived in host memory, and on disk if there is a disk pool.

        Raises:
          OSError: blocks could not be written; the next `flush` tries again.
          JaxRuntimeError: a transfer failed; its blocks are not stored.
        """
        self._wait_for_stores(0)
        for chunk in self._chunks:
            if chunk.written is not None and chunk.written.done() and chunk.written.exception():
                self._write_later(chunk)  # the disk may have room by now
        in_flight = [chunk.written for chunk in self._chunks if chunk.written is not None]
        wait(in_flight)
        for written in in_flight:
            written.result()  # raises the error of the write

    @override
    def drop_failed_offers(self):
        """Waits until all stores have arrived in host memory, and removes the blocks of those that failed.

        Unlike `flush`, it does not raise their errors.  Use it after a program that computed the cache has failed.
        """
        while self._arriving:
            with suppress(Exception):
                self._wait_for_stores(0)

    def _checked(
        self, cache: KVCache, blocks: Sequence[int] | np.ndarray, keys: Sequence[bytes], *, distinct: bool = False
    ) -> tuple[list[Units], list[bytes]]:
        """Where the tokens of each key are in the cache, and `keys` as a list; ValueError unless all is valid."""
        check_exchange(cache, self.cache_layout, self.devices, self.parts)
        ids, keys = block_ids("blocks", blocks, cache.layout.num_blocks, distinct=distinct), checked_keys(keys)
        return self._units_of(ids.tolist(), len(keys)), keys

    def _units_of(self, blocks: Sequence[int], count: int) -> list[Units]:
        """Where the tokens of `count` keys are in a cache whose `blocks` hold these tokens, one after the other.

        ValueError unless these are as many blocks as are needed.
        """
        per_block = 1 if self._conversion is None else self._conversion.units_of_block
        if len(blocks) != (needed := -(-count * self._units // per_block)):
            expected = "as many"
            if self._conversion is not None:
                own, theirs = self._conversion.dst_size, self._conversion.src_size
                expected = f"{needed} ids, because keys are of blocks of {own} tokens, and ids of blocks of {theirs}"
            raise ValueError(f"`blocks` has {len(blocks)} ids and `keys` {count}: expected {expected}")
        units = [block * per_block + unit for block in blocks for unit in range(per_block)]
        return [tuple(units[n * self._units : (n + 1) * self._units]) for n in range(count)]

    def _check_present(self, keys: Iterable[bytes]) -> None:
        missing = next((key for key in keys if not self._has(key)), None)
        if missing is not None:
            raise KeyError(
                f"{missing.hex()} is not in the pool, which has the first `matched(keys)` blocks of a prompt"
            )

    def _add(self, chunk: Chunk) -> None:
        self._arriving.append(chunk)
        self._chunks.add(chunk)
        self._write_later(chunk)
        self.stats.stored += len(chunk.keys)
        self.stats.stored_bytes += len(chunk.keys) * self.block_nbytes

    def _make_room(self, count: int, *, wait: bool = True) -> int:
        """Evicts chunks until `count` blocks fit or only held chunks are left; returns how many of the blocks fit.

        Without `wait`, chunks that have not been written to disk are not evicted.
        """
        self._wait_for_stores(self.blocks_in_flight)
        free = self.num_blocks - len(self._chunks)
        for chunk in list(self._chunks) if count > free else []:
            if free >= count:
                break
            if any(key in self._held for key in chunk.keys) or not (wait or chunk.is_written):
                continue
            self._wait_for_disk(chunk)
            self._chunks.remove(chunk)
            self.stats.evicted += len(chunk.keys)
            free = self.num_blocks - len(self._chunks)  # not all keys of a chunk whose addition was interrupted counted
        return min(count, free)

    def _wait_for_stores(self, most: int) -> None:
        """Waits until at most `most` blocks are being stored.  A failed store is removed, and its error raised."""
        while self._arriving and (
            self._arriving[0].has_arrived or sum(len(chunk.keys) for chunk in self._arriving) > most
        ):
            chunk = self._arriving[0]
            try:
                jax.block_until_ready(chunk.rows)
            except Exception:
                self._chunks.remove(chunk)
                self._arriving.popleft()
                raise
            self._arriving.popleft()

    def _wait_for_disk(self, chunk: Chunk) -> None:
        """Waits until the blocks of a chunk are on disk.  A failed write only warns: the memory is needed anyway."""
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
        """Writes all blocks of a chunk that can be written, then raises the first error.  Runs in the background."""
        errors = []
        for key, row in zip(chunk.keys, transfers.to_numpy(chunk.rows), strict=True):
            start = time.perf_counter()
            try:
                written = key not in disk and disk.store(key, row, held=self._held)
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
        """Chunks and rows of a portion of these blocks: those in host memory, and as many as fit from disk."""
        places = {key: self._chunks.place(key) for key in keys if key in self._chunks}
        if self.disk is None:
            return places
        absent = tuple(key for key in keys if key not in places)
        for part in (absent[among] for among in in_powers_of_two(len(absent), self._chunk_blocks)):
            fits = self._make_room(len(part)) == len(part)
            if places and not fits:
                break
            chunk = self._read(part, self.disk, sharding)
            if fits:
                self._chunks.add(chunk)
            places.update((key, (chunk, row)) for row, key in enumerate(part))
        return places

    def _read(self, keys: tuple[bytes, ...], disk: DiskPool, sharding: jax.sharding.Sharding) -> Chunk:
        """Reads blocks from disk into one array in host memory."""
        start = time.perf_counter()
        rows = np.empty((len(keys), *self.row.shape), self.row.dtype)
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
        self, cache: KVCache, places: Mapping[bytes, tuple[Chunk, int]], targets: Mapping[bytes, Sequence[Units]]
    ) -> KVCache:
        """Copies blocks from their places in host memory to their target blocks of the cache, which is donated.

        LoadFailed if a transfer fails.
        """
        moves = _moves([(place, units) for key, place in places.items() for units in targets[key]])
        try:
            arriving = None
            for chunk, units in moves:
                following = units, transfers.to_device(chunk.rows, one_array(cache.buffer).sharding)
                if arriving is not None:
                    jax.block_until_ready(arriving)  # at most two chunks at a time on the device
                    cache = self._write_rows(cache, *arriving)
                arriving = following
            if arriving is not None:
                cache = self._write_rows(cache, *arriving)
        except Exception as error:
            raise LoadFailed(f"a load of {len(places)} blocks stopped half-way: {error}", cache) from error
        return cache


class HostPull(Pull):
    """Brings blocks from a HostPool to the device while others use the cache.

    A thread reads the blocks from disk that are not in host memory.  Each poll returns what has arrived on the device,
    and starts further transfers.  Less than two chunks are on their way at a time in all pulls of the pool together,
    which is `2 * CHUNK_BYTES` at most.

    The pool keeps the blocks until they have arrived, or until the pull is released or collected as garbage.  The
    thread that uses the pool may use it in other ways in the meantime.

    Args:
      pool: the pool that has the blocks.
      keys: keys of blocks.
      sharding: that of the cache's buffer, on devices of this process.
    """

    def __init__(self, pool: HostPool, keys: Sequence[bytes], sharding: jax.sharding.Sharding):
        self._pool, self._sharding = pool, sharding
        self._keys, self._queue = tuple(keys), dict.fromkeys(keys)
        """All keys, and those whose transfer to the device has not been started."""
        self._progress = Progress(dict.fromkeys(keys, 1))
        self._reading: Future[Chunk] | None = None
        self._end = weakref.finalize(self, pool.end_pull, self._progress)
        pool.begin_pull(self._progress)
        self._read_ahead()

    @override
    def release(self):
        if self._reading is not None:
            self._reading.cancel()
        self._end()

    @override
    def poll(self, timeout):
        arrivals, pieces = [], self._progress.pieces
        # With a timeout, also waits for the transfers to the device that are in flight, however long they take.
        while pieces and (timeout or pieces[0].has_arrived):
            arrivals.append(self._arrived(pieces[0]))
            pieces.popleft()
        while self._queue and self._pool.has_room_for_transfers:
            chunk = self._in_host_memory() or self._read(0 if pieces or arrivals else timeout)
            if chunk is None:
                break
            self._copy(chunk)
            self._read_ahead()
        return arrivals

    def _arrived(self, piece: Piece) -> Arrival:
        jax.block_until_ready(piece.rows)  # raises if the transfer failed; the cache must not depend on it then
        for key in piece.pulled:
            del self._progress.missing[key]
        if not self._progress.missing:
            self._pool._chunks.use(self._keys)
        self._pool.stats.loaded += len(piece.pulled)
        self._pool.stats.loaded_bytes += len(piece.pulled) * self._pool.block_nbytes
        return Arrival(piece.keys, piece.rows)

    def _copy(self, chunk: Chunk) -> None:
        """Starts the transfer of a chunk to the device, if it has blocks of the queue."""
        pulled = [key for key in chunk.keys if key in self._queue]
        if pulled:  # none if others have stored them while they were read, and they have been copied from there
            self._progress.pieces.append(Piece(transfers.to_device(chunk.rows, self._sharding), chunk.keys, pulled))
        for key in pulled:
            del self._queue[key]

    def _in_host_memory(self) -> Chunk | None:
        """A chunk in host memory that has blocks of the queue."""
        chunks = self._pool._chunks
        return next((chunks.place(key)[0] for key in self._queue if key in chunks), None)

    def _read_ahead(self) -> None:
        """Starts to read a chunk of what is not in host memory, unless one is being read or there is no disk pool."""
        if self._reading is not None or self._pool.disk is None:
            return
        absent = tuple(key for key in self._queue if key not in self._pool._chunks)
        for first in islice(in_powers_of_two(len(absent), self._pool._chunk_blocks), 1):
            part, disk = absent[first], self._pool.disk
            self._reading = self._pool._reader.submit(self._pool._read, part, disk, self._sharding)

    def _read(self, timeout: float) -> Chunk | None:
        """What has been read from disk; None if that is not complete after `timeout` seconds."""
        self._read_ahead()
        if self._reading is None:
            raise KeyError(next(iter(self._queue)).hex())  # it was evicted from host memory, and there is no disk
        if not wait([self._reading], timeout).done:
            return None
        chunk, self._reading = self._reading.result(), None
        fits = self._pool._make_room(len(chunk.keys), wait=False) == len(chunk.keys)
        if fits and not any(key in self._pool._chunks for key in chunk.keys):
            self._pool._chunks.add(chunk)
        return chunk


def _moves(pairs: Iterable[tuple[tuple[Chunk, int], Units]]) -> list[tuple[Chunk, np.ndarray]]:
    """Each chunk with the units of the cache where each of its rows is written, int32 [rows, units of a block].

    `SKIPPED` for rows that are not.
    """
    moves: dict[Chunk, list[np.ndarray]] = {}
    for (chunk, row), units in pairs:
        targets = moves.setdefault(chunk, [])
        free = next((places for places in targets if places[row, 0] == SKIPPED), None)
        if free is None:
            free = np.full((len(chunk.keys), len(units)), SKIPPED, np.int32)
            targets.append(free)
        free[row] = units
    return [(chunk, units) for chunk, targets in moves.items() for units in targets]
