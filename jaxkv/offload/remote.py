"""Blocks of a host pool in another process: `BlockServer` on its side, `RemoteBlocks` on that of an engine.

Each `RemoteBlocks` has a connection to each server, on which both send messages, objects of JSON:

    server   {"layout": [fingerprint, elements]}            once, first: those of its blocks
             {"stored": [key, ...]}, {"removed": [...]}     blocks that come to host memory (at first all) and leave it
             {"reply": number, "keys": [...], "ticket": t}  which of the requested blocks it has; null if none
    engine   {"request": number, "keys": [...]}             which blocks it needs
             {"done": number}                               it has fetched them, or does not want them any more

Keys are in hexadecimal.  The blocks themselves take another way: the ticket is that of a `Transport`.
"""

import json
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import batched, count, islice
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from queue import SimpleQueue
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import Any, override

import jax
import numpy as np

from jaxkv.offload.connector import Arrival, Connector, Pull
from jaxkv.offload.events import BlockEvent
from jaxkv.offload.host import CHUNK_BYTES, HostPool
from jaxkv.offload.transfers import Layout, row_of
from jaxkv.offload.transports import Fetch, Ticket, Transport

_log = logging.getLogger("jaxkv")

type Address = tuple[str, int]
"""Host and port."""
type Message = dict[str, Any]

MAX_BYTES = 2**24
"""The longest message."""
MAX_KEYS = 10_000
"""The most keys of an event in a message."""
MAX_UNSENT = 10_000
"""After so many messages that a peer has not read, the connection ends."""
MAX_OFFERS = 4
"""The most requests of a connection whose blocks have not been fetched: each reply has memory of its own."""
MAX_STORED = 2**24
"""The most blocks of a server."""
MAX_STRANGERS = 32
"""The most connections that have not shown the password."""
HANDSHAKE_SECONDS = 10
"""The time within which each message of the handshake must come."""
RETRY_SECONDS = 1.0
"""The time between two attempts to connect to a server."""
SILENT_SECONDS = 30.0
"""No requests are sent to a server for this time after it has not replied in time, unless it sends a message."""
POLL_SECONDS = 0.0005
"""The time between two looks at a transfer, while the engine waits for it."""


class _Link:
    """A connection with a thread that sends, so that nobody waits for a peer that does not read."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._unsent: SimpleQueue[Message | BlockEvent | None] = SimpleQueue()
        self._sender = Thread(target=self._send, name="jaxkv-link", daemon=True)
        self._sender.start()

    def send(self, message: Message | BlockEvent) -> None:
        """Sends a message soon, unless the connection has ended."""
        self._unsent.put(message)
        if self._unsent.qsize() > MAX_UNSENT:
            self.close()

    def messages(self) -> Iterator[Message]:
        """The messages that are received, until the connection ends.  ValueError for one that is not an object."""
        with suppress(EOFError, OSError):
            while True:
                message = json.loads(self._connection.recv_bytes(MAX_BYTES))
                if not isinstance(message, dict):
                    raise ValueError(f"a message is a {type(message).__name__}")
                yield message

    def close(self) -> None:
        """Ends the connection; `messages` ends.  May be called again, and by any thread."""
        self._unsent.put(None)
        _shut_down(self._connection)

    def join(self) -> None:
        """After `close`, waits until nothing uses the connection any more, except for the caller."""
        self._sender.join()

    def _send(self) -> None:
        with suppress(OSError):
            while (item := self._unsent.get()) is not None:
                for message in _messages(item) if isinstance(item, BlockEvent) else (item,):
                    self._connection.send_bytes(json.dumps(message).encode())
        _shut_down(self._connection)


def _messages(event: BlockEvent) -> Iterator[Message]:
    for keys in batched(event.keys, MAX_KEYS):
        yield {event.kind: [key.hex() for key in keys]}


def _shut_down(connection: Connection) -> None:
    """Ends a connection, which threads may be reading; `close` would not wake them."""
    with suppress(OSError), _socket_of(connection) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


def _socket_of(connection: Connection) -> socket.socket:
    """A second descriptor of the connection's socket."""
    return socket.socket(fileno=os.dup(connection.fileno()))


@contextmanager
def _handshake(connection: Connection) -> Iterator[None]:
    """The body raises an OSError if the other side says nothing for `HANDSHAKE_SECONDS`.

    After that, the system ends the connection if the other machine disappears.  It sends messages at once: otherwise, a
    request after a `done` would wait for 40 ms.
    """
    with _socket_of(connection) as duplicate:
        options = (
            ("TCP_NODELAY", 1),
            ("SO_KEEPALIVE", 1),
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
        )
        for name, value in options:
            level = socket.SOL_SOCKET if name.startswith("SO") else socket.IPPROTO_TCP
            duplicate.setsockopt(level, getattr(socket, name), value)
        for seconds in (HANDSHAKE_SECONDS, 0):  # 0: none
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
            if seconds:
                yield


