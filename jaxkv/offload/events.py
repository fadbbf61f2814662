"""Which blocks a pool has, as a stream of events: for those that route requests to where their prefixes are."""

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Literal, NamedTuple


class BlockEvent(NamedTuple):
    """Blocks have come to a pool, or left it."""

    kind: Literal["stored", "removed"]
    keys: tuple[bytes, ...]
    """Their keys (`jaxkv.offload.prefix_keys`)."""


type Listener = Callable[[BlockEvent], None]


class BlockEvents:
    """Reports to listeners which blocks come and go.  Replaying all events of a listener gives the keys of the pool.

    `subscribe` may be called by any thread.  Listeners are called by the thread that uses the pool, and must return at
    once: `queue.SimpleQueue().put` is one.
    """

    def __init__(self):
        self._lock = Lock()
        self._keys: dict[bytes, None] = {}
        """What listeners know."""
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Adds a listener.  Its first event has the keys of all blocks that the pool has now."""
        with self._lock:
            listener(BlockEvent("stored", tuple(self._keys)))
            self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Removes a listener; ValueError if it has not subscribed."""
        with self._lock:
            self._listeners.remove(listener)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Reports new blocks."""
        with self._lock:
            self._report(BlockEvent("stored", tuple(key for key in keys if key not in self._keys)))

    def removed(self, keys: Iterable[bytes] | None = None) -> None:
        """Reports that blocks have left; by default all."""
        with self._lock:
            gone = self._keys if keys is None else keys
            self._report(BlockEvent("removed", tuple(key for key in gone if key in self._keys)))

    def _report(self, event: BlockEvent) -> None:
        if not event.keys:
            return
        for key in event.keys:
            if event.kind == "stored":
                self._keys[key] = None
            else:
                del self._keys[key]
        for listener in self._listeners:
            listener(event)
