"""The engine's access to connectors.  Failures there are logged and cost time, but never fail a request."""

import logging
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.dispatch import Implementations
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.offload.connector import Arrival, Connector, Pull
from jaxkv.offload.events import BlockEvents
from jaxkv.offload.host import HostPool
from jaxkv.offload.transfers import SKIPPED, check_parts, check_rows, in_powers_of_two, row_of
from jaxkv.ops.rows import addressable_part, devices_of, parts_of, with_part, write_rows
from jaxkv.serving.exchange import Exchange
from jaxkv_kernels.addressing import one_array

_log = logging.getLogger("jaxkv")

LONGEST_WRITE = 64
"""The most blocks of a NumPy array that are written to the cache by one program."""


@dataclass(eq=False)
class OpenPull:
    """A pull that has not been released."""

    connector: Connector
    pull: Pull
    missing: set[bytes]
    """The keys of the blocks that have not arrived."""
    last_arrival: float = field(default_factory=time.monotonic)
    """When the last block arrived or, before that, when the pull began; by `time.monotonic`."""

    def poll(self, timeout: float) -> Sequence[Arrival]:
        """What has arrived since the last call.  Raises an Exception if the pull cannot be completed."""
        arrivals, now = self.pull.poll(timeout), time.monotonic()
        if arrivals:
            self.last_arrival = now
            self.missing.difference_update(key for keys, _ in arrivals for key in keys)
        elif now - self.last_arrival > self.connector.pull_timeout:
            name = type(self.connector).__name__
            raise TimeoutError(f"nothing has arrived from {name} for {now - self.last_arrival:.1f} s")
        return arrivals

    def release(self) -> None:
        """Ends the pull."""
        try:
            self.pull.release()
        except Exception as error:
            _log.warning("a pull of %s was not released: %s", type(self.connector).__name__, error)


class Load:
    """Blocks that connectors bring into a cache while others use it.

    Args:
      contents: ids of distinct blocks of the cache, to be overwritten, by the key of the content to load.
    """

    def __init__(self, contents: Mapping[bytes, int]):
        self.contents = dict(contents)
        self.missing = set(contents)
        """Keys of the blocks that have not been written to the cache, or to the part of it that this process has."""
        self.pulls: list[OpenPull] = []
        self.has_failed = False
        """Whether it has failed, in any process."""
        self.is_done = False
        """Whether all blocks have been written to the cache, in all processes."""

    def cancel(self) -> None:
        """Ends the load.  What it has not written to the cache by now is never written."""
        while self.pulls:
            self.pulls.pop().release()


class BlocksOfAll(Container[bytes]):
    """Blocks that the connectors of all processes have.  The first look-up exchanges what each of them has.

    Args:
      keys: the keys that may be looked up, the same blocks in all processes.
      own: those that this process has.
      exchange: that of the processes.
    """

    def __init__(self, keys: Iterable[bytes], own: Container[bytes], exchange: Exchange):
        self._keys, self._own, self._exchange = tuple(keys), own, exchange

    def __contains__(self, key: object) -> bool:
        return key in self._found

    @cached_property
    def _found(self) -> set[bytes]:
        every = self._exchange.all_gather("".join("01"[key in self._own] for key in self._keys))
        return {key for key, *each in zip(self._keys, *every, strict=True) if "0" not in each}


