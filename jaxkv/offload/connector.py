"""`Connector`: where an engine finds blocks that its cache does not have, and offers its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.offload.transfers import HostArray, Layout


class Arrival(NamedTuple):
    """Blocks that a pull has brought."""

    keys: Sequence[bytes]
    """The keys of n blocks.  Those that were not pulled are ignored."""
    rows: HostArray
    """[n, E] of the layout's dtype, as `read_rows` returns them: a NumPy array, or a JAX array that is ready.  It
    belongs to the engine from now on: never write to its memory again, not even after `release`."""


class Pull(ABC):
    """Blocks on their way to an engine, from `Connector.pull`.  Its methods are called by the engine's thread."""

    @abstractmethod
    def poll(self, timeout: float) -> Sequence[Arrival]:
        """The blocks that have arrived since the last call, in any order and number.

        The engine calls this once per step, and writes what it returns to the cache at once.

        Args:
          timeout: the most seconds to wait if nothing has arrived.  It is 0 if the engine has other work.

        Raises:
          Exception: of any kind, if the pull cannot be completed.  The engine logs it in one line, releases the pull,
            and computes the blocks, also those that have arrived.
        """

    @abstractmethod
    def release(self) -> None:
        """Ends the pull: what has not arrived by now is not needed.

        The engine calls this once, when all blocks have arrived, when the pull has failed or nothing has arrived for
        `Connector.pull_timeout` seconds, or when the request has been cancelled.  It must not raise an exception.
        """


class Connector(ABC):
    """Blocks outside the cache of an engine: in host memory, on disk, in another process or on another machine.

    Blocks are identified by keys of 32 bytes (`jaxkv.offload.prefix_keys`), each of which may have any value.  They
    depend on the model, the layout, the salt and all tokens up to the end of the block.  Equal keys therefore mean
    equal contents, and a connector need not know what blocks contain.  A block is moved as a whole, with all its layers
    and groups, as a row of `read_rows`: E elements of the layout's dtype, `devices * layout.block_nbytes` bytes (of any
    group of a `PackedLayout`).

    An engine with `connectors=[connector]` looks up the blocks of every request that joins by `in`, offers every block
    that it fills, and pulls the blocks that its cache lacks while other requests run.  It calls all methods from the
    thread that steps it, so they must not wait for a disk or another machine: threads of the connector do that.  If a
    method raises an Exception, the engine logs it in one line and goes on without the blocks.  Requests never fail for
    it.

    To write one, derive from this class, set `layout`, and implement `__contains__`, `offer` and `pull`.  Engines do
    not end connectors, which may outlive them: whoever makes one closes it, if there is anything to close.

    Attributes:
      layout: the layout of the blocks, as `model.layout` returns it, with any number of blocks.  An engine whose cache
        has other blocks rejects the connector.
      devices: over how many devices the blocks are divided.  A row has their parts, one after the other.
      pull_timeout: after so many seconds without an arrival, the engine releases a pull and computes the blocks.
    """

    layout: Layout
    devices: int = 1
    pull_timeout: float = 60.0

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Whether a pull of this block is likely to succeed.  Called often: for each block of a request that joins."""

    @abstractmethod
    def offer(self, cache: KVCache, blocks: np.ndarray, keys: Sequence[bytes]) -> None:
        """Takes over the contents of blocks, if the connector wants them.

        The engine overwrites the blocks later.  `jaxkv.offload.read_rows(cache, blocks)` copies them on the device, and
        programs that are launched afterwards do not change the copy, so that any thread may read it at any time.
        Reading it here, by `numpy.asarray`, waits for the steps that are running.

        Args:
          cache: the cache.  It must not be kept, because the next step donates it.
          blocks: int32 [n], ids of blocks of the cache.
          keys: their keys [n], none of which was in this connector when the engine checked.  Those of one prompt are in
            its order.
        """

    @abstractmethod
    def pull(self, keys: Sequence[bytes], sharding: jax.sharding.Sharding) -> Pull:
        """Begins to bring blocks to the engine.

        Args:
          keys: distinct keys [n], in the order of the prompt.  Each was in this connector when the request joined.  If
            one of them is not there any more, raise an exception, here or in `poll`.
          sharding: that of the cache's buffer, for a connector that copies blocks to the device itself.  If the devices
            belong to several processes, that of the part which this process has.
        """

    def warm_up(self, cache: KVCache) -> KVCache:
        """Compiles the connector's own programs for this cache, which is donated, and returned unchanged."""
        return cache

    def drop_failed_offers(self) -> None:  # noqa: B027
        """Forgets offered blocks whose contents a failed program has computed.

        Called after an exception in a step, for connectors that read the copies of offered blocks later.  Reading the
        copy of such a block raises an exception.
        """