class BlockServer:
    """Lets engines of other processes pull the blocks that a HostPool has in host memory.

    Its threads only read the pool, which goes on to belong to its engine.  Blocks that the pool has evicted from host
    memory cannot be pulled, even if they are on disk.

    Args:
      pool: the pool, such as the connector of an engine that prefills.
      address: host and port to listen at, such as ("10.0.0.7", 7000); port 0 chooses one.
      authkey: a password that both sides have, of at least one byte.  It is not sent; but messages are not encrypted.
      transport: how blocks are sent.  The other side must have one of the same kind.

    Attributes:
      address: host and port at which it listens.

    Raises:
      OSError: the address cannot be used.
      ValueError: `authkey` is not bytes, or is empty.
    """

    def __init__(self, pool: HostPool, address: Address, *, authkey: bytes, transport: Transport):
        self._pool, self._authkey, self._transport = pool, _checked(authkey), transport
        # Without a password: a peer that connects and says nothing must not keep others waiting.
        self._listener = Listener(address, "AF_INET", backlog=16)
        self.address: Address = self._listener.address  # type: ignore[assignment]
        self._most = _blocks_per_reply(pool.row)
        self._open = True
        self._links: set[_Link] = set()
        self._strangers = BoundedSemaphore(MAX_STRANGERS)
        Thread(target=self._accept, name="jaxkv-block-server", daemon=True).start()

    def close(self) -> None:
        """Ends all connections.  Pulls that are on their way fail."""
        self._open = False
        with suppress(OSError):
            Client(self.address, "AF_INET").close()  # so that `accept` returns
        self._listener.close()
        for link in list(self._links):
            link.close()

    def _accept(self) -> None:
        while self._open:
            try:
                connection = self._listener.accept()
                if self._strangers.acquire(blocking=False):
                    Thread(target=self._serve, args=(connection,), name="jaxkv-block-server", daemon=True).start()
                else:
                    connection.close()
            except Exception as error:  # too many open files, or threads
                if self._open:
                    _log.warning("a BlockServer could not accept a connection: %s: %s", type(error).__name__, error)
                    time.sleep(RETRY_SECONDS)

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                with _handshake(connection):
                    deliver_challenge(connection, self._authkey)
                    answer_challenge(connection, self._authkey)
            except Exception:  # another password, or something else than a RemoteBlocks
                return
            finally:
                self._strangers.release()
            link, offers = _Link(connection), dict[int, Ticket]()
            link.send({"layout": [self._pool.fingerprint, self._pool.row.size]})
            self._links.add(link)
            self._pool.events.subscribe(link.send)
            try:
                for message in link.messages() if self._open else ():
                    self._answer(link, message, offers)
            except Exception as error:
                _log.warning("a connection of a BlockServer ended: %s: %s", type(error).__name__, error)
            finally:
                self._pool.events.unsubscribe(link.send)
                self._links.discard(link)
                link.close()
                link.join()
                for ticket in offers.values():
                    with suppress(Exception):
                        self._transport.release(ticket, fetched=False)

    def _answer(self, link: _Link, message: Message, offers: dict[int, Ticket]) -> None:
        if "done" in message:
            self._transport.release(offers.pop(message["done"]), fetched=True)
            return
        number, keys = message["request"], [bytes.fromhex(key) for key in message["keys"][: self._most]]
        if not isinstance(number, int) or number in offers or len(offers) == MAX_OFFERS:
            raise ValueError(f"request {number!r}, while {sorted(offers)} have not been fetched")
        try:
            found, rows = self._pool.rows(keys)
        except Exception as error:  # the transfer of a block to host memory has failed
            _log.warning("%d blocks are not sent: %s: %s", len(keys), type(error).__name__, error)
            found, rows = [], None
        reply: Message = {"reply": number, "keys": [key.hex() for key in found], "ticket": None}
        if rows is not None and found:
            reply["ticket"] = offers[number] = self._transport.offer(rows)
        link.send(reply)