class Tiers:
    """The connectors of an engine, in the order in which blocks are looked up.

    If the cache is on devices of several processes, each process stores and loads its part of the blocks, by a host
    pool of its own.  Which blocks a pool has depends on its size, on when transfers and writes to disk are complete,
    and on what happens to files.  Processes therefore agree on which blocks a request finds, and on whether a load has
    failed or is done.  Everything else that they decide follows from that and from the requests.

    Args:
      connectors: the connectors.
      cache: the engine's cache.
      layout: its layout, that of the model.
      implementation: of the operation that writes blocks to the cache.

    Raises:
      ValueError: a connector cannot exchange blocks with the cache; or the cache is on devices of several processes,
        and a connector is not a host pool, or other processes have no part of the cache.
    """

    def __init__(
        self,
        connectors: Sequence[Connector],
        cache: KVCache,
        layout: CacheLayout | PackedLayout,
        implementation: Implementations | None,
    ):
        self._connectors, self._implementation = tuple(connectors), implementation
        self._lost: set[bytes] = set()
        """Keys that could not be loaded: treated as absent until they are offered again."""
        self.failures = 0
        for n, connector in enumerate(self._connectors):
            _check(f"connectors[{n}]", connector, cache, layout)
        self._row = row_of(layout, devices_of(cache), parts_of(cache))
        self.exchange: Exchange | None = None
        """By which processes agree, if there are several."""
        if connectors and (processes := _processes_of(cache)) > 1:
            if processes < jax.process_count():
                raise ValueError(
                    f"`connectors` are given, and the cache is on devices of {processes} of {jax.process_count()} "
                    "processes: expected a model on devices of all processes, as they agree on what is loaded"
                )
            addressable_part(cache)  # ValueError if the mesh is not supported
            self.exchange = Exchange()

    @property
    def has_connectors(self) -> bool:
        """Whether there is any connector."""
        return bool(self._connectors)

    @property
    def events(self) -> list[BlockEvents]:
        """The events of the host pools among the connectors."""
        return [connector.events for connector in self._connectors if isinstance(connector, HostPool)]

    def warm_up(self, cache: KVCache) -> KVCache:
        """Compiles the programs of connectors."""
        for connector in self._connectors:
            cache = connector.warm_up(cache)
        return cache

    def __contains__(self, key: bytes) -> bool:
        if key in self._lost:
            return False
        try:
            return any(key in connector for connector in self._connectors)
        except Exception as error:
            self._failed("were not looked up", 1, error)
            return False

    def blocks_of(self, keys: Iterable[bytes]) -> Container[bytes]:
        """Those of these blocks that can be loaded.

        With several processes, the result remains what they had at the first look-up, so that a request which waits for
        long costs one exchange.  The load fails if one of them has lost a block by then.
        """
        return self if self.exchange is None else BlocksOfAll(keys, self, self.exchange)

    def offer(self, cache: KVCache, contents: Mapping[bytes, int]) -> None:
        """Offers blocks of the cache, given by key, to the connectors that do not have them."""
        for connector in self._connectors if contents else ():
            try:
                if new := [key for key in contents if key not in connector]:
                    connector.offer(cache, np.asarray([contents[key] for key in new], np.int32), new)
                self._lost.difference_update(contents)
            except Exception as error:
                self._failed("were not stored", len(contents), error)

    def begin(self, load: Load, cache: KVCache) -> None:
        """Begins to load blocks into the cache, which `advance` continues."""
        left = dict.fromkeys(load.contents)
        sharding = one_array(addressable_part(cache).buffer).sharding
        try:
            for connector in self._connectors:
                if keys := [key for key in left if key in connector]:
                    pull = connector.pull(keys, sharding)
                    load.pulls.append(OpenPull(connector, pull, set(keys)))
                    for key in keys:
                        del left[key]
            if left:
                raise KeyError(next(iter(left)).hex())
        except Exception as error:
            self._load_failed(load, error)

    def advance(self, cache: KVCache, loads: Collection[Load], *, timeout: float) -> KVCache:
        """Writes to the cache what has arrived for loads, and sets `has_failed` or `is_done` of those that have ended.

        Args:
          cache: the cache; it is donated.
          loads: the loads.
          timeout: the most seconds to wait for one of them if nothing has arrived.

        Returns:
          The cache.  The contents of the blocks of loads that failed are undefined.
        """
        if not loads:
            return cache
        arrived = {load: self._poll(load, 0) for load in loads}
        awaited = next((load for load in loads if not load.has_failed), None)
        if timeout and awaited is not None and not any(arrived.values()):
            arrived[awaited] = self._poll(awaited, timeout)
        part = addressable_part(cache)
        for load, arrivals in arrived.items():
            part = self._write(part, load, arrivals)
        self._agree(loads)
        return with_part(cache, part)

    def _agree(self, loads: Collection[Load]) -> None:
        """Has loads fail that have failed in any process, and be done if they are done in all."""
        own = [None if load.has_failed else not load.missing for load in loads]
        every = [own] if self.exchange is None else self.exchange.all_gather(own)
        for load, *states in zip(loads, *every, strict=True):
            load.is_done = all(states)
            if None in states and not load.has_failed:
                load.has_failed = True
                error = RuntimeError(f"process {states.index(None)} could not load them")
                self._failed("were not loaded; they are computed instead", len(load.contents), error)

    def _poll(self, load: Load, timeout: float) -> list[Arrival]:
        """What has arrived for a load.  Releases the pulls that are complete."""
        arrivals: list[Arrival] = []
        try:
            for opened in load.pulls.copy():
                new = opened.poll(timeout)
                for keys, rows in new:
                    check_rows(f"what {type(opened.connector).__name__} has sent", rows, len(keys), self._row)
                arrivals += new
                if not opened.missing:
                    load.pulls.remove(opened)
                    opened.release()
        except Exception as error:
            self._load_failed(load, error)
        return [] if load.has_failed else arrivals

    def _write(self, cache: KVCache, load: Load, arrivals: Sequence[Arrival]) -> KVCache:
        """Writes blocks to the cache, which is donated.  Raises only if that has lost the cache."""
        try:
            for keys, rows in arrivals:
                ids = np.asarray([load.contents.get(key, SKIPPED) for key in keys], np.int32)
                # A program is compiled for each length.  NumPy arrays may have any, and are divided for nothing.
                divided = in_powers_of_two(len(ids), LONGEST_WRITE)
                for part in divided if isinstance(rows, np.ndarray) else [slice(None)]:
                    cache = write_rows(cache, ids[part], rows[part], implementation=self._implementation)
                load.missing.difference_update(keys)
        except Exception as error:
            if one_array(cache.buffer).is_deleted():
                raise
            self._load_failed(load, error)
        return cache

    def leave_others(self) -> None:
        """RuntimeError if other processes load blocks together with this one, after an exception in a step."""
        if self.exchange is not None:
            self.exchange.leave()
            raise RuntimeError("one of several processes cannot be restored without the others")

    def drop_failed_offers(self) -> None:
        """Removes from connectors what a failed program has computed."""
        for connector in self._connectors:
            try:
                connector.drop_failed_offers()
            except Exception as error:
                self._failed("of a failed step may not have been forgotten", 0, error)

    def _load_failed(self, load: Load, error: Exception) -> None:
        load.has_failed = True
        self._failed("were not loaded; what cannot be read is computed instead", len(load.contents), error)
        if all(key in self for key in load.missing):  # the error does not say which of them cannot be loaded
            self._lost.update(load.missing)

    def _failed(self, what: str, count: int, error: Exception) -> None:
        self.failures += 1
        _log.warning("%d blocks %s: %s: %s", count, what, type(error).__name__, error)


