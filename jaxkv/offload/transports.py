"""How the bytes of blocks get from one process to another: by JAX's transfer server, or by NIXL.

The process that has blocks sends a ticket over a connection of its own (`remote.py`), which says how to fetch them.
"""

import base64
import importlib
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from threading import Lock
from typing import Any, override

import jax
import numpy as np

type Ticket = dict[str, Any]
"""What another process needs to fetch blocks: an object of JSON."""


class Fetch(ABC):
    """An array on its way from another process."""

    @abstractmethod
    def poll(self) -> np.ndarray | None:
        """The array; None if it has not arrived.  Raises an Exception if it never will."""


class Transport(ABC):
    """Moves arrays from one process to another.  Each process makes its own.  Methods may be called by any thread."""

    @abstractmethod
    def offer(self, rows: np.ndarray) -> Ticket:
        """Makes an array available to one `fetch`.  It has at least one element, and is not changed until `release`."""

    @abstractmethod
    def release(self, ticket: Ticket, *, fetched: bool) -> None:
        """Ends an offer.  The other side has said that it has fetched the array, or it never will."""

    @abstractmethod
    def fetch(self, ticket: Ticket, shape: tuple[int, ...], dtype: np.dtype) -> Fetch:
        """Begins to fetch the array for which `offer` of another process returned the ticket.  May wait for it."""


class JaxTransport(Transport):
    """`jax.experimental.transfer`, from host memory to host memory by TCP.

    Nothing is encrypted, and there is no password: who can reach the port, which JAX chooses, and knows the number in
    a ticket can read the blocks of the ticket.

    An offer that is never fetched, because the other process has died for example, keeps its memory until this process
    ends.  If that is more than `MAX_UNFETCHED` bytes in all, nothing is offered any more.

    Args:
      host: the address of this machine at which others reach it, such as "10.0.0.7".
    """

    MAX_UNFETCHED = 2**30

    def __init__(self, host: str = "127.0.0.1"):
        from jax.experimental import transfer  # its import registers nothing, but not every jaxlib has it

        self._device = jax.local_devices(backend="cpu")[0]
        self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"])
        self._connections: dict[str, Any] = {}
        self._lock = Lock()
        self._unfetched = 0
        """Bytes of offers that have not been fetched and never will be."""

    @override
    def offer(self, rows):
        if self._unfetched > self.MAX_UNFETCHED:
            raise MemoryError(
                f"{self._unfetched / 1e9:.1f} GB of blocks were offered and never fetched, and JAX cannot free them: "
                "start this process again"
            )
        number = int.from_bytes(os.urandom(7), "little")
        self._server.await_pull(number, [jax.device_put(rows, self._device)])
        return {"address": self._server.address(), "number": number, "nbytes": rows.nbytes}

    @override
    def release(self, ticket, *, fetched):
        if not fetched:
            with self._lock:
                self._unfetched += ticket["nbytes"]

    @override
    def fetch(self, ticket, shape, dtype):
        address = ticket["address"]
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            connection = self._connections[address]
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        described = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return _JaxFetch(connection.pull(ticket["number"], [described])[0])


class _JaxFetch(Fetch):
    def __init__(self, array: jax.Array):
        self._array = array

    @override
    def poll(self):
        return np.asarray(self._array) if self._array.is_ready() else None  # type: ignore[missing-attribute]


class NixlTransport(Transport):
    """NIXL, which reads the memory of the other process, over InfiniBand, TCP or shared memory as UCX finds them.

    NIXL's package requires PyTorch, which it does not need for this.  Install it without: `pip install --no-deps
    nixl-cu12`, and the system's `libibverbs1`.

    Args:
      name: of this process, unlike those of others.  Default: its host and number, and a random part.

    Raises:
      ImportError: NIXL is not installed.
    """

    PACKAGES = "nixl._api", "nixl_cu13._api", "nixl_cu12._api"

    def __init__(self, name: str | None = None):
        api = self._imported()
        name = f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}" if name is None else name
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=True))
        self._lock = Lock()
        self._offers: dict[int, tuple[np.ndarray, Any]] = {}
        """Offered arrays and their registrations, by address."""
        self._running: list[_NixlFetch] = []
        """Transfers that may write to the memory of their array."""

    def _imported(self):
        for package in self.PACKAGES:
            try:
                return importlib.import_module(package)
            except ImportError:
                continue
        raise ImportError(
            "NIXL is not installed: `pip install --no-deps nixl-cu12` (or nixl-cu13), and libibverbs1 from the "
            "system's packages"
        )

    @override
    def offer(self, rows):
        with self._lock:
            address = rows.ctypes.data
            self._offers[address] = rows, self._agent.register_memory([(address, rows.nbytes, 0, "")], "DRAM")
            agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"agent": agent, "memory": address}

    @override
    def release(self, ticket, *, fetched):
        with self._lock:
            _, registration = self._offers.pop(ticket["memory"])
            self._agent.deregister_memory(registration)

    @override
    def fetch(self, ticket, shape, dtype):
        rows = np.empty(shape, dtype)
        with self._lock:
            self._running = [fetch for fetch in self._running if fetch.is_running]
            registration = self._agent.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], "DRAM")
            try:
                peer = self._agent.add_remote_agent(base64.b64decode(ticket["agent"]))
                ours = self._agent.get_xfer_descs([(rows.ctypes.data, rows.nbytes, 0)], "DRAM")
                theirs = self._agent.get_xfer_descs([(ticket["memory"], rows.nbytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", ours, theirs, peer)
                state = self._agent.transfer(handle)
            except Exception:  # such as a ticket of another kind, or a process that has ended
                self._agent.deregister_memory(registration)
                raise
            fetch = _NixlFetch(self._agent, self._lock, handle, registration, rows, state)
            self._running.append(fetch)
        return fetch


class _NixlFetch(Fetch):
    def __init__(self, agent, lock: Lock, handle, registration, rows: np.ndarray, state: str):
        self._agent, self._lock, self._handle, self._registration = agent, lock, handle, registration
        self._rows, self._state = rows, state

    @property
    def is_running(self) -> bool:
        """Whether the memory of the array may still be written.  The lock must be held."""
        if self._handle is None:
            return False
        if self._state not in ("DONE", "ERR"):
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception:  # the other process has ended, for example
                self._state = "ERR"
        if self._state in ("DONE", "ERR"):
            handle, self._handle = self._handle, None
            with suppress(Exception):
                self._agent.release_xfer_handle(handle)
            with suppress(Exception):
                self._agent.deregister_memory(self._registration)
        return self._handle is not None

    @override
    def poll(self):
        with self._lock:
            if self.is_running:
                return None
        if self._state == "ERR":
            raise ConnectionError("NIXL could not read the memory of the other process")
        return self._rows
