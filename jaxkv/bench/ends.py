"""Both ends of a way between two independent processes, each of which is the object of a `Peer`."""

import hashlib
import time
from collections.abc import Sequence
from itertools import batched

import jax
import numpy as np

import jaxkv
from jaxkv import offload
from jaxkv.bench.inputs import with_repeated_blocks
from jaxkv.offload.host import CHUNK_BYTES
from jaxkv.offload.remote import POLL_SECONDS
from jaxkv.offload.transfers import in_powers_of_two, to_numpy
from jaxkv.offload.transports import Ticket, Transport
from jaxkv.ops.rows import read_rows, write_rows
from jaxkv_kernels.addressing import one_array

TRANSPORTS: dict[str, type[Transport]] = {"JAX": offload.JaxTransport, "NIXL": offload.NixlTransport}
PATTERN_BLOCKS = 16
"""Blocks with distinct entries; a larger cache repeats them."""
SECONDS = 60.0
"""The most seconds that blocks may take."""
WRITTEN_AT_ONCE = 64
"""Blocks that are written to a cache by one program, as by engines."""


def filled(layout: jaxkv.CacheLayout, seed: jax.Array | int) -> jaxkv.KVCache:
    """A cache of random small numbers."""
    shape = PATTERN_BLOCKS, layout.pages.block_elements
    return with_repeated_blocks(layout, jax.random.randint(jax.random.key(seed), shape, 0, 100).astype(layout.dtype))


class End:
    """A cache on the device of this process, and the transports.

    Args:
      cache: the cache.
      blocks: ids of its blocks, which are sent or received.
    """

    def __init__(self, cache: jaxkv.KVCache, blocks: np.ndarray):
        self.cache, self.layout, self.blocks = jax.device_put(cache, jax.local_devices()[0]), cache.layout, blocks
        self.transports: dict[str, Transport] = {}
        for name, transport in TRANSPORTS.items():
            try:
                self.transports[name] = transport()
            except ImportError:  # it is not installed
                continue
        self.per_piece = max(1, CHUNK_BYTES // cache.layout.block_nbytes)
        """Blocks that are sent at once."""

    def names(self) -> list[str]:
        """The transports that are installed."""
        return [*self.transports]

    def digest(self) -> str:
        """Of the contents of the blocks."""
        rows = np.asarray(read_rows(self.cache, self.blocks))
        return hashlib.blake2b(rows.view(np.uint8).data).hexdigest()


class Source(End):
    """The process that has blocks."""

    def __init__(self, layout: jaxkv.CacheLayout, blocks: np.ndarray, authkey: bytes):
        super().__init__(jax.jit(lambda: filled(layout, 0))(), blocks)
        self.pool = offload.HostPool(layout, len(blocks))
        self.servers = {
            name: offload.BlockServer(self.pool, ("127.0.0.1", 0), authkey=authkey, transport=transport)
            for name, transport in self.transports.items()
        }
        self._offered: list[tuple[Transport, Ticket, np.ndarray]] = []

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Where the server of each transport listens."""
        return {name: server.address for name, server in self.servers.items()}

    def store(self, keys: Sequence[bytes]) -> float:
        """Copies all blocks to host memory, under these keys; returns the seconds until they have arrived."""
        jax.block_until_ready(self.cache)
        start = time.perf_counter()
        self.pool.store(self.cache, self.blocks, keys)
        self.pool.flush()
        return time.perf_counter() - start

    def copy_out(self, keys: Sequence[bytes]) -> float:
        """The seconds of copying stored blocks to the arrays that are offered, as a server does for each request."""
        start = time.perf_counter()
        for part in batched(keys, self.per_piece):
            self.pool.rows(part)
        return time.perf_counter() - start

    def offer(self, name: str, keys: Sequence[bytes]) -> list[tuple[Ticket, int]]:
        """Offers stored blocks; returns a ticket for each piece, and how many blocks it has."""
        tickets = []
        for part in batched(keys, self.per_piece):
            _, rows = self.pool.rows(part)
            ticket = self.transports[name].offer(rows)
            self._offered.append((self.transports[name], ticket, rows))
            tickets.append((ticket, len(rows)))
        return tickets

    def release(self) -> None:
        """Ends all offers, which have been fetched."""
        while self._offered:
            transport, ticket, _ = self._offered.pop()
            transport.release(ticket, fetched=True)


class Target(End):
    """The process that needs blocks."""

    def __init__(
        self, layout: jaxkv.CacheLayout, blocks: np.ndarray, authkey: bytes, addresses: dict[str, tuple[str, int]]
    ):
        super().__init__(jaxkv.KVCache.zeros(layout), blocks)
        self.remote = {
            name: offload.RemoteBlocks(
                layout, [address], authkey=authkey, transport=self.transports[name], pull_timeout=SECONDS
            )
            for name, address in addresses.items()
            if name in self.transports
        }

    def fetch(self, name: str, tickets: Sequence[tuple[Ticket, int]]) -> float:
        """The seconds of fetching offered pieces to host memory, one after the other."""
        row = self.layout.pages.block_elements
        start = time.perf_counter()
        for ticket, count in tickets:
            fetch = self.transports[name].fetch(ticket, (count, row), np.dtype(self.layout.dtype))
            while fetch.poll() is None:
                if time.perf_counter() - start > SECONDS:
                    raise TimeoutError(f"blocks have not arrived by the transport {name} in {SECONDS:.0f} s")
                time.sleep(POLL_SECONDS)
        return time.perf_counter() - start

    def load(self) -> float:
        """The seconds of writing as many blocks from host memory to the cache."""
        row = self.layout.pages.block_elements
        pieces = [np.ones((len(ids), row), self.layout.dtype) for ids in batched(self.blocks, self.per_piece)]
        jax.block_until_ready(self.cache)
        start = time.perf_counter()
        for ids, rows in zip(batched(self.blocks, self.per_piece), pieces, strict=True):
            self._write(np.asarray(ids), rows)
        jax.block_until_ready(self.cache)
        return time.perf_counter() - start

    def pull(self, name: str, keys: Sequence[bytes]) -> float:
        """Waits until the source offers blocks, and pulls them to the cache; returns the seconds of the pull."""
        remote, ids = self.remote[name], dict(zip(keys, self.blocks, strict=True))
        if not remote.wait_for(keys, SECONDS):
            raise TimeoutError(f"blocks have not been offered for the transport {name} in {SECONDS:.0f} s")
        start = time.perf_counter()
        pull, missing = remote.pull(keys, one_array(self.cache.buffer).sharding), set(keys)
        while missing:
            if time.perf_counter() - start > SECONDS:
                raise TimeoutError(f"blocks have not arrived by the transport {name} in {SECONDS:.0f} s")
            for found, rows in pull.poll(SECONDS):
                self._write(np.asarray([ids[key] for key in found]), to_numpy(rows))
                missing.difference_update(found)
        pull.release()
        jax.block_until_ready(self.cache)
        return time.perf_counter() - start

    def _write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Writes blocks as an engine does."""
        for part in in_powers_of_two(len(ids), WRITTEN_AT_ONCE):
            self.cache = write_rows(self.cache, ids[part], rows[part])