def _processes_of(cache: KVCache) -> int:
    """The number of processes whose devices have the cache."""
    return len({device.process_index for device in one_array(cache.buffer).sharding.device_set})


def _check(name: str, connector: Connector, cache: KVCache, layout: CacheLayout | PackedLayout) -> None:
    """ValueError unless a cache, which has `layout`, can exchange blocks with a connector."""
    if not isinstance(connector, Connector):
        raise ValueError(
            f"`{name}` is a {type(connector).__name__}: expected a Connector, such as a HostPool (pass a DiskPool as "
            "its `disk`)"
        )
    if isinstance(connector, HostPool) and connector.cache_layout.fingerprint != connector.layout.fingerprint:
        raise ValueError(
            f"`{name}` stores other blocks than the engine has, by keys of their own\n{connector.layout}\nexpected a "
            f"pool without `cache_layout`, as the engine has only the keys of its own blocks\n{layout}"
        )
    if connector.layout.fingerprint != layout.fingerprint:
        raise ValueError(
            f"`{name}` has other blocks\n{connector.layout}\nexpected those of `model.layout` with the engine's "
            f"`block_size` and `order`\n{layout}"
        )
    if connector.devices != (devices := devices_of(cache)):
        raise ValueError(
            f"`{name}` has blocks that are divided over {connector.devices} devices: expected `devices={devices}` (the "
            "model's `cache_devices`), as those of the cache"
        )
    if _processes_of(cache) > 1 and not isinstance(connector, HostPool):
        raise ValueError(
            f"`{name}` is a {type(connector).__name__}, and the cache is on devices of several processes: expected a "
            "HostPool, one in each process"
        )
    if isinstance(connector, HostPool):
        check_parts(f"`{name}`", connector.parts, cache)