class RemoteBlocks(Connector):
    """Blocks of host pools in other processes, which `BlockServer`s let this one pull.

    Servers may start later, end, and start again: a thread per server connects whenever it can.  A pull fails at once
    if its server ends or no longer has a block.  If a server does not reply within `pull_timeout` seconds, its blocks
    count as absent for 30 seconds, or until it says something.  Nothing is offered to servers.

    Args:
      layout: the layout of the blocks, that of the pools of the servers.
      servers: their addresses, host and port.  Blocks are pulled from the first that has them.
      authkey: the password of the servers.
      transport: how blocks are fetched; of the same kind as those of the servers.
      devices: over how many devices blocks are divided (`model.cache_devices`).
      pull_timeout: after so many seconds without an arrival, an engine ends a pull and computes the blocks.

    Raises:
      ValueError: `layout` is not a layout or is one of context parallelism, or `authkey` is not bytes, or is empty.
    """

    def __init__(
        self,
        layout: Layout,
        servers: Sequence[Address],
        *,
        authkey: bytes,
        transport: Transport,
        devices: int = 1,
        pull_timeout: float = 5.0,
    ):
        self.layout, self.devices, self.pull_timeout = layout, devices, pull_timeout
        row = row_of(layout, devices)
        self._most = _blocks_per_reply(row)
        _checked(authkey)
        self._peers = [_Peer(address, authkey, layout.fingerprint, row, transport) for address in servers]

    @override
    def __contains__(self, key):
        return any(peer.has(key) for peer in self._peers)

    @override
    def offer(self, cache, blocks, keys):
        pass  # a BlockServer, not this, sends blocks of this process to others

    @override
    def pull(self, keys, sharding):
        parts: list[tuple[_Peer, tuple[bytes, ...]]] = []
        left = dict.fromkeys(keys)
        for peer in self._peers:
            found = [key for key in left if peer.has(key)]  # once, as threads change what a peer has
            parts += [(peer, part) for part in batched(found, self._most)]
            for key in found:
                del left[key]
        if left:
            raise KeyError(f"no server has {next(iter(left)).hex()} any more")
        return _RemotePull(parts, self.pull_timeout)

    def wait_for(self, keys: Sequence[bytes], timeout: float) -> bool:
        """Waits until servers have reported all of these blocks; returns whether they did in time.

        A request that is submitted before that computes its blocks.
        """
        deadline = time.monotonic() + timeout
        while not all(key in self for key in keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def close(self) -> None:
        """Ends the connections to all servers; pulls that are on their way fail."""
        for peer in self._peers:
            peer.close()


@dataclass(eq=False)
class _Request:
    """A request for blocks, sent to a server."""

    keys: tuple[bytes, ...]
    sent: float | None = None
    """When it was sent, by `time.monotonic`; None before."""
    fetch: Fetch | None = None
    """The blocks on their way, as soon as the server has replied."""
    error: Exception | None = None
    """Why they will not come."""
    abandoned: bool = False
    """Whether nobody waits for them."""


class _Peer:
    """The client of one server: which blocks the server has, and the requests that were sent to it."""

    def __init__(self, address: Address, authkey: bytes, layout: str, row: jax.ShapeDtypeStruct, transport: Transport):
        self._address, self._authkey, self._transport = address, authkey, transport
        self._layout, self._row = layout, row
        self._keys: set[bytes] = set()
        self._silent_until = 0.0
        """No requests are sent before this time of `time.monotonic`, because it has not replied in time."""
        self._lock = Lock()
        """Held while the following change."""
        self._link: _Link | None = None
        self._numbers = count()
        self._requests: dict[int, _Request] = {}
        """Requests that are not done, by number.  The first `MAX_OFFERS` have been sent."""
        self._closed = Event()
        self._logged = ""
        """The last error that was logged."""
        Thread(target=self._run, name="jaxkv-remote-blocks", daemon=True).start()

    def has(self, key: bytes) -> bool:
        """Whether the server is likely to send a block."""
        return key in self._keys and time.monotonic() >= self._silent_until

    def request(self, keys: tuple[bytes, ...]) -> tuple[int, _Request]:
        """Requests blocks; returns the number of the request, for `done`, and the request."""
        self.sweep()
        request = _Request(keys)
        with self._lock:
            number = next(self._numbers)
            if self._link is None:
                request.error = ConnectionError(f"{self} is not connected")
            else:
                self._requests[number] = request
                self._send(self._link)
        return number, request

    def done(self, number: int) -> None:
        """Says that the blocks of a request have arrived, or never will."""
        with self._lock:
            request = self._requests.pop(number, None)
            if request is not None and self._link is not None:
                if request.fetch is not None:
                    self._link.send({"done": number})
                self._send(self._link)

    def abandon(self, number: int, timeout: float) -> None:
        """Says that nobody waits for a request any more.  If the server has not replied in time, it is silent."""
        with self._lock:
            request = self._requests.get(number)
            if request is None:
                return
            request.abandoned = True
            if request.sent is None:
                del self._requests[number]
            elif request.fetch is None and request.error is None and time.monotonic() - request.sent > timeout:
                self._silent_until = time.monotonic() + SILENT_SECONDS
        self.sweep()

    def close(self) -> None:
        """Ends the connection for good."""
        self._closed.set()
        with self._lock:
            if self._link is not None:
                self._link.close()

    def __repr__(self):
        return "the server at {}:{}".format(*self._address)

    def _send(self, link: _Link) -> None:
        """Sends the requests that may be sent.  The lock is held."""
        for number, request in islice(self._requests.items(), MAX_OFFERS):
            if request.sent is None:
                request.sent = time.monotonic()
                link.send({"request": number, "keys": [key.hex() for key in request.keys]})

    def _run(self) -> None:
        while not self._closed.wait(0):
            try:
                with Client(self._address, "AF_INET") as connection:
                    with _handshake(connection):
                        answer_challenge(connection, self._authkey)
                        deliver_challenge(connection, self._authkey)
                    self._serve(_Link(connection))
            except OSError:
                pass  # the server is not running, or the connection has ended
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                if found != self._logged:  # it is tried again and again
                    _log.warning("%s cannot be used: %s", self, found)
                self._logged = found
            self._closed.wait(RETRY_SECONDS)

    def _serve(self, link: _Link) -> None:
        """Reads messages until the connection ends."""
        try:
            messages = link.messages()
            for message in messages:
                expected = [self._layout, self._row.size]
                if message.get("layout") != expected:
                    raise ValueError(
                        f"its blocks have the layout {message.get('layout')!r} (fingerprint, elements): expected "
                        f"{expected!r}; make its pool and this RemoteBlocks for one layout and number of devices"
                    )
                break
            with self._lock:
                self._link = link
            if self._closed.is_set():
                return
            for message in messages:
                self._silent_until = 0.0
                if "reply" in message:
                    self._replied(message)
                else:
                    self._keys.update(map(bytes.fromhex, message.get("stored", ())))
                    self._keys.difference_update(map(bytes.fromhex, message.get("removed", ())))
                    if len(self._keys) > MAX_STORED:
                        raise ValueError(f"it says that it has more than {MAX_STORED} blocks")
                self.sweep()
        finally:
            with self._lock:
                self._link, self._keys = None, set()
                for request in self._requests.values():
                    request.error = request.error or ConnectionError(f"the connection to {self} has ended")
                self._requests = {}
            link.close()
            link.join()

    def _replied(self, message: Message) -> None:
        request = self._requests.get(message["reply"])
        keys = tuple(map(bytes.fromhex, message["keys"]))
        if request is None or request.fetch is not None or request.error is not None or not {*keys} <= {*request.keys}:
            raise ValueError(f"reply {message['reply']!r} is not one to a request")
        if keys != request.keys:
            missing = next((key for key in request.keys if key not in keys), b"")
            request.error = KeyError(f"{self} does not have {missing.hex()} any more")
        if message["ticket"] is not None:
            shape = (len(keys), *self._row.shape)
            try:
                request.fetch = self._transport.fetch(message["ticket"], shape, np.dtype(self._row.dtype))
            except Exception as error:
                request.error = error

    def sweep(self) -> None:
        """Ends abandoned requests whose blocks are not being written to this process any more."""
        for number, request in list(self._requests.items()):
            if request.abandoned and (request.fetch is not None or request.error is not None):
                try:
                    ended = request.fetch is None or request.fetch.poll() is not None
                except Exception:
                    ended = True
                if ended:
                    self.done(number)


class _RemotePull(Pull):
    """Pulls blocks in parts, one after the other."""

    def __init__(self, parts: list[tuple[_Peer, tuple[bytes, ...]]], timeout: float):
        self._parts, self._timeout = deque(parts), timeout
        self._current: tuple[_Peer, int, _Request] | None = None
        self._begin()

    def _begin(self) -> None:
        self._current = None
        if self._parts:
            peer, keys = self._parts.popleft()
            self._current = peer, *peer.request(keys)

    @override
    def poll(self, timeout):
        deadline = time.monotonic() + timeout
        while (arrival := self._arrived()) is None:
            if time.monotonic() >= deadline:
                return []
            time.sleep(POLL_SECONDS)
        return [arrival]

    def _arrived(self) -> Arrival | None:
        if self._current is None:
            return None
        peer, number, request = self._current
        if request.error is not None:
            raise request.error
        if request.sent is None:
            peer.sweep()  # it waits for the end of others
        rows = None if request.fetch is None else request.fetch.poll()
        if rows is None:
            return None
        peer.done(number)
        self._begin()
        return Arrival(request.keys, rows)

    @override
    def release(self):
        if self._current is not None:
            peer, number, _ = self._current
            peer.abandon(number, self._timeout)
        self._current = None


def _blocks_per_reply(row: jax.ShapeDtypeStruct) -> int:
    """The most blocks that are sent at once."""
    return max(1, CHUNK_BYTES // (row.size * row.dtype.itemsize))


def _checked(authkey: bytes) -> bytes:
    if not isinstance(authkey, bytes) or not authkey:
        raise ValueError(f"`authkey` is {'empty' if authkey == b'' else f'a {type(authkey).__name__}'}: expected bytes")
    return authkey
